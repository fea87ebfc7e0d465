"""Loss weights and their padded form against hand-worked numbers, and invariance to split, ranks and padding."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratchet.algorithms.aggregation import LossAggMode, LossTotals, aggregate, token_weights

MODES: list[LossAggMode] = [
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 4, 1 / 4, 0.0]),
        ("token-sum", [1.0, 1.0, 0.0]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2, 0.0]),
        ("seq-mean-token-sum-norm", [1 / 20, 1 / 20, 0.0]),
        ("seq-mean-token-mean", [1 / 2, 1 / 6, 0.0]),
    ],
)
def test_completions_of_one_three_and_no_tokens_get_the_weights_worked_by_hand(
    mode: LossAggMode, expected: list[float]
) -> None:
    counts = torch.tensor([1, 3, 0])
    totals = LossTotals.of(counts.tolist())
    assert totals == LossTotals(num_tokens=4, num_sequences=2)
    weights = token_weights(counts, mode=mode, totals=totals, norm_length=10)
    assert weights.tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("mode", MODES)
def test_an_all_masked_batch_gets_weights_of_zero_and_no_division_by_zero(mode: LossAggMode) -> None:
    counts = torch.tensor([0, 0])
    weights = token_weights(counts, mode=mode, totals=LossTotals.of([0, 0]), norm_length=10)
    assert weights.tolist() == [0.0, 0.0]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.sampled_from(MODES), st.data())
def test_any_split_into_micro_batches_gives_the_same_loss(
    counts: list[int], mode: LossAggMode, data: st.DataObject
) -> None:
    totals = LossTotals.of(counts)
    losses = [[0.5 + row + token / 7 for token in range(count)] for row, count in enumerate(counts)]

    def weighted(rows: list[int]) -> float:
        chosen = torch.tensor([counts[row] for row in rows])
        weights: list[float] = token_weights(chosen, mode=mode, totals=totals, norm_length=9.0).tolist()
        return sum(weight * sum(losses[row]) for weight, row in zip(weights, rows, strict=True))

    cut = data.draw(st.integers(0, len(counts)))
    rows = list(range(len(counts)))
    assert weighted(rows[:cut]) + weighted(rows[cut:]) == pytest.approx(weighted(rows), rel=1e-12)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'mean'"):
        token_weights(torch.ones(1), mode="mean", totals=LossTotals(1, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("norm_length", [None, 0.0])
def test_the_norm_mode_needs_a_length(norm_length: float | None) -> None:
    with pytest.raises(ValueError, match="norm_length"):
        token_weights(torch.ones(1), mode="seq-mean-token-sum-norm", totals=LossTotals(1, 1), norm_length=norm_length)


# Rows of one, three and no tokens; the second has a hole. The losses outside are as bad as can be.
LOSS = torch.tensor([[2.0, math.nan, math.inf, 5.0], [1.0, math.nan, 3.0, 5.0], [math.nan] * 4], dtype=torch.float64)
MASK = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 1.0], [0.0] * 4])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 11 / 4),
        ("token-sum", 11.0),
        ("seq-mean-token-sum", 11 / 2),
        ("seq-mean-token-sum-norm", 11 / 20),
        ("seq-mean-token-mean", (2 + 9 / 3) / 2),
    ],
)
def test_padded_losses_aggregate_to_the_number_worked_by_hand(mode: LossAggMode, expected: float) -> None:
    losses = LOSS.clone().requires_grad_()
    loss = aggregate(losses, MASK, mode, norm_length=10)
    assert loss.item() == pytest.approx(expected, abs=1e-15)
    (gradient,) = torch.autograd.grad(loss, losses)
    assert bool(torch.isfinite(gradient).all())
    assert not gradient[MASK == 0].any()
    assert aggregate(LOSS, MASK > 0, mode, norm_length=10).item() == loss.item()


@pytest.mark.parametrize("mode", MODES)
def test_more_padding_changes_nothing(mode: LossAggMode) -> None:
    wide = torch.cat([LOSS, torch.full((3, 5), math.nan, dtype=torch.float64)], dim=1)
    mask = torch.cat([MASK, torch.zeros(3, 5)], dim=1)
    assert aggregate(wide, mask, mode, norm_length=10) == aggregate(LOSS, MASK, mode, norm_length=10)


@pytest.mark.parametrize("mode", MODES)
def test_shares_of_two_ranks_average_to_the_whole(mode: LossAggMode) -> None:
    totals = LossTotals.of([1, 3, 0])
    shares = [
        aggregate(LOSS[part], MASK[part], mode, totals=totals, norm_length=10, num_ranks=2)
        for part in (slice(0, 1), slice(1, 3))
    ]
    whole = aggregate(LOSS, MASK, mode, norm_length=10)
    assert sum(shares).item() / 2 == pytest.approx(whole.item(), rel=1e-15)  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_mask_gives_a_loss_of_zero(mode: LossAggMode) -> None:
    losses = LOSS.clone().requires_grad_()
    loss = aggregate(losses, torch.zeros(3, 4), mode, norm_length=10)
    assert loss.item() == 0.0
    (gradient,) = torch.autograd.grad(loss, losses)
    assert not gradient.any()


@pytest.mark.parametrize("mode", MODES)
def test_verls_empty_mask_is_not_a_number_but_for_the_sum(mode: LossAggMode) -> None:
    loss = aggregate(torch.ones(2, 3), torch.zeros(2, 3), mode, compat="verl")
    assert math.isnan(loss.item()) == (mode != "token-sum")


@pytest.mark.parametrize("mode", MODES)
def test_verls_rows_are_spoilt_by_what_is_outside_the_mask(mode: LossAggMode) -> None:
    loss = aggregate(LOSS, MASK, mode, norm_length=10, compat="verl")
    assert math.isnan(loss.item()) == mode.startswith("seq-")


def test_verl_divides_by_the_padded_length_where_no_length_is_given() -> None:
    loss = aggregate(torch.ones(2, 4), torch.ones(2, 4), "seq-mean-token-sum-norm", compat="verl")
    assert loss.item() == 1.0


def test_several_ranks_need_totals() -> None:
    with pytest.raises(ValueError, match="2 ranks"):
        aggregate(LOSS, MASK, "token-mean", num_ranks=2)
    assert aggregate(LOSS, MASK, "token-sum", num_ranks=2).item() == 22.0


def test_losses_that_are_not_padded_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[3, 4\] and \[4\]"):
        aggregate(LOSS, MASK[0], "token-mean")
