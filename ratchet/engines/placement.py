"""Laying out a trainer's weights: sharded (sharding.py) over several processes, whole in one.

One process holds float32 masters, and a copy in the dtype that the model computes in. Trap: the copy is what the model
runs with; its gradients belong to the masters, and it is stale from the optimizer's step until `refresh`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ratchet.engines.lora import Adapter, add_adapters, plain_name
from ratchet.engines.model import torch_dtype
from ratchet.engines.packed import PackedModel
from ratchet.engines.sharding import Placement, Sharded, float32_parameters, prepare
from ratchet.engines.training import TrainingSettings
from ratchet.errors import ConfigError


def place_model(module: PackedModel, mesh: DeviceMesh, settings: TrainingSettings) -> Placement:
    """Put adapters into a float32 model if there shall be any, and lay it out over the processes of a mesh.

    Raises ConfigError for adapters in more than one process or for layers that are not there.
    """
    if mesh.size() == 1:
        return OneProcess(module, settings, add_adapters(module, settings) if settings.lora_rank else ())
    if settings.lora_rank:
        raise ConfigError(f"expected one process for lora_rank {settings.lora_rank}, got {mesh.size()}")
    return Sharded(module, mesh, settings)


class OneProcess(Placement):
    """A model that is not sharded; with adapters, they are what is trained, and full weights what is exported."""

    def __init__(self, module: PackedModel, settings: TrainingSettings, adapters: Sequence[Adapter] = ()) -> None:
        """`module` is in float32."""
        prepare(module, settings)
        dtype = torch_dtype(settings.compute_dtype)
        wide = float32_parameters(module)
        self._parameters = {plain_name(name): parameter for name, parameter in module.named_weights()}
        self._wide = {name for name, parameter in self._parameters.items() if parameter in wide}
        self._masters = {
            name: parameter if parameter in wide or parameter.dtype == dtype else _narrowed(parameter, dtype)
            for name, parameter in self._parameters.items()
        }
        self._adapters = {adapter.weight: adapter for adapter in adapters}
        self.trained = [(name, master) for name, master in self._masters.items() if master.requires_grad]
        copies = [(master, self._parameters[name]) for name, master in self.trained]
        self._copies = [(master, copy) for master, copy in copies if master is not copy]

    def collect_gradients(self) -> None:
        """Add the gradients of the copies to those of the masters, in float32."""
        found = [(master, copy.grad) for master, copy in self._copies if copy.grad is not None]
        new = [(master, gradient) for master, gradient in found if master.grad is None]
        more = [(master.grad, gradient) for master, gradient in found if master.grad is not None]
        if more:
            # Widened first: kernels over many tensors at once want one dtype.
            sums, gradients = [into for into, _ in more], [gradient for _, gradient in more]
            wide = [torch.empty_like(into) for into in sums]
            torch._foreach_copy_(wide, gradients)
            torch._foreach_add_(sums, wide)
        if new:
            sums, gradients = [torch.empty_like(master) for master, _ in new], [gradient for _, gradient in new]
            torch._foreach_copy_(sums, gradients)
            for (master, _), of_master in zip(new, sums, strict=True):
                master.grad = of_master
        for _, copy in self._copies:
            copy.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the masters into the copies."""
        if self._copies:
            torch._foreach_copy_([copy for _, copy in self._copies], [master for master, _ in self._copies])

    @torch.no_grad()
    def export(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Copy without waiting between weights, into pinned memory where they leave a GPU."""
        sources = dict(self._full_weights(dtype))
        own = self.trained[0][1].device
        leaves_gpu = own.type == "cuda" and device.type == "cpu"
        exported = {
            name: torch.empty(
                source.shape,
                dtype=torch.float32 if name in self._wide else dtype,
                device=device,
                pin_memory=leaves_gpu,
            )
            for name, source in sources.items()
        }
        torch._foreach_copy_(list(exported.values()), list(sources.values()), non_blocking=True)
        if leaves_gpu:
            torch.cuda.current_stream(own).synchronize()
        return exported

    def _full_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every weight of the model, in `dtype` already where the model computes in it or it was put together here."""
        parts = {part for adapter in self._adapters.values() for part in (adapter.a, adapter.b)}
        for name, master in self._masters.items():
            if name in self._adapters:
                yield name, self._adapters[name].merged(self._masters).to(dtype)
            elif name not in parts:
                yield name, self._parameters[name] if self._parameters[name].dtype == dtype else master


def _narrowed(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Cast a parameter in place, and return its float32 master: itself where it is frozen and nothing was lost."""
    master = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    parameter.data = master.detach().to(dtype)
    is_exact = not parameter.requires_grad and torch.equal(parameter.detach().float(), master)
    return parameter if is_exact else master
