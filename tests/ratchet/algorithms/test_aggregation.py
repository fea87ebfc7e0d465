"""Loss weights against hand-worked numbers, invariance to the split, and numbers computed by verl."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratchet.algorithms.aggregation import LossAggMode, LossTotals, token_weights

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


def test_golden_aggregated_losses_agree_with_verl(shared: Path) -> None:
    cases = json.loads((shared / "golden/verl_0_9_1.json").read_text())["cases"]
    arrays = np.load(shared / "golden/verl_0_9_1.npz")
    compared = 0
    for name, case in cases.items():
        if case["fn"] != "agg_loss":
            continue
        options = case["kwargs"]
        losses = torch.from_numpy(arrays[case["args"]["loss_mat"]])
        mask = torch.from_numpy(arrays[case["args"]["loss_mask"]]) > 0
        counts = mask.sum(-1)
        own = LossTotals.of(counts.tolist())
        totals = LossTotals(
            options.get("batch_num_tokens") or own.num_tokens, options.get("global_batch_size") or own.num_sequences
        )
        weights = token_weights(
            counts,
            mode=options["loss_agg_mode"],
            totals=totals,
            norm_length=options.get("loss_scale_factor") or mask.shape[1],
        )
        ours = torch.where(mask, losses * weights[:, None], 0.0).sum() * options.get("dp_size", 1)
        golden = torch.from_numpy(arrays[case["out"][0]])
        torch.testing.assert_close(ours.float(), golden, atol=1e-6, rtol=1e-5, msg=name)
        compared += 1
    assert compared > 50
