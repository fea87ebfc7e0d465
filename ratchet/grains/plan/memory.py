"""The memory that training and scoring a model take, by running them through without weights.

The model is that of its config.json on torch's device "meta", laid out by the trainer's own code; what lives at once is
counted. Trap: on a GPU, stand-ins keep what the kernels keep (`stand_ins`); workspaces of matrix products and what an
allocator cannot use are in no count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig

from ratchet.engines.log_probs import PackedLogProbs
from ratchet.engines.lora import add_adapters
from ratchet.engines.model import torch_dtype
from ratchet.engines.packed import PackedModel, PackedTokens
from ratchet.engines.placement import OneProcess
from ratchet.engines.training import TrainingSettings
from ratchet.engines.value_model import ValueModel
from ratchet.grains.plan import stand_ins
from ratchet.grains.plan.meter import LiveBytes, nbytes

Kind = Literal["policy", "values"]
"""A causal language model with its output layer, or a backbone with a head of one number."""
Device = Literal["cpu", "cuda"]

_META = torch.device("meta")
_ADAM_BYTES = 8
"""Of a trained weight: two moments in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Bytes that a trainer holds on each of its devices."""

    trained: int
    """Elements that are trained, over all devices; with adapters, theirs."""
    num_tensors: int
    """Of them."""
    weights: int
    """Masters, and the copies that compute."""
    optimizer: int
    gradients: int
    """Between micro-batches."""
    activations: int
    """The most beside all of these while a micro-batch goes forward and back, its own gradients included."""

    @property
    def resident(self) -> int:
        """What stays between updates."""
        return self.weights + self.optimizer

    @property
    def passing(self) -> int:
        """What an update takes beside that, at most."""
        return self.gradients + self.activations


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch."""

    lengths: Sequence[int]
    """Tokens of each of its sequences."""
    scored: int
    """Tokens, or places, that the loss looks at."""

    @property
    def tokens(self) -> int:
        """Of all its sequences."""
        return sum(self.lengths)


def build(config: PreTrainedConfig, kind: Kind) -> PackedModel:
    """Return the model of a configuration in float32, without memory."""
    auto: Any = AutoModelForCausalLM if kind == "policy" else AutoModel
    with _META:
        model = auto.from_config(config, dtype=torch.float32)
        if kind == "values":
            return ValueModel(model, nn.Linear(config.get_text_config().hidden_size, 1, bias=False))
    return PackedLogProbs(model, temperature=1.0)


def weight_sizes(config: PreTrainedConfig, kind: Kind = "policy") -> dict[str, int]:
    """Return name -> elements of every weight of a model, tied ones once."""
    return {name: parameter.numel() for name, parameter in build(config, kind).named_weights()}


def training(
    config: PreTrainedConfig,
    settings: TrainingSettings,
    batch: Batch,
    *,
    kind: Kind,
    device: Device,
    num_micro_batches: int,
    world_size: int = 1,
    base_dtype: str = "bfloat16",
) -> Training:
    """Run one process's update through; `base_dtype` is that of the folder's weights, in which frozen ones may stay.

    With a `world_size` weights, gradients and moments are shared out, with two layers gathered at a time.
    """
    module = build(config, kind)
    stand_ins.use_memory_of(module.model, device, has_liger=settings.use_liger and not settings.use_torch_compile)
    adapters: Any = ()
    if settings.lora_rank:
        adapters = add_adapters(module, settings)
        _narrow_frozen(module, settings)
    placement = OneProcess(module, settings, adapters)
    masters = [master for _, master in placement.trained]
    # A frozen weight that the dtype cannot hold keeps its master.
    is_wider = base_dtype == "float32" != settings.compute_dtype
    frozen = sum(4 * one.numel() for one in module.parameters() if not one.requires_grad) if is_wider else 0
    own = [*module.parameters(), *module.buffers(), *masters]
    with LiveBytes(own) as meter:
        for _ in range(min(num_micro_batches, 2)):
            _forward(module, batch, device).sum().backward()  # type: ignore[no-untyped-call]
            placement.collect_gradients()
    gradients = nbytes(master.grad for master in masters if master.grad is not None)
    weights, trained = nbytes(own) + frozen, sum(master.numel() for master in masters)
    held = gradients if num_micro_batches > 1 else 0
    activations = meter.peak - held
    if world_size == 1:
        return Training(
            trained=trained,
            num_tensors=len(masters),
            weights=weights,
            optimizer=_ADAM_BYTES * trained,
            gradients=held,
            activations=activations,
        )
    gathered = _gathered(module, settings)
    return Training(
        trained=trained,
        num_tensors=len(masters),
        weights=4 * trained // world_size,
        optimizer=_ADAM_BYTES * trained // world_size,
        gradients=4 * trained // world_size,
        activations=activations + 3 * gathered,
    )


def scoring(config: PreTrainedConfig, batch: Batch, *, kind: Kind, dtype: str, device: Device) -> tuple[int, int]:
    """Return the bytes of a model that only scores, and of what a forward pass takes beside them, at most."""
    module = build(config, kind)
    stand_ins.use_memory_of(module.model, device, has_liger=False)
    module.model.to(torch_dtype(dtype))
    own = [*module.parameters(), *module.buffers()]
    with torch.no_grad(), LiveBytes(own) as meter:
        _forward(module, batch, device)
    return nbytes(own), meter.peak


def _forward(module: PackedModel, batch: Batch, device: Device) -> Tensor:
    packed = PackedTokens(
        input_ids=torch.empty((1, batch.tokens), dtype=torch.int64, device=_META),
        position_ids=torch.empty((1, batch.tokens), dtype=torch.int64, device=_META),
        sequence_lengths=list(batch.lengths),
        predictors=torch.empty(batch.scored, dtype=torch.int64, device=_META),
        targets=torch.empty(batch.scored, dtype=torch.int64, device=_META),
    )
    if isinstance(module, PackedLogProbs):
        head = module.model.get_output_embeddings().weight
        if device == "cuda" and module.softcap is None:
            return stand_ins.head_log_probs(module.hidden(packed), head)
        log_probs: Tensor = module(packed, with_entropy=True).log_probs
        return log_probs
    values: Tensor = module(packed)
    return values


def _narrow_frozen(module: PackedModel, settings: TrainingSettings) -> None:
    """Cast what is frozen, as `placement` does where nothing is lost by it; there is nothing to compare here."""
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.detach().to(torch_dtype(settings.compute_dtype))


def _gathered(module: PackedModel, settings: TrainingSettings) -> int:
    """Bytes of the layer that is gathered and of what lies outside the layers, in the dtype that computes."""
    layers: Any = getattr(module.model.base_model, "layers", [])
    inside = [sum(one.numel() for one in layer.parameters()) for layer in layers]
    outside = sum(one.numel() for one in module.parameters()) - sum(inside)
    return int((max(inside, default=0) + outside) * torch_dtype(settings.compute_dtype).itemsize)
