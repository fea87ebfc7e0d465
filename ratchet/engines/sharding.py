"""Spreading a model over the processes of a mesh with FSDP2.

Trap: what is given a mixed precision computes in it from its inputs on; parts that must not are sharded on their own.
"""

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ratchet.engines.packed import PackedModel
from ratchet.engines.training import TrainingSettings
from ratchet.errors import ConfigError, EngineError


def check_mesh(mesh: DeviceMesh, world_size: int, device: torch.device) -> None:
    """Raise ConfigError for a mesh that is not one dimension of all `world_size` processes on `device`'s kind."""
    if mesh.ndim != 1 or mesh.size() != world_size or distributed.get_world_size() != world_size:
        shape, running = "x".join(str(size) for size in mesh.mesh.shape), distributed.get_world_size()
        raise ConfigError(
            f"expected a device mesh of one dimension with all {world_size} processes, got one of {shape} of {running}"
        )
    if mesh.device_type != device.type:
        raise ConfigError(f"expected a device mesh of {device.type}, got one of {mesh.device_type}")


def local_shard(parameter: Tensor) -> Tensor:
    """The part of a parameter that this rank holds."""
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()


def shard(module: PackedModel, mesh: DeviceMesh, settings: TrainingSettings) -> None:
    """Shard a model in place, a decoder layer at a time; raises EngineError for one without such layers."""
    model = module.model
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Checkpointing works in training mode only; there is no dropout left for the mode to switch on.
    module.train(settings.gradient_checkpointing)
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
