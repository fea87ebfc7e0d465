"""Between columns of lists, one per row, and arrays: one a row, or tensors padded on the right.

Trap: a column may come in chunks and as a slice of a longer one, whose offsets do not begin at 0.
"""

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ratchet.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


def list_column(column: pa.ChunkedArray) -> list[np.ndarray | None]:
    """Return each row's list as an array of the column's numbers or truth values, None for a null.

    The arrays are views of one, which holds the whole column; numbers cannot be written to.
    """
    lists = column.combine_chunks()
    values = lists.flatten().to_numpy(zero_copy_only=False)
    # A null has no entries.
    ends = np.cumsum(lists.value_lengths().fill_null(0).to_numpy())
    views: list[np.ndarray | None] = [*np.split(values, ends[:-1])] if len(lists) else []
    for row in np.flatnonzero(lists.is_null().to_numpy(zero_copy_only=False)):
        views[row] = None
    return views


def lengths_of(column: pa.ChunkedArray) -> "Tensor":
    """Number of entries of each row's list, int64 [B]; a null is a DataError."""
    import torch

    return torch.from_numpy(np.diff(_offsets(column)[1]).astype(np.int64))


def true_counts(column: pa.ChunkedArray) -> np.ndarray:
    """Number of true entries of each row's list of truth values, int64 [B]; a null is a DataError."""
    values, offsets = _offsets(column)
    before = np.concatenate([[0], np.cumsum(values.to_numpy(zero_copy_only=False), dtype=np.int64)])
    return np.diff(before[offsets])


def padded(column: pa.ChunkedArray, mask: "Tensor") -> "Tensor":
    """Return the lists as float32 [B, T], 0 where `mask` (bool [B, T], row i true up to its length) is false.

    A row with another number of entries than its mask has is a DataError.
    """
    import torch

    values, offsets = _offsets(column)
    is_inside = mask.numpy()
    wrong = np.flatnonzero(np.diff(offsets) != is_inside.sum(1))
    if len(wrong):
        row = int(wrong[0])
        expected, found = int(is_inside[row].sum()), int(offsets[row + 1] - offsets[row])
        raise DataError(f"row {row} has {found} entries for {expected} completion tokens")
    result = np.zeros(mask.shape, np.float32)
    result[is_inside] = values.to_numpy(zero_copy_only=False)
    return torch.from_numpy(result)


def ragged(values: "Tensor", mask: "Tensor") -> pa.Array:
    """Return [B, T] values as lists of those inside `mask`, float32 or bool."""
    # By numpy: torch would wake threads for it, which costs more than it saves while other work keeps the cores busy.
    is_inside = mask.numpy()
    offsets = np.concatenate([[0], np.cumsum(is_inside.sum(1))]).astype(np.int32)
    flat = values.numpy()[is_inside]
    kept = pa.array(flat) if flat.dtype == bool else pa.array(flat.astype(np.float32))
    return pa.ListArray.from_arrays(pa.array(offsets), kept)


def _offsets(column: pa.ChunkedArray) -> tuple[pa.Array, np.ndarray]:
    lists = column.combine_chunks()
    if lists.null_count:
        raise DataError(f"{lists.null_count} of {len(lists)} rows are null where a list is needed")
    offsets = lists.offsets.to_numpy()
    return lists.flatten(), offsets - offsets[0] if len(offsets) else np.zeros(1, np.int64)
