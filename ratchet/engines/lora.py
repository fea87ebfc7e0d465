"""LoRA: a product of two narrow matrices beside each linear layer is trained instead of the layer.

Trap: nothing beyond the trainer knows of adapters. They start at a product of 0, so that version 0 is the base bit for
bit, and what is published is the base with the products added, under the base's names.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ratchet.engines.packed import PackedModel
from ratchet.engines.training import TrainingSettings
from ratchet.errors import ConfigError

_ADAPTER = "default"


@dataclass(frozen=True, slots=True)
class Adapter:
    """What is added to one weight [O, I]: scale * B @ A, with A [R, I] and B [O, R]."""

    weight: str
    """Its Hugging Face name."""
    scale: float

    @property
    def a(self) -> str:
        """Name of A."""
        return f"{self.weight.removesuffix('.weight')}.lora_A.weight"

    @property
    def b(self) -> str:
        """Name of B."""
        return f"{self.weight.removesuffix('.weight')}.lora_B.weight"

    def merged(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The weight with the product added, float32."""
        base = weights[self.weight].float()
        product = self.scale * (weights[self.b] @ weights[self.a])
        # Where nothing is added the base stays bit for bit: -0.0 + 0.0 is 0.0.
        return torch.where(product == 0, base, base + product)


def add_adapters(module: PackedModel, settings: TrainingSettings) -> list[Adapter]:
    """Put adapters beside the linear layers that the settings name, and freeze all else that computes in their dtype.

    Without names it is every linear layer but the output layer. What computes in float32 (a value head, which starts at
    0) is trained whole. Raises ConfigError for a name that no such layer has, and without peft.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise ConfigError(f"lora_rank {settings.lora_rank} needs the package peft: {error}") from error

    layers = _layers(module, settings.lora_target_modules)
    config = LoraConfig(
        r=settings.lora_rank, lora_alpha=settings.lora_alpha, lora_dropout=0.0, bias="none", target_modules=layers
    )
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(config, module.model, _ADAPTER)
    wide = {parameter for part in module.float32_modules() for parameter in part.parameters()}
    adapters = []
    for name, parameter in module.named_weights():
        is_adapter = f".{_ADAPTER}." in name
        parameter.requires_grad_(is_adapter or parameter in wide)
        if is_adapter and ".lora_A." in name:
            layer = name.partition(".lora_A.")[0]
            _initialise(parameter, f"{settings.seed}/lora/{layer}")
            adapters.append(Adapter(f"{layer}.weight", settings.lora_alpha / settings.lora_rank))
    return adapters


def plain_name(name: str) -> str:
    """The name of a weight as it was before `add_adapters`; an adapter's without what peft calls the adapter."""
    return name.replace(".base_layer.", ".").replace(f".{_ADAPTER}.", ".")


def _layers(module: PackedModel, wanted: tuple[str, ...]) -> list[str]:
    """Full names in the Hugging Face model of the linear layers that `wanted` names, in whole or by their end."""
    model = module.model
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and part is not head]
    for end in wanted:
        if not any(f".{name}".endswith(f".{end}") for name in linear):
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
            raise ConfigError(f"expected lora_target_modules among the linear layers {known}, got {end!r}")
    return [name for name in linear if not wanted or any(f".{name}".endswith(f".{end}") for end in wanted)]


@torch.no_grad()
def _initialise(parameter: nn.Parameter, place: str) -> None:
    """Draw A as a linear layer's weight is drawn, on the CPU, where draws are the same whatever the device."""
    generator = torch.Generator()
    generator.manual_seed(random.Random(place).getrandbits(63))
    drawn = nn.init.kaiming_uniform_(torch.empty(parameter.shape), a=math.sqrt(5), generator=generator)
    parameter.copy_(drawn)
