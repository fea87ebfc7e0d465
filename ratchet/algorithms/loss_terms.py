"""What the policy losses share: checks, ratios, means over rows, and the metrics that each of them returns.

Trap: a row of a micro-batch is whole, so sums over rows are exact; nothing here may look across rows, or a loss would
depend on how the mini-batch was split.
"""

import torch
from torch import Tensor

from ratchet.algorithms.batch import LossBatch, LossOptions

MAX_LOG_RATIO = 20.0
"""Log-ratios are held to this either way, so that one wild token gives a large number and not an infinity."""


def check_batch(batch: LossBatch) -> None:
    """Raise ValueError where the tensors of a batch are not all of one shape [N]."""
    named = {
        "log_probs": batch.log_probs,
        "behaviour_log_probs": batch.behaviour_log_probs,
        "advantages": batch.advantages,
        "row_index": batch.row_index,
        "importance_weights": batch.importance_weights,
        "selection": batch.selection,
    }
    shapes = {name: list(tensor.shape) for name, tensor in named.items() if tensor is not None}
    if batch.log_probs.dim() != 1 or any(shape != shapes["log_probs"] for shape in shapes.values()):
        raise ValueError(f"expected tensors of one shape [N], got {shapes}")


def clip_bounds(options: LossOptions) -> tuple[float, float]:
    """Return how far below and above 1 a ratio is left alone; ValueError where one of them is negative."""
    low, high = options.clip_ratio_low, options.clip_ratio_high
    if not (low >= 0.0 and high >= 0.0):
        raise ValueError(f"expected clip_ratio_low and clip_ratio_high of at least 0, got {low} and {high}")
    return low, high


def dual_clip(options: LossOptions) -> float:
    """Return the bound on the ratio; ValueError where it is not above 1."""
    if not options.clip_ratio_c > 1.0:
        raise ValueError(f"expected clip_ratio_c above 1, got {options.clip_ratio_c}")
    return options.clip_ratio_c


def held_log_ratio(batch: LossBatch) -> Tensor:
    """Return log(policy / behaviour) of each token [N], held to MAX_LOG_RATIO; no gradient where it is held."""
    return (batch.log_probs - batch.behaviour_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def surrogates(ratio: Tensor, advantages: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Return minus ratio times advantage, plain and with the ratio clipped; PPO's loss is the larger of the two."""
    low, high = clip_bounds(options)
    return -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)


def row_means(values: Tensor, batch: LossBatch) -> Tensor:
    """Return the mean of `values` [N] over each row, float64 [R] and differentiable; 0 for a row without tokens."""
    counts = torch.bincount(batch.row_index, minlength=batch.num_rows)
    return segment_sums(values, counts) / counts.clamp(min=1)


def segment_sums(values: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of each segment of `values` [N], float64 [R] and differentiable; `counts` [R] sum to N.

    Sums run in the order of the tokens and not by scattered additions, so that a GPU gives the same bits twice.
    """
    sums: Tensor = torch.segment_reduce(values.double(), "sum", lengths=counts, unsafe=True)
    return sums


def token_metrics(kl: Tensor, clipped: Tensor | None = None, lower: Tensor | None = None) -> dict[str, Tensor]:
    """Return the metrics that every loss gives, per token [N] and without gradient.

    `kl` is what "ppo_kl" averages; `clipped` and `lower` (bool) are "pg_clipfrac" and "pg_clipfrac_lower", which are 0
    where a loss has no such thing.
    """
    kl = kl.detach()
    zeros = torch.zeros_like(kl)
    return {
        "pg_clipfrac": zeros if clipped is None else clipped.to(kl.dtype),
        "pg_clipfrac_lower": zeros if lower is None else lower.to(kl.dtype),
        "ppo_kl": kl,
    }


def weighted(loss: Tensor, batch: LossBatch) -> Tensor:
    """Return the loss of each token [N] times its importance weight, a constant, where there are any."""
    return loss if batch.importance_weights is None else loss * batch.importance_weights.detach()
