"""Where a trainer's weights lie: spread over the processes of a mesh with FSDP2, or (placement.py) whole in one.

Trap: what is given a mixed precision computes in it from its inputs on; parts that must not are sharded on their own.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ratchet.engines.packed import PackedModel
from ratchet.engines.training import TrainingSettings, merge
from ratchet.errors import ConfigError, EngineError


class Placement(ABC):
    """A model prepared for training, and the float32 masters of its weights."""

    trained: list[tuple[str, nn.Parameter]]
    """What the optimizer steps, by Hugging Face names; tied weights once, under the name of their first module."""

    @abstractmethod
    def collect_gradients(self) -> None:
        """Add what a backward pass left to the masters' gradients."""

    @abstractmethod
    def refresh(self) -> None:
        """Compute with the masters' values from now on; called after they changed."""

    @abstractmethod
    def export(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Copies of the full weights on `device`, by Hugging Face names; those of other ranks than 0 are empty.

        What computes in float32 stays in it, the rest is cast to `dtype`.
        """


class Sharded(Placement):
    """A model sharded in place, a decoder layer at a time: the masters are the shards."""

    def __init__(self, module: PackedModel, mesh: DeviceMesh, settings: TrainingSettings) -> None:
        """Raise EngineError for a model without decoder layers."""
        prepare(module, settings)
        model = module.model
        layers = getattr(model.base_model, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise EngineError(f"expected decoder layers in {type(model).__name__}.layers, got {type(layers).__name__}")
        policy = MixedPrecisionPolicy()
        if settings.compute_dtype == "bfloat16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        for part in module.float32_modules():
            fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy())
        fully_shard(module, mesh=mesh, mp_policy=policy)
        self.trained = list(module.named_weights())
        self._is_first = mesh.get_rank() == 0
        self._wide = float32_parameters(module)

    def collect_gradients(self) -> None:
        """FSDP has reduced them into the shards' gradients."""

    def refresh(self) -> None:
        """FSDP gathers from the shards in every forward pass."""

    def export(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Gather one weight after another, so that no rank ever holds all of them in float32."""
        exported: dict[str, Tensor] = {}
        for name, parameter in self.trained:
            full = parameter.detach()
            full = full.full_tensor() if isinstance(full, DTensor) else full
            if self._is_first:
                exported[name] = full.to(device, torch.float32 if parameter in self._wide else dtype, copy=True)
        return exported


def prepare(module: PackedModel, settings: TrainingSettings) -> None:
    """Set what training needs of a model, wherever its weights lie."""
    if settings.gradient_checkpointing:
        module.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Checkpointing works in training mode only; there is no dropout left for the mode to switch on.
    module.train(settings.gradient_checkpointing)


def float32_parameters(module: PackedModel) -> set[nn.Parameter]:
    """The parameters of the parts that compute in float32 whatever the rest does."""
    return {parameter for part in module.float32_modules() for parameter in part.parameters()}


def check_mesh(mesh: DeviceMesh, world_size: int, device: torch.device) -> None:
    """Raise ConfigError for a mesh that is not one dimension of all `world_size` processes on `device`'s kind."""
    if mesh.ndim != 1 or mesh.size() != world_size or distributed.get_world_size() != world_size:
        shape, running = "x".join(str(size) for size in mesh.mesh.shape), distributed.get_world_size()
        raise ConfigError(
            f"expected a device mesh of one dimension with all {world_size} processes, got one of {shape} of {running}"
        )
    if mesh.device_type != device.type:
        raise ConfigError(f"expected a device mesh of {device.type}, got one of {mesh.device_type}")


def names_not_finite(parameters: Sequence[tuple[str, nn.Parameter]], mesh: DeviceMesh) -> list[str]:
    """The names of parameters that hold a number that is not finite, on any rank."""
    shards = [one.to_local() if isinstance(one, DTensor) else one for _, one in parameters]
    # The sum of absolute values is finite where all of them are, and one kernel has it for many tensors.
    sums = torch.stack(torch._foreach_norm([shard.detach() for shard in shards], 1))
    bad = (~torch.isfinite(sums)).to(torch.int32)
    if mesh.size() > 1:
        distributed.all_reduce(bad, op=distributed.ReduceOp.MAX)
    return [name for (name, _), is_bad in zip(parameters, bad.tolist(), strict=True) if is_bad]


def gather(
    sums: Mapping[str, Tensor], largest: Mapping[str, Tensor], norm: Tensor, mesh: DeviceMesh
) -> tuple[dict[str, float], dict[str, float], float]:
    """What the shares of all ranks come to, and the norm; here a mini-batch waits for the device, once."""
    numbers: list[float] = torch.stack([*sums.values(), *largest.values(), norm]).tolist()
    mine = (dict(zip(sums, numbers, strict=False)), dict(zip(largest, numbers[len(sums) :], strict=False)))
    ranks = [mine] * mesh.size()
    if mesh.size() > 1:
        # By name: a rank without a token does not know all of them.
        distributed.all_gather_object(ranks, mine)
    return merge([first for first, _ in ranks], sum), merge([second for _, second in ranks], max), numbers[-1]
