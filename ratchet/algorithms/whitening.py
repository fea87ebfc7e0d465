"""Mean, variance and whitening of the values inside a mask, over a whole batch.

Trap: a batch whose values are all equal has no spread to divide by, but its computed variance is rounding, not 0;
equality is tested on the values themselves. Sums are taken block by block, so that no second batch is ever in memory.
"""

import math

import torch
from torch import Tensor

from ratchet.algorithms.batch import Compat
from ratchet.algorithms.masked import as_numbers, row_blocks, row_lengths

EPSILON = 1e-8
"""Added to a variance before its root is divided by."""


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean (scalar) of `values` [B, T] where `mask` [B, T] is set; 0 for an empty mask. Outside it NaN is harmless."""
    return torch.tensor(_mean(values, mask)[1], dtype=values.dtype)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Sample variance (scalar, over n - 1) of `values` [B, T] where `mask` [B, T] is set.

    Exactly 0 for fewer than two values and for equal ones.
    """
    values, mean, count = _mean(values, mask)
    return torch.tensor(_variance(values, mask, mean, count, torch.empty_like(values)), dtype=values.dtype)


def masked_whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True, compat: Compat = "ratchet") -> Tensor:
    """Return `(values - mean) / sqrt(var + 1e-8)` [B, T], plus the mean if not `shift_mean`, 0 outside `mask` [B, T].

    Mean and sample variance are taken inside the mask, over the whole batch. One value, or equal ones, give 0 (the mean
    if not `shift_mean`). What is outside the mask, NaN included, counts nowhere. `compat="verl"` keeps what the formula
    gives outside the mask, in verl's order of float32 sums, and raises ValueError for fewer than two values.
    """
    if compat == "verl":
        return _verl_whiten(values, mask, shift_mean)
    values, mean, count = _mean(values, mask)
    whitened = torch.empty_like(values)
    variance = _variance(values, mask, mean, count, whitened)
    whitened.mul_(1.0 / math.sqrt(variance + EPSILON) if variance > 0 else 0.0)
    return whitened if shift_mean else whitened.add_(as_numbers(mask, values.dtype), alpha=mean)


def _mean(values: Tensor, mask: Tensor) -> tuple[Tensor, float, int]:
    """The values, in a copy that is 0 outside the mask if something there is not finite; their mean and number."""
    total, count = 0.0, 0
    for block in row_blocks(values):
        steps = as_numbers(mask[block], values.dtype)
        # Rows are summed in their own precision, the rows' sums in float64.
        count += int(steps.sum(1).double().sum())
        total += float(steps.mul_(values[block]).sum(1).double().sum())
    if not math.isfinite(total):
        values = torch.where(mask, values, values.new_zeros(()))
        total = float(values.sum(1).double().sum())
    return values, (total / count if count else 0.0), count


def _variance(values: Tensor, mask: Tensor, mean: float, count: int, centred: Tensor) -> float:
    """The variance; what it is the mean square of is left in `centred` [B, T], 0 outside the mask."""
    total = 0.0
    for block in row_blocks(values):
        part = torch.sub(values[block], mean, out=centred[block]).mul_(as_numbers(mask[block], values.dtype))
        total += float(torch.linalg.vector_norm(part, dim=1).double().square_().sum())
    if count < 2:
        return 0.0
    variance = total / (count - 1)
    if (variance <= (1e-6 * mean) ** 2 or math.isinf(variance)) and _are_equal(values, mask):
        return 0.0
    return variance


def _are_equal(values: Tensor, mask: Tensor) -> bool:
    inside = values[mask]
    return bool((inside == inside[0]).all())


def _verl_whiten(values: Tensor, mask: Tensor, shift_mean: bool) -> Tensor:
    count = int(row_lengths(mask).sum())
    if count < 2:
        raise ValueError(f"expected at least two values inside the mask to whiten, got {count}")
    zero = values.new_zeros(())
    # One value more or less in the last place of the mean decides what equal values become, so the order of the sums
    # is part of the answer: one sum over the whole batch.
    mean = torch.where(mask, values, zero).sum() / count
    centred = values - mean
    inside = torch.where(mask, centred, zero)
    variance = inside.mul_(inside).sum() / count * (count / (count - 1))
    whitened = centred.mul_(torch.rsqrt(variance + EPSILON))
    return whitened if shift_mean else whitened.add_(mean)
