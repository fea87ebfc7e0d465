"""From losses per token to one loss: a weight for each token, such that the loss is a plain weighted sum.

Trap: the denominators belong to the whole mini-batch, on all ranks. Averaging within a micro-batch and then over
micro-batches weighs a token by its neighbours; with weights from the totals, any split gives the same sum.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from ratchet.algorithms.batch import Compat
from ratchet.algorithms.catalog import LossAggMode


@dataclass(frozen=True, slots=True)
class LossTotals:
    """Counts over a whole mini-batch, whatever its split.

    Example: LossTotals(num_tokens=300, num_sequences=2) for completions of 100 and 200 tokens and an empty one.
    """

    num_tokens: int
    """Completion tokens inside the loss mask."""
    num_sequences: int
    """Completions with at least one token inside the loss mask; the others count nowhere."""

    @classmethod
    def of(cls, num_loss_tokens: Iterable[int]) -> "LossTotals":
        """Count from the number of loss tokens of each completion."""
        counts = [count for count in num_loss_tokens if count > 0]
        return cls(num_tokens=sum(counts), num_sequences=len(counts))


def token_weights(
    num_loss_tokens: Tensor, *, mode: LossAggMode, totals: LossTotals, norm_length: float | None = None
) -> Tensor:
    """Weight of every loss token of each completion, float64 [B]; the loss is the sum of loss * weight over them.

    `num_loss_tokens` [B] counts the loss tokens of each completion of a micro-batch; `totals` counts the mini-batch.
    With N tokens and S completions in total, and n tokens in a completion: "token-mean" 1/N, "token-sum" 1,
    "seq-mean-token-sum" 1/S, "seq-mean-token-sum-norm" 1/(S * norm_length), "seq-mean-token-mean" 1/(S * n).
    "token-mean" is DAPO's (https://arxiv.org/abs/2503.14476), "seq-mean-token-mean" the original GRPO's and
    "seq-mean-token-sum-norm" Dr. GRPO's (https://arxiv.org/abs/2503.20783).

    A completion without loss tokens has weight 0, and all weights are 0 where the totals are 0, so that nothing is
    ever divided by 0. Raises ValueError for another mode or a missing `norm_length`.
    """
    counts = num_loss_tokens.to(torch.float64)
    is_used = counts > 0
    sequences = max(totals.num_sequences, 1)
    match mode:
        case "token-mean":
            weights = torch.full_like(counts, 1.0 / max(totals.num_tokens, 1))
        case "token-sum":
            weights = torch.ones_like(counts)
        case "seq-mean-token-sum":
            weights = torch.full_like(counts, 1.0 / sequences)
        case "seq-mean-token-sum-norm":
            if norm_length is None or not norm_length > 0:
                raise ValueError(f"expected a norm_length above 0 for {mode}, got {norm_length}")
            weights = torch.full_like(counts, 1.0 / (sequences * norm_length))
        case "seq-mean-token-mean":
            weights = 1.0 / (sequences * counts.clamp(min=1.0))
        case _:
            raise ValueError(f"expected a loss aggregation of {', '.join(get_args(LossAggMode))}, got {mode!r}")
    return torch.where(is_used, weights, torch.zeros_like(weights))


def aggregate(
    loss: Tensor,
    mask: Tensor,
    mode: LossAggMode,
    *,
    totals: LossTotals | None = None,
    norm_length: float | None = None,
    num_ranks: int = 1,
    compat: Compat = "ratchet",
) -> Tensor:
    """Return one loss from losses per token [B, T] padded to one length: the padded form of `token_weights`.

    `totals` counts the mini-batch over all ranks; without it this batch is the mini-batch. Where gradients are averaged
    over `num_ranks` afterwards, the loss is multiplied by them. What is outside `mask` (bool or 0 and 1) counts
    nowhere, be it NaN, and an empty mask gives 0.

    `compat="verl"`: totals of 0 divide by 0, NaN outside the mask spoils the seq-* modes unless its whole row is
    outside, and "seq-mean-token-sum-norm" without `norm_length` divides by T. Raises ValueError for another mode, a
    missing `norm_length`, or several ranks without totals.
    """
    if loss.dim() != 2 or loss.shape != mask.shape:
        raise ValueError(f"expected loss and mask of one shape [B, T], got {list(loss.shape)} and {list(mask.shape)}")
    if num_ranks > 1 and totals is None and mode != "token-sum":
        raise ValueError(f"expected totals over all {num_ranks} ranks for {mode}, got none")
    is_used = mask > 0
    counts = is_used.sum(-1)
    if totals is None:
        totals = LossTotals(num_tokens=int(counts.sum()), num_sequences=int((counts > 0).sum()))
    if compat == "verl" and norm_length is None:
        norm_length = loss.shape[1]
    weights = token_weights(counts, mode=mode, totals=totals, norm_length=norm_length)
    inside = torch.where(is_used, loss, 0.0)
    if compat == "verl" and mode.startswith("seq-"):
        inside = torch.where((counts > 0)[:, None], loss * mask, 0.0)
    total = (inside * weights[:, None].to(loss.dtype)).sum() * num_ranks
    denominator = totals.num_tokens if mode == "token-mean" else totals.num_sequences
    return total / 0.0 if compat == "verl" and mode != "token-sum" and denominator == 0 else total
