"""Clip-Cov and KL-Cov: which tokens they pick over a mini-batch, and what they do to them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ratchet.algorithms.batch import LossBatch, LossOptions
from ratchet.algorithms.losses_covariance import clip_cov, kl_cov, select_clip_cov, select_kl_cov


def batch_of(log_ratios: list[float], advantages: list[float], selection: list[bool] | None) -> LossBatch:
    """Tokens of one row that had log-prob -2 under the behaviour policy."""
    behaviour = torch.full((len(log_ratios),), -2.0, dtype=torch.float64)
    return LossBatch(
        log_probs=(behaviour + torch.tensor(log_ratios, dtype=torch.float64)).requires_grad_(),
        behaviour_log_probs=behaviour,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        row_index=torch.zeros(len(log_ratios), dtype=torch.long),
        num_rows=1,
        selection=None if selection is None else torch.tensor(selection),
    )


def pick(select: Any, log_probs: Tensor, advantages: Tensor, seed: int = 0, **options: Any) -> Tensor:
    """What `select` picks where the policy has not moved yet."""
    generator = torch.Generator().manual_seed(seed)
    picked: Tensor = select(log_probs, log_probs, advantages, LossOptions(**options), generator)
    return picked


def test_clip_cov_takes_the_selected_tokens_out_of_ppos_loss() -> None:
    batch = batch_of([0.0, math.log(2.0), 0.0], [1.0, 1.0, -1.0], [True, False, False])
    per_token, metrics = clip_cov(batch, LossOptions(clip_ratio_high=0.3))
    assert per_token.tolist() == pytest.approx([0.0, -1.3, 1.0], abs=1e-12)
    (slopes,) = torch.autograd.grad(per_token.sum(), batch.log_probs)
    assert slopes.tolist() == [0.0, 0.0, 1.0]
    assert metrics["pg_clipfrac"].tolist() == [1.0, 0.0, 0.0]


def test_kl_cov_adds_the_distance_of_the_selected_tokens() -> None:
    batch = batch_of([math.log(2.0), math.log(2.0), -math.log(2.0)], [1.0, 1.0, -1.0], [True, False, True])
    per_token, metrics = kl_cov(batch, LossOptions(ppo_kl_coef=0.5))
    half = 0.5 * math.log(2.0)
    assert per_token.tolist() == pytest.approx([-2.0 + half, -2.0, 0.5 + half], abs=1e-12)
    (slopes,) = torch.autograd.grad(per_token.sum(), batch.log_probs)
    assert slopes.tolist() == pytest.approx([-2.0 + 0.5, -2.0, 0.5 - 0.5], abs=1e-12)
    assert metrics["ppo_kl"].tolist() == pytest.approx([math.log(2.0)] * 3, abs=1e-12)


def test_kl_cov_picks_the_tokens_with_the_largest_covariance() -> None:
    # Means 0 and -2: covariances 2 * 1, 0 * -1, -1 * 1, -1 * -1.
    log_probs = torch.tensor([-1.0, -3.0, -1.0, -3.0])
    advantages = torch.tensor([2.0, 0.0, -1.0, -1.0])
    assert pick(select_kl_cov, log_probs, advantages).tolist() == [True, False, False, False]
    assert pick(select_kl_cov, log_probs, advantages, kl_cov_ratio=0.5).tolist() == [True, False, False, True]


def test_clip_cov_picks_within_its_band_alone() -> None:
    log_probs = torch.tensor([-1.0, -3.0, -1.0, -3.0])
    advantages = torch.tensor([2.0, 0.0, -1.0, -1.0])
    band: dict[str, Any] = {"clip_cov_lb": 0.5, "clip_cov_ub": 1.5, "clip_cov_ratio": 1.0}
    assert pick(select_clip_cov, log_probs, advantages, **band).tolist() == [False, False, False, True]
    assert not pick(select_clip_cov, log_probs, advantages, clip_cov_lb=2.0).any()


def test_clip_cov_leaves_tokens_alone_that_ppos_clip_holds() -> None:
    behaviour = torch.tensor([-2.0, -3.0, -1.0, -3.0])
    log_probs = torch.tensor([-1.0, -3.0, -1.0, -3.0])
    advantages = torch.tensor([2.0, 0.0, -1.0, -1.0])
    options = LossOptions(clip_cov_lb=0.5, clip_cov_ratio=1.0)
    picked = select_clip_cov(log_probs, behaviour, advantages, options, torch.Generator())
    assert picked.tolist() == [False, False, False, True]


def test_clip_cov_draws_as_many_as_asked_and_the_same_for_a_seed() -> None:
    generator = torch.Generator().manual_seed(5)
    log_probs = torch.randn(1000, generator=generator, dtype=torch.float64) - 3.0
    advantages = torch.randn(1000, generator=generator, dtype=torch.float64)
    options: dict[str, Any] = {"clip_cov_ratio": 0.02, "clip_cov_lb": 0.3}
    first = pick(select_clip_cov, log_probs, advantages, seed=1, **options)
    assert int(first.sum()) == 20
    assert torch.equal(first, pick(select_clip_cov, log_probs, advantages, seed=1, **options))
    assert not torch.equal(first, pick(select_clip_cov, log_probs, advantages, seed=2, **options))
    covariance = (advantages - advantages.mean()) * (log_probs - log_probs.mean())
    assert bool(((covariance > 0.3) & (covariance < 5.0))[first].all())


def test_at_least_one_token_is_picked_and_of_equal_ones_the_first() -> None:
    log_probs, advantages = torch.full((5,), -0.7), torch.full((5,), 0.9)
    assert pick(select_kl_cov, log_probs, advantages).tolist() == [True, False, False, False, False]


def test_equal_advantages_have_a_covariance_of_zero_whatever_their_mean_rounds_to() -> None:
    # In float32 the mean of seven times 0.9 may lie above 0.9, and the least likely token would stand out.
    log_probs, advantages = torch.linspace(-0.5, -3.0, 7), torch.full((7,), 0.9)
    assert pick(select_kl_cov, log_probs, advantages).tolist() == [True] + [False] * 6


@pytest.mark.parametrize("compat", ["ratchet", "verl"])
@pytest.mark.parametrize("select", [select_clip_cov, select_kl_cov])
def test_no_tokens_give_no_selection(select: Any, compat: str) -> None:
    assert pick(select, torch.zeros(0), torch.zeros(0), compat=compat).tolist() == []


@pytest.mark.parametrize(("select", "name"), [(select_clip_cov, "clip_cov_ratio"), (select_kl_cov, "kl_cov_ratio")])
def test_a_share_of_nothing_is_refused(select: Any, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        pick(select, torch.zeros(2), torch.zeros(2), 0, **{name: 0.0})


@pytest.mark.parametrize("loss", [clip_cov, kl_cov])
def test_a_loss_without_its_selection_is_refused(loss: Any) -> None:
    with pytest.raises(ValueError, match="select_"):
        loss(batch_of([0.0], [1.0], None), LossOptions())
