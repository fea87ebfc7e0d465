"""Causal attention over sequences packed one after another, each seeing only itself.

Trap: a dense block-diagonal mask costs memory and time with the square of the packed length, and models with
soft-capped attention scores are silently wrong under `sdpa`. Here no mask over the packed length ever exists: on a
GPU one variable-length flash kernel runs over the borders (flash-attn's where it is installed, else torch's own),
elsewhere each sequence is attended to on its own.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ratchet.engines.transfer import to_device
from ratchet.errors import EngineError

logger = logging.getLogger(__name__)

PACKED_ATTENTION = "ratchet_packed"

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None, int | None], Tensor]
"""(query, key, value, borders, longest, scaling, window): causal attention; query [T, heads, head_dim] to the same."""


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch `model` to packed attention; every forward must then be given `attention_arguments` of its batch.

    Raises EngineError for a model whose attention cannot be exchanged.
    """
    model.set_attn_implementation(PACKED_ATTENTION)
    if model.config._attn_implementation != PACKED_ATTENTION:
        raise EngineError(f"expected a model whose attention can be exchanged, got {type(model).__name__}")


def run_attention_uncompiled() -> None:
    """Keep torch's compiler out of packed attention from now on, in the process: each batch has other lengths."""
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(_packed_attention))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Where the sequences of a batch lie, in one object: for a list, torch's compiler would compile for each length."""

    lengths: list[int]
    """Tokens of each sequence."""
    borders: Tensor
    """int32 [sequences + 1]: where each begins, and the end of the last."""
    longest: int


def attention_arguments(sequence_lengths: list[int], device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a packed forward. Example: sequence_lengths [3, 2] gives borders [0, 3, 5]."""
    borders = to_device(np.array([0, *accumulate(sequence_lengths)], np.int32), device)
    return {"sequences": PackedSequences(sequence_lengths, borders, max(sequence_lengths))}


def _packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sequences: PackedSequences | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention as the transformers library calls it: query [1, heads, T, head_dim] to [1, T, heads, head_dim]."""
    if sequences is None or sum(sequences.lengths) != query.shape[2]:
        raise EngineError(f"expected sequence lengths that sum to {query.shape[2]}, got {sequences}")
    if unused.get("s_aux") is not None:
        raise EngineError("attention sinks are not supported by packed attention")
    longest = sequences.longest
    window = sliding_window if sliding_window is not None and sliding_window < longest else None
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and softcap is None:
        q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
        return _kernel()(q, k, v, sequences.borders, longest, scaling, window).unsqueeze(0), None
    _say("attention: torch's scaled_dot_product_attention, one sequence after another")
    split = (torch.split(heads, sequences.lengths, dim=2) for heads in (query, key, value))
    pieces = [_attend(*one, scaling=scaling, window=window, softcap=softcap) for one in zip(*split, strict=True)]
    return torch.cat(pieces, dim=2).transpose(1, 2).contiguous(), None


@cache
def _kernel() -> Kernel:
    """Return flash-attn's kernel where it can be imported, else torch's, which copies grouped key heads."""
    instead = "it is not installed"
    if find_spec("flash_attn") is not None:
        try:
            from flash_attn import flash_attn_varlen_func
        except ImportError as error:
            # Compiled against another torch, it is there and cannot be loaded.
            instead = f"it cannot be imported ({error})"
        else:
            _say("attention: flash-attn")
            return partial(_flash_attn, flash_attn_varlen_func)
    _say(f"attention: torch's variable-length kernel instead of flash-attn: {instead}")
    return _torch_varlen


def _flash_attn(
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    attended = function(
        query,
        key,
        value,
        cu_seqlens_q=borders,
        cu_seqlens_k=borders,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scaling,
        causal=True,
        window_size=_flash_window(window),
    )
    assert isinstance(attended, Tensor)
    return attended


def _torch_varlen(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # The kernel of torch 2.11 takes as many key heads as query heads.
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    size = _flash_window(window)
    attended = varlen_attn(query, key, value, borders, borders, longest, longest, scale=scaling, window_size=size)
    assert isinstance(attended, Tensor)
    return attended


def _flash_window(window: int | None) -> tuple[int, int]:
    """Keys before and after a query that it sees beside its own; -1 is all. Example: window 4 gives (3, 0)."""
    return (-1 if window is None else window - 1, 0)


@cache
def _say(message: str) -> None:
    """Log `message` once in a process, not once a layer."""
    logger.info("%s", message)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None, softcap: float | None
) -> Tensor:
    """One sequence: query [1, heads, length, head_dim], key and value with as many heads or a divisor of them."""
    length = query.shape[2]
    if window is not None and window >= length:
        window = None
    if window is None and softcap is None:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    place = torch.arange(length, device=query.device)
    distance = place[:, None] - place[None, :]
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    if softcap is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * scale / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value


def _no_mask(*_: Any, **__: Any) -> None:
    """The mask that transformers builds for packed attention: none, since the lengths say it all."""


AttentionInterface.register(PACKED_ATTENTION, _packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)
