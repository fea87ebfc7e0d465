"""What the kernels of a GPU keep for the backward pass, as operations that run on tensors without memory.

Trap: these say how many bytes there are and when they go, nothing else; the numbers in their tensors mean nothing. Each
stands for one of `ratchet.engines` (named at its side), and must keep what that keeps.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from ratchet.engines import log_probs
from ratchet.engines.liger import use_liger

_ON_GPU, _ON_CPU = "ratchet_planned_gpu", "ratchet_planned_cpu"


class _Norm(torch.autograd.Function):
    """LigerRMSNormFunction: keeps its input and one float32 a row; the gradient may take the place of what came."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, eps: float, offset: float, casting: str, in_place: bool, row: Any
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        ctx.in_place = in_place
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, _ = ctx.saved_tensors
        of_hidden = gradient if ctx.in_place else torch.empty_like(hidden)
        return of_hidden, torch.empty_like(weight), None, None, None, None, None


class _Product(torch.autograd.Function):
    """LigerSiLUMulFunction, LigerGELUMulFunction: keep both factors, into which the gradients are written."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return gate, up


class _Rope(torch.autograd.Function):
    """LigerRopeFunction: turns queries and keys where they lie."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return query.view_as(query), key.view_as(key)

    @staticmethod
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor) -> tuple[Tensor | None, ...]:
        return of_query, of_key, None, None


class _Attention(torch.autograd.Function):
    """A flash kernel: keeps queries, keys, values, what it returns, and one float32 a query and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended = torch.empty_like(query)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, attended, sums)
        return attended

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _Head(torch.autograd.Function):
    """`log_probs._ChunkedLogProbs` with its kernels: a block of logits at a time, once in each direction."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        blocks = _blocks(hidden, weight)
        sums = hidden.new_empty((4, len(blocks), len(hidden)), dtype=torch.float32)
        for block in blocks:
            functional.linear(hidden, weight[block])
        ctx.save_for_backward(hidden, weight, sums.new_empty((2, len(hidden))))
        return sums[0, 0].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, _ = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden, dtype=torch.float32)
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for block in _blocks(hidden, weight):
            products = functional.linear(hidden, weight[block])
            if of_hidden.dtype == products.dtype:
                of_hidden.addmm_(products, weight[block])
            else:
                of_hidden += products @ weight[block]
        return of_hidden.to(hidden.dtype), of_weight


def head_log_probs(hidden: Tensor, weight: Tensor) -> Tensor:
    """Stand for log-probs [N] of hidden states [N, H] under an output layer [V, H]."""
    found: Tensor = _Head.apply(hidden, weight)  # type: ignore[no-untyped-call]
    return found


def use_memory_of(model: PreTrainedModel, device: str, *, has_liger: bool) -> None:
    """Give the attention of `model` the memory that it has on "cpu" or "cuda", and there its other layers Liger's."""
    model.set_attn_implementation(_ON_GPU if device == "cuda" else _ON_CPU)
    if has_liger and device == "cuda":
        kernels = {"LigerSiLUMulFunction": _Product, "LigerGELUMulFunction": _Product}
        use_liger(model, SimpleNamespace(LigerRMSNormFunction=_Norm, LigerRopeFunction=_Rope, **kernels))


def _blocks(hidden: Tensor, weight: Tensor) -> list[slice]:
    return list(log_probs.vocabulary_blocks(len(hidden), weight.shape[0], has_kernels=True))


def _on_gpu(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """`packed_attention._torch_varlen`, which copies grouped keys; flash-attn's own kernel copies none."""
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return _attend(q, k, v).unsqueeze(0), None


def _on_cpu(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """`packed_attention._attend`: each sequence by itself, and then all of them copied together."""
    return torch.cat([_attend(query, key, value)], dim=2).transpose(1, 2).contiguous(), None


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    attended: Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return attended


AttentionInterface.register(_ON_GPU, _on_gpu)
AttentionInterface.register(_ON_CPU, _on_cpu)
