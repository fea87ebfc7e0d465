"""What the estimators read of a batch: its values inside the mask, block by block, checked.

Trap: a NaN times 0 is a NaN. Values are multiplied by the mask, which is several times as fast as choosing by it, and
chosen by it only where that left something that is not finite; unless verl's answer is asked for, which multiplies.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ratchet.algorithms.batch import AdvantageBatch, AdvantageOptions

BLOCK = 2**18
"""Numbers of a block of rows that several operations run over: as many as stay in a core's cache."""


def output_dtype(batch: AdvantageBatch) -> torch.dtype:
    """float64 where the token rewards are, else float32."""
    return torch.promote_types(batch.token_rewards.dtype, torch.float32)


def row_blocks(values: Tensor, elements: int = BLOCK) -> Iterator[slice]:
    """Slices of rows of `values` [B, T], each of about `elements` numbers."""
    size = max(1, elements // max(1, values.shape[1]))
    return (slice(start, min(start + size, len(values))) for start in range(0, len(values), size))


def as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """`mask` bool as 0.0 and 1.0. Read as bytes it converts several times as fast as bools do."""
    return mask.view(torch.uint8).to(dtype)


def row_lengths(mask: Tensor) -> Tensor:
    """Number of tokens of each row of `mask` bool [B, T], int64 [B]."""
    lengths = torch.zeros(len(mask), dtype=torch.long)
    for block in row_blocks(mask):
        # Floats sum several times as fast as bools do; float64 counts any row exactly.
        dtype = torch.float32 if mask.shape[1] < 2**24 else torch.float64
        lengths[block] = as_numbers(mask[block], dtype).sum(1).long()
    return lengths


def has_holes(mask: Tensor) -> bool:
    """Whether a token inside `mask` bool [B, T] follows one outside it."""
    steps = mask.view(torch.uint8)
    return any(bool((steps[block, 1:] > steps[block, :-1]).any()) for block in row_blocks(mask))


def cleared(values: Tensor, mask: Tensor, steps: Tensor) -> Tensor:
    """A copy of `values` [b, T] that is 0 outside `mask`, NaN or not; `steps` is the mask as 0.0 and 1.0."""
    product = values * steps
    return product if math.isfinite(float(product.sum())) else torch.where(mask, values, values.new_zeros(()))


def read_inside(
    batch: AdvantageBatch, name: str, rows: slice | Tensor, steps: Tensor, options: AdvantageOptions
) -> Tensor:
    """The field `name` of some rows of a batch, [b, T] in the result's dtype, 0 outside the mask; a copy.

    `steps` [b, T] is those rows' mask as 0.0 and 1.0. Raises ValueError naming the first row with a value inside the
    mask that is not finite. With `compat="verl"` nothing is refused, and NaN outside the mask stays NaN.
    """
    values: Tensor = getattr(batch, name)[rows].to(steps.dtype)
    if options.compat == "verl":
        return values * steps
    found = cleared(values, batch.mask[rows], steps)
    if not math.isfinite(float(found.sum())):
        bad = (~torch.isfinite(found)).any(1).nonzero()
        if len(bad):  # none where finite numbers are too large to add up
            first = int(bad[0])
            row = int(rows[first]) if isinstance(rows, Tensor) else rows.start + first
            value = found[first][~torch.isfinite(found[first])][0].item()
            raise ValueError(f"expected finite {name} inside the mask, got {value} in row {row}")
    return found


def required(batch: AdvantageBatch, estimator: str, *names: str) -> None:
    """Raise ValueError where the batch lacks a field that the estimator needs."""
    missing = [name for name in names if getattr(batch, name) is None]
    if missing:
        raise ValueError(f"expected {' and '.join(names)} in the batch, got no {missing[0]}; {estimator} needs them")
