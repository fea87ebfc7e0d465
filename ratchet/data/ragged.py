"""Between columns of lists, one per row, and tensors padded on the right.

Trap: a column may come in chunks and as a slice of a longer one, whose offsets do not begin at 0.
"""

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ratchet.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


def lengths_of(column: pa.ChunkedArray) -> "Tensor":
    """Number of entries of each row's list, int64 [B]; a null is a DataError."""
    import torch

    return torch.from_numpy(np.diff(_offsets(column)[1]).astype(np.int64))


def padded(column: pa.ChunkedArray, mask: "Tensor") -> "Tensor":
    """Return the lists as float32 [B, T], 0 where `mask` (bool [B, T], row i true up to its length) is false.

    A row with another number of entries than its mask has is a DataError.
    """
    import torch

    values, offsets = _offsets(column)
    wrong = np.flatnonzero(np.diff(offsets) != mask.sum(1).numpy())
    if len(wrong):
        row = int(wrong[0])
        expected, found = int(mask[row].sum()), int(offsets[row + 1] - offsets[row])
        raise DataError(f"row {row} has {found} entries for {expected} completion tokens")
    result = torch.zeros(mask.shape, dtype=torch.float32)
    result[mask] = torch.from_numpy(values.to_numpy(zero_copy_only=False).astype(np.float32))
    return result


def ragged(values: "Tensor", mask: "Tensor") -> pa.Array:
    """Return [B, T] values as lists of those inside `mask`, float32 or bool."""
    offsets = np.concatenate([[0], np.cumsum(mask.sum(1).numpy())]).astype(np.int32)
    flat = values[mask].numpy()
    kept = pa.array(flat) if flat.dtype == bool else pa.array(flat.astype(np.float32))
    return pa.ListArray.from_arrays(pa.array(offsets), kept)


def _offsets(column: pa.ChunkedArray) -> tuple[pa.Array, np.ndarray]:
    lists = column.combine_chunks()
    if lists.null_count:
        raise DataError(f"{lists.null_count} of {len(lists)} rows are null where a list is needed")
    offsets = lists.offsets.to_numpy()
    return lists.flatten(), offsets - offsets[0] if len(offsets) else np.zeros(1, np.int64)
