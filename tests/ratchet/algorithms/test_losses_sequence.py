"""Policy losses whose ratio belongs to a whole completion, against numbers worked by hand."""

import math

import pytest
import torch
from torch import Tensor

from ratchet.algorithms.aggregation import LossTotals, token_weights
from ratchet.algorithms.batch import LossBatch, LossOptions
from ratchet.algorithms.losses_sequence import geo_mean, gspo

OPTIONS = LossOptions(clip_ratio_low=0.2, clip_ratio_high=0.3)


def rows_of(log_ratios: list[list[float]], advantages: list[float], weights: list[float] | None = None) -> LossBatch:
    """Rows of tokens that all had log-prob -1 under the behaviour policy, with one advantage a row."""
    lengths = torch.tensor([len(row) for row in log_ratios])
    flat = torch.tensor([value for row in log_ratios for value in row], dtype=torch.float64)
    return LossBatch(
        log_probs=(flat - 1.0).requires_grad_(),
        behaviour_log_probs=torch.full_like(flat, -1.0),
        advantages=torch.tensor(advantages, dtype=torch.float64).repeat_interleave(lengths),
        row_index=torch.arange(len(log_ratios)).repeat_interleave(lengths),
        num_rows=len(log_ratios),
        importance_weights=None if weights is None else torch.tensor(weights, dtype=torch.float64),
    )


def mean_over_rows(loss: Tensor, batch: LossBatch) -> Tensor:
    """The mean over rows with tokens of the mean over their tokens."""
    counts = torch.bincount(batch.row_index, minlength=batch.num_rows)
    totals = LossTotals.of(counts.tolist())
    weights = token_weights(counts, mode="seq-mean-token-mean", totals=totals)
    return (loss * weights[batch.row_index]).sum()


def test_gspo_gives_every_token_the_geometric_mean_of_its_rows_ratios() -> None:
    batch = rows_of([[0.3, -0.1], [], [0.7]], [2.0, 9.0, 1.0])
    per_token, metrics = gspo(batch, OPTIONS)
    ratio = math.exp(0.1)  # the mean of 0.3 and -0.1
    assert per_token.tolist() == pytest.approx([-2.0 * ratio, -2.0 * ratio, -1.3], abs=1e-12)
    assert metrics["pg_clipfrac"].tolist() == [0.0, 0.0, 1.0]
    assert metrics["ppo_kl"].tolist() == pytest.approx([-0.3, 0.1, -0.7], abs=1e-12)
    (slopes,) = torch.autograd.grad(mean_over_rows(per_token, batch), batch.log_probs)
    # Two rows with tokens; the first row's loss falls by A * ratio / 2 with either of its log-probs.
    assert slopes.tolist() == pytest.approx([-ratio / 2, -ratio / 2, 0.0], abs=1e-12)


def test_gspo_holds_the_ratio_of_a_wild_row() -> None:
    per_token, _ = gspo(rows_of([[30.0, 0.0]], [-1.0]), OPTIONS)
    assert per_token.tolist() == pytest.approx([math.exp(10.0)] * 2, rel=1e-12)


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "loss", "slopes"),
    [
        ([0.1, -0.1], 2.0, -2.0, [-1.0, -1.0]),
        # Good: 0.5 is held at 0.3, -0.5 is not held: exp(-0.1).
        ([0.5, -0.5], 2.0, -2.0 * math.exp(-0.1), [0.0, -math.exp(-0.1)]),
        # Bad: -0.5 is held at -0.2, 0.5 is not held: exp(0.15).
        ([0.5, -0.5], -2.0, 2.0 * math.exp(0.15), [math.exp(0.15), 0.0]),
        ([0.5, -0.5], 0.0, 0.0, [0.0, 0.0]),
    ],
)
def test_gmpo_clips_log_ratios_before_their_mean(
    log_ratios: list[float], advantage: float, loss: float, slopes: list[float]
) -> None:
    batch = rows_of([log_ratios], [advantage])
    per_token, metrics = geo_mean(batch, OPTIONS)
    assert per_token.tolist() == pytest.approx([loss, loss], abs=1e-12)
    (found,) = torch.autograd.grad(mean_over_rows(per_token, batch), batch.log_probs)
    assert found.tolist() == pytest.approx(slopes, abs=1e-12)
    outside = [float(abs(value) > 0.3) for value in log_ratios]
    assert metrics["pg_clipfrac"].tolist() == [value * (advantage > 0) for value in outside]
    assert metrics["pg_clipfrac_lower"].tolist() == [value * (advantage < 0) for value in outside]


def test_gmpo_is_a_mean_over_the_rows_that_have_tokens() -> None:
    batch = rows_of([[0.1, -0.1], [], [0.2]], [1.0, 5.0, 2.0])
    ours = mean_over_rows(geo_mean(batch, OPTIONS)[0], batch)
    assert ours.item() == pytest.approx(-(1.0 + 2.0 * math.exp(0.2)) / 2, abs=1e-12)
    verl = LossOptions(clip_ratio_low=0.2, clip_ratio_high=0.3, compat="verl")
    theirs = mean_over_rows(geo_mean(batch, verl)[0], batch)
    assert theirs.item() == pytest.approx(-(1.0 + 2.0 * math.exp(0.2)) / 3, abs=1e-12)


def test_gmpo_takes_the_geometric_mean_of_importance_weights() -> None:
    per_token, _ = geo_mean(rows_of([[0.0, 0.0]], [1.0], [0.5, 8.0]), OPTIONS)
    assert per_token.tolist() == pytest.approx([-2.0, -2.0], rel=1e-9)


def test_gspo_multiplies_each_token_by_its_importance_weight() -> None:
    per_token, _ = gspo(rows_of([[0.0, 0.0]], [1.0], [0.5, 8.0]), OPTIONS)
    assert per_token.tolist() == [-0.5, -8.0]


@pytest.mark.parametrize("loss", [gspo, geo_mean])
def test_a_batch_without_tokens_has_no_loss(loss: object) -> None:
    assert callable(loss)
    per_token, _ = loss(rows_of([[], []], [1.0, 1.0]), OPTIONS)
    assert per_token.tolist() == []
