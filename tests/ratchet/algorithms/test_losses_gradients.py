"""Every policy loss against a slow float64 reference: padded rows, a loop over each, the formula as its paper has it.

Trap: where a formula holds the ratio constant, the reference takes a plain number for it; the sequence losses are
written over whole rows, without the token form that the implementation uses.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ratchet.algorithms.aggregation import LossAggMode, LossTotals, token_weights
from ratchet.algorithms.batch import LossBatch, LossOptions
from ratchet.algorithms.catalog import POLICY_LOSSES

OPTIONS = LossOptions(clip_ratio_low=0.15, clip_ratio_high=0.25, clip_ratio_c=1.6, dro_beta=0.3, ppo_kl_coef=0.7)
LENGTHS = [4, 0, 1, 7, 2, 5]
DIFFERENTIABLE = ["vanilla", "sapo", "gpg", "dro", "kl_cov", "clip_cov", "geo_mean"]
"""Losses without a constant in them that hides a dependence on the policy: finite differences see all of it."""

Row = tuple[Tensor, list[float], list[float], list[bool]]
"""A row's log-probs, and for each token behaviour log-prob, advantage and whether it was selected."""


def make_batch(seed: int) -> LossBatch:
    """Rows of LENGTHS tokens with one advantage a row, ratios on both sides of every bound, and importance weights."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(LENGTHS)
    number = int(counts.sum())
    behaviour = -3.0 * torch.rand(number, generator=generator, dtype=torch.float64) - 0.05
    moved = behaviour + 0.4 * torch.randn(number, generator=generator, dtype=torch.float64)
    return LossBatch(
        log_probs=moved.clamp(max=-0.01).requires_grad_(),
        behaviour_log_probs=behaviour,
        advantages=torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64).repeat_interleave(counts),
        row_index=torch.arange(len(LENGTHS)).repeat_interleave(counts),
        num_rows=len(LENGTHS),
        selection=torch.rand(number, generator=generator) < 0.3,
    )


def constant(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def vanilla(row: Row, o: LossOptions) -> list[Tensor]:
    losses = []
    for log_prob, old, advantage in zip(row[0], row[1], row[2], strict=True):
        ratio = torch.exp(log_prob - old)
        held = min(max(ratio, constant(1 - o.clip_ratio_low)), constant(1 + o.clip_ratio_high))
        objective = min(ratio * advantage, held * advantage)
        losses.append(-objective if advantage >= 0 else -max(objective, constant(o.clip_ratio_c * advantage)))
    return losses


def cispo(row: Row, o: LossOptions) -> list[Tensor]:
    ratios = [math.exp(log_prob - old) for log_prob, old in zip(row[0].tolist(), row[1], strict=True)]
    held = [min(max(ratio, 1 - o.clip_ratio_low), 1 + o.clip_ratio_high) for ratio in ratios]
    return [-ratio * advantage * value for ratio, advantage, value in zip(held, row[2], row[0], strict=True)]


def sapo(row: Row, o: LossOptions) -> list[Tensor]:
    losses = []
    for log_prob, old, advantage in zip(row[0], row[1], row[2], strict=True):
        tau = o.tau_pos if advantage > 0 else o.tau_neg
        losses.append(-advantage * 4 / tau / (1 + torch.exp(-tau * (torch.exp(log_prob - old) - 1))))
    return losses


def gpg(row: Row, o: LossOptions) -> list[Tensor]:
    return [-advantage * log_prob for log_prob, advantage in zip(row[0], row[2], strict=True)]


def dro(row: Row, o: LossOptions) -> list[Tensor]:
    assert o.dro_beta is not None
    return [
        -(advantage * log_prob - o.dro_beta / 2 * (log_prob - old) ** 2)
        for log_prob, old, advantage in zip(row[0], row[1], row[2], strict=True)
    ]


def dppo(row: Row, o: LossOptions, divergence: Callable[[float, float], float]) -> list[Tensor]:
    losses = []
    for log_prob, old, advantage in zip(row[0], row[1], row[2], strict=True):
        p, q = math.exp(log_prob.item()), math.exp(old)
        bound = o.clip_ratio_high if advantage > 0 else o.clip_ratio_low
        is_away = p > q if advantage > 0 else p < q
        is_out = is_away and divergence(q, p) > bound
        losses.append(-advantage * min(p / q, o.clip_ratio_c) * log_prob * (0.0 if is_out else 1.0))
    return losses


def dppo_tv(row: Row, o: LossOptions) -> list[Tensor]:
    return dppo(row, o, lambda q, p: abs(p - q))


def dppo_kl(row: Row, o: LossOptions) -> list[Tensor]:
    return dppo(row, o, lambda q, p: q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)))


def clip_cov(row: Row, o: LossOptions) -> list[Tensor]:
    unbounded = vanilla(row, replace(o, clip_ratio_c=1e9))
    return [loss * (0.0 if is_out else 1.0) for loss, is_out in zip(unbounded, row[3], strict=True)]


def kl_cov(row: Row, o: LossOptions) -> list[Tensor]:
    return [
        -advantage * torch.exp(log_prob - old) + (o.ppo_kl_coef * abs(log_prob - old) if is_in else 0.0)
        for log_prob, old, advantage, is_in in zip(*row, strict=True)
    ]


def gspo(row: Row, o: LossOptions) -> list[Tensor]:
    ratio = torch.exp(torch.stack([new - old for new, old in zip(row[0], row[1], strict=True)]).mean())
    held = min(max(ratio, constant(1 - o.clip_ratio_low)), constant(1 + o.clip_ratio_high))
    return [-min(ratio * row[2][0], held * row[2][0])] * len(row[1])


def geo_mean(row: Row, o: LossOptions) -> list[Tensor]:
    advantage = row[2][0]
    product = torch.ones((), dtype=torch.float64)
    for log_prob, old in zip(row[0], row[1], strict=True):
        ratio = torch.exp(log_prob - old)
        low, high = constant(math.exp(-o.clip_ratio_low)), constant(math.exp(o.clip_ratio_high))
        product = product * (min(ratio, high) if advantage > 0 else max(ratio, low))
    return [-advantage * product ** (1 / len(row[1]))] * len(row[1])


REFERENCES: dict[str, Callable[[Row, LossOptions], list[Tensor]]] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gpg": gpg,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "geo_mean": geo_mean,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
}


def slow_loss(name: str, batch: LossBatch, mode: str) -> Tensor:
    """The loss by loops over rows and tokens, averaged as `mode` says."""
    assert batch.selection is not None
    total = torch.zeros((), dtype=torch.float64)
    counts = [length for length in LENGTHS if length]
    for index in range(batch.num_rows):
        own = batch.row_index == index
        if not own.any():
            continue
        old, advantages = batch.behaviour_log_probs[own].tolist(), batch.advantages[own].tolist()
        row: Row = (batch.log_probs[own], old, advantages, batch.selection[own].tolist())
        losses = REFERENCES[name](row, OPTIONS)
        share = len(counts) * len(losses) if mode == "seq-mean-token-mean" else sum(counts)
        total = total + torch.stack(losses).sum() / share
    return total


def fast_loss(name: str, batch: LossBatch, mode: LossAggMode) -> Tensor:
    """The loss by the library, over this batch of whole rows as a share of all rows."""
    per_token, _ = POLICY_LOSSES.get(name).function()(batch, OPTIONS)
    counts = torch.bincount(batch.row_index, minlength=batch.num_rows)
    weights = token_weights(counts, mode=mode, totals=LossTotals.of(LENGTHS))
    total: Tensor = (per_token * weights[batch.row_index]).sum()
    return total


def mode_of(name: str) -> LossAggMode:
    return "seq-mean-token-mean" if POLICY_LOSSES.get(name).loss_agg_mode else "token-mean"


def part_of(batch: LossBatch, rows: range) -> LossBatch:
    """Some consecutive rows of a batch, numbered from 0."""
    own = (batch.row_index >= rows.start) & (batch.row_index < rows.stop)
    assert batch.selection is not None
    return LossBatch(
        log_probs=batch.log_probs[own],
        behaviour_log_probs=batch.behaviour_log_probs[own],
        advantages=batch.advantages[own],
        row_index=batch.row_index[own] - rows.start,
        num_rows=len(rows),
        selection=batch.selection[own],
    )


def test_every_loss_has_a_reference() -> None:
    assert set(POLICY_LOSSES.names()) >= REFERENCES.keys()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", REFERENCES)
def test_values_and_gradients_agree_with_the_reference(name: str, seed: int) -> None:
    batch = make_batch(seed)
    fast, slow = fast_loss(name, batch, mode_of(name)), slow_loss(name, batch, mode_of(name))
    assert fast.item() == pytest.approx(slow.item(), rel=1e-9)
    (ours,), (theirs,) = (torch.autograd.grad(loss, batch.log_probs) for loss in (fast, slow))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_agree_with_finite_differences(name: str) -> None:
    batch = make_batch(11)

    def loss(log_probs: Tensor) -> Tensor:
        return fast_loss(name, replace(batch, log_probs=log_probs), mode_of(name))

    assert torch.autograd.gradcheck(loss, (batch.log_probs,))


def test_gspos_gradient_agrees_with_finite_differences_of_its_sequence_objective() -> None:
    batch = make_batch(11)
    (ours,) = torch.autograd.grad(fast_loss("gspo", batch, "seq-mean-token-mean"), batch.log_probs)
    step = 1e-6
    for place in range(len(ours)):
        ends = []
        for sign in (1.0, -1.0):
            moved = batch.log_probs.detach().clone()
            moved[place] += sign * step
            ends.append(slow_loss("gspo", replace(batch, log_probs=moved), "seq-mean-token-mean").item())
        assert ours[place].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", REFERENCES)
def test_a_split_into_micro_batches_changes_no_token_and_no_gradient(name: str, dtype: torch.dtype) -> None:
    full = make_batch(5)
    full = replace(
        full,
        log_probs=full.log_probs.detach().to(dtype).requires_grad_(),
        behaviour_log_probs=full.behaviour_log_probs.to(dtype),
        advantages=full.advantages.to(dtype),
    )
    parts = [part_of(full, rows) for rows in (range(0, 1), range(1, 3), range(3, 6))]
    function = POLICY_LOSSES.get(name).function()
    whole, metrics = function(full, OPTIONS)
    split = [function(part, OPTIONS) for part in parts]
    assert torch.equal(whole, torch.cat([loss for loss, _ in split]))
    for key, values in metrics.items():
        assert torch.equal(values, torch.cat([found[key] for _, found in split]))
    (together,) = torch.autograd.grad(fast_loss(name, full, mode_of(name)), full.log_probs)
    shares = torch.stack([fast_loss(name, part, mode_of(name)) for part in parts]).sum()
    (apart,) = torch.autograd.grad(shares, full.log_probs)
    assert torch.equal(together, apart)


@pytest.mark.parametrize("name", REFERENCES)
def test_rows_without_tokens_change_nothing(name: str) -> None:
    batch = make_batch(6)
    with_gaps = replace(batch, row_index=2 * batch.row_index + 1, num_rows=2 * batch.num_rows + 3)
    function = POLICY_LOSSES.get(name).function()
    assert torch.equal(function(batch, OPTIONS)[0], function(with_gaps, OPTIONS)[0])
