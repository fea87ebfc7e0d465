import numpy as np
import pyarrow as pa
import pytest
import torch

from ratchet.data.ragged import lengths_of, list_column, padded, ragged, true_counts
from ratchet.errors import DataError

FLOATS = pa.list_(pa.float32())


def _mask(column: pa.ChunkedArray) -> torch.Tensor:
    lengths = lengths_of(column)
    return torch.arange(int(lengths.max())) < lengths[:, None]


def test_lists_are_padded_on_the_right_and_come_back_as_they_were() -> None:
    column = pa.chunked_array([pa.array([[1.0, 2.0], []], FLOATS), pa.array([[3.0, 4.0, 5.0]], FLOATS)])
    mask = _mask(column)
    values = padded(column, mask)
    assert values.tolist() == [[1.0, 2.0, 0.0], [0.0, 0.0, 0.0], [3.0, 4.0, 5.0]]
    assert ragged(values, mask).to_pylist() == column.to_pylist()


@pytest.mark.parametrize(
    ("type_", "dtype", "rows"),
    [
        (pa.float32(), np.float32, [[1.0, 2.0], [], None, [3.0]]),
        (pa.int32(), np.int32, [[7], None, [8, 9]]),
        (pa.bool_(), np.bool_, [None, [True, False], [], [True]]),
        (pa.float32(), np.float32, [None, None]),
        (pa.float32(), np.float32, []),
    ],
)
def test_a_column_comes_as_one_array_a_row(type_: pa.DataType, dtype: type, rows: list[list[float] | None]) -> None:
    kept = pa.array(rows, pa.list_(type_))
    longer = pa.chunked_array([pa.concat_arrays([kept, kept])]).slice(len(kept))
    for column in (pa.chunked_array([kept]), pa.chunked_array([kept[:1], kept[1:]]), longer):
        found = list_column(column)
        assert [None if row is None else row.tolist() for row in found] == rows
        assert all(row is None or row.dtype == dtype for row in found)


def test_the_arrays_of_a_column_are_views_that_cannot_be_written_to() -> None:
    first, second = list_column(pa.chunked_array([pa.array([[1.0, 2.0], [3.0]], FLOATS)]))
    assert first is not None
    assert second is not None
    assert first.base is second.base is not None
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 0.0


def test_a_slice_of_a_longer_column_is_read_from_its_own_start() -> None:
    column = pa.chunked_array([pa.array([[9.0, 9.0], [1.0], [2.0, 3.0]], FLOATS)]).slice(1)
    assert padded(column, _mask(column)).tolist() == [[1.0, 0.0], [2.0, 3.0]]


def test_what_is_outside_the_mask_is_left_out() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    assert ragged(torch.tensor([[1.0, float("nan")], [2.0, 3.0]]), mask).to_pylist() == [[1.0], [2.0, 3.0]]
    assert ragged(mask, mask).to_pylist() == [[True], [True, True]]


def test_a_row_of_another_length_than_its_tokens_is_named() -> None:
    column = pa.chunked_array([pa.array([[1.0], [2.0, 3.0]], FLOATS)])
    with pytest.raises(DataError, match="row 1 has 2 entries for 1 completion tokens"):
        padded(column, torch.tensor([[True, False], [True, False]]))
    with pytest.raises(DataError, match="1 of 2 rows are null"):
        lengths_of(pa.chunked_array([pa.array([[1.0], None], FLOATS)]))


def test_true_entries_of_each_row_are_counted_in_slices_and_chunks_as_well() -> None:
    rows = [[True, False, True], [], [False], [True]]
    column = pa.chunked_array([pa.array(rows[:2], pa.list_(pa.bool_())), pa.array(rows[2:], pa.list_(pa.bool_()))])
    assert true_counts(column).tolist() == [2, 0, 0, 1]
    assert true_counts(column.slice(1)).tolist() == [0, 0, 1]
    with pytest.raises(DataError, match="1 of 2 rows are null"):
        true_counts(pa.chunked_array([pa.array([[True], None], pa.list_(pa.bool_()))]))
