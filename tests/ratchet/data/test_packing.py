"""Packing rows into micro-batches and micro-batches onto ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.data.packing import pack_by_count, pack_by_tokens, split_over_ranks

LENGTHS = st.lists(st.integers(0, 60), max_size=40)


def test_rows_are_packed_within_the_budget_and_as_evenly_as_may_be() -> None:
    # 60 tokens need two micro-batches of 30: 20 + 10 and 15 + 15.
    assert pack_by_tokens([20, 15, 10, 15], 30) == [[0, 2], [1, 3]]


def test_first_fit_is_kept_where_an_even_deal_would_not_fit() -> None:
    # Dealt evenly, {3, 2, 2} would hold 7 of 6; first-fit finds {3, 3} and {2, 2, 2}.
    assert pack_by_tokens([3, 3, 2, 2, 2], 6) == [[0, 1], [2, 3, 4]]


def test_a_row_longer_than_the_budget_gets_a_micro_batch_of_its_own() -> None:
    assert pack_by_tokens([5, 100, 5], 10) == [[0, 2], [1]]


def test_micro_batches_come_in_multiples_where_there_are_rows_enough() -> None:
    assert pack_by_tokens([4, 4, 4, 4], 100, multiple_of=2) == [[0, 2], [1, 3]]
    assert pack_by_tokens([4], 100, multiple_of=2) == [[0]]


def test_no_rows_give_no_micro_batches() -> None:
    assert pack_by_tokens([], 10) == []
    assert pack_by_count(0, 4) == []
    assert split_over_ranks([], [], 2) == [[], []]


@given(LENGTHS, st.integers(1, 80), st.integers(1, 4))
def test_every_row_is_packed_once_and_fits(lengths: list[int], max_tokens: int, multiple_of: int) -> None:
    packed = pack_by_tokens(lengths, max_tokens, multiple_of=multiple_of)
    assert sorted(row for rows in packed for row in rows) == list(range(len(lengths)))
    for rows in packed:
        assert rows == sorted(rows)
        assert len(rows) == 1 or sum(lengths[row] for row in rows) <= max_tokens
    assert packed == pack_by_tokens(list(lengths), max_tokens, multiple_of=multiple_of)
    # Two micro-batches of first-fit never fit into one, so that half the budget is used at least.
    assert multiple_of > 1 or len(packed) // 2 * max_tokens <= sum(lengths)


def test_a_fixed_count_takes_rows_in_order() -> None:
    assert pack_by_count(5, 2) == [[0, 1], [2, 3], [4]]


@given(LENGTHS, st.integers(1, 80), st.integers(1, 5))
def test_every_rank_runs_as_many_micro_batches_and_every_row_once(
    lengths: list[int], max_tokens: int, world_size: int
) -> None:
    packed = pack_by_tokens(lengths, max_tokens)
    ranks = split_over_ranks(packed, lengths, world_size)
    assert len(ranks) == world_size
    assert len({len(batches) for batches in ranks}) == 1
    assert sorted(row for batches in ranks for rows in batches for row in rows) == list(range(len(lengths)))
    assert ranks == split_over_ranks(packed, lengths, world_size)


def test_heavy_micro_batches_are_spread_over_the_ranks() -> None:
    lengths = [8, 1, 7, 2]
    assert split_over_ranks([[0], [1], [2], [3]], lengths, 2) == [[[0], [1]], [[2], [3]]]


def test_missing_micro_batches_are_empty_ones() -> None:
    assert split_over_ranks([[0], [1], [2]], [1, 1, 1], 2) == [[[0], [2]], [[1], []]]


@pytest.mark.parametrize(("max_tokens", "multiple_of"), [(0, 1), (1, 0)])
def test_budgets_below_one_are_refused(max_tokens: int, multiple_of: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        pack_by_tokens([1], max_tokens, multiple_of=multiple_of)


def test_other_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="row 1"):
        pack_by_tokens([1, -1], 4)
    with pytest.raises(ValueError, match="rows_per_micro_batch"):
        pack_by_count(3, 0)
    with pytest.raises(ValueError, match="world_size"):
        split_over_ranks([], [], 0)
