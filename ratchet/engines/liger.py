"""Faster layers for training on a GPU: Liger's kernels, or torch's compiler.

Trap: Liger's own way of patching replaces functions and classes of transformers for the whole process, in which other
models score and sample; here only the modules of the model that is given are touched. Its losses are not used: they
know nothing of packed rows.
"""

import logging
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ratchet.engines.packed_attention import run_attention_uncompiled
from ratchet.engines.training import TrainingSettings

logger = logging.getLogger(__name__)

_FAMILIES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
}
"""Model type to what the names of its modules' classes begin with."""
_ROPE = "apply_rotary_pos_emb"


def make_faster(model: PreTrainedModel, settings: TrainingSettings, device: torch.device) -> None:
    """Speed the layers of a loaded model up as `settings` say, before it is sharded; on a CPU nothing is done.

    Compiled layers need no kernels of others.
    """
    if device.type != "cuda":
        return
    if settings.use_torch_compile:
        compile_layers(model)
    elif settings.use_liger:
        use_liger(model)


def compile_layers(model: PreTrainedModel, **options: Any) -> None:
    """Compile each decoder layer for any number of tokens, but for its attention, which reads the batch's borders."""
    run_attention_uncompiled()
    layers: Any = model.base_model.layers
    for layer in layers:
        layer.compile(dynamic=True, **options)


def use_liger(model: PreTrainedModel, operations: Any = None) -> None:
    """Run norms, rotary embeddings and gated layers of `model` by Liger; where it cannot, the log says so once.

    `operations` are what is taken in place of the package's module `liger_kernel.ops`.
    """
    operations = _operations() if operations is None else operations
    family = _FAMILIES.get(model.config.model_type)
    if operations is None:
        _say("Liger's kernels are not used: the package liger-kernel cannot be imported")
    elif family is None:
        _say(f"Liger's kernels are not used: they are not tried with models of type {model.config.model_type}")
    else:
        for module in model.modules():
            _exchange(module, type(module).__name__.removeprefix(family), family, operations)


def _exchange(module: Any, kind: str, family: str, operations: Any) -> None:
    match kind:
        case "RMSNorm":
            norm = _gemma_norm if family.startswith("Gemma") else _norm
            module.forward = partial(norm, operations.LigerRMSNormFunction.apply, module)
        case "MLP":
            product = _product(type(module.act_fn).__name__, operations)
            if product is None:
                _say(f"Liger has no kernel for layers gated by {type(module.act_fn).__name__}")
            else:
                module.forward = partial(_gated, product, module)
        case "Attention":
            if _ROPE in module.forward.__code__.co_names:
                module.forward = _rebound(module.forward, _ROPE, partial(_rope, operations.LigerRopeFunction.apply))
            else:
                _say(f"Liger's rotary embeddings are not used: {type(module).__name__} does not call {_ROPE}")


def _norm(function: Callable[..., Tensor], module: Any, hidden: Tensor) -> Tensor:
    # The gradient may be overwritten: nothing but products reads a norm of these families.
    return function(hidden, module.weight, module.variance_epsilon, 0.0, "llama", True, None)


def _gemma_norm(function: Callable[..., Tensor], module: Any, hidden: Tensor) -> Tensor:
    # Sums with the residual read these norms too, so that their gradient is not theirs alone.
    return function(hidden, module.weight, module.eps, 1.0, "gemma", False, None)


def _gated(product: Callable[[Tensor, Tensor], Tensor], module: Any, hidden: Tensor) -> Tensor:
    output: Tensor = module.down_proj(product(module.gate_proj(hidden), module.up_proj(hidden)))
    return output


def _product(activation: str, operations: Any) -> Callable[[Tensor, Tensor], Tensor] | None:
    """activation(a) * b; Liger has two."""
    names = {"SiLUActivation": "LigerSiLUMulFunction", "GELUTanh": "LigerGELUMulFunction"}
    return getattr(operations, names[activation]).apply if activation in names else None


def _rope(
    function: Callable[..., tuple[Tensor, Tensor]], query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return function(query, key, cos, sin)


def _rebound(method: MethodType, name: str, value: Any) -> MethodType:
    """Return a method for its object alone in which the global `name` means `value`."""
    own: Any = method.__func__
    function = FunctionType(
        own.__code__, {**own.__globals__, name: value}, own.__name__, own.__defaults__, own.__closure__
    )
    function.__kwdefaults__ = own.__kwdefaults__
    return MethodType(function, method.__self__)


@cache
def _operations() -> ModuleType | None:
    if find_spec("liger_kernel") is None:
        return None
    try:
        import liger_kernel.ops as operations
    except ImportError:
        return None
    assert isinstance(operations, ModuleType)
    return operations


@cache
def _say(message: str) -> None:
    """Log `message` once in a process, not once a module."""
    logger.info("%s", message)
