"""The clipped policy loss against hand-worked numbers, a slow reference and numbers computed by verl."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratchet.algorithms.aggregation import LossTotals, token_weights
from ratchet.algorithms.losses import ppo_clip_loss

BOUNDS = {"clip_low": 0.2, "clip_high": 0.28, "clip_c": 3.0}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "lower"),
    [
        (1.0, 2.0, -2.0, 0.0, 0.0),
        (1.2, 2.0, -2.4, 0.0, 0.0),
        (2.0, 2.0, -2.56, 1.0, 0.0),  # above the upper bound and good: held at 1.28
        (0.5, 2.0, -1.0, 0.0, 0.0),  # below the lower bound and good: not held
        (0.5, -1.0, 0.8, 1.0, 0.0),  # below the lower bound and bad: held at 0.8
        (2.0, -1.0, 2.0, 0.0, 0.0),  # above the upper bound and bad: not held ...
        (5.0, -1.0, 3.0, 0.0, 1.0),  # ... until the dual clip holds it at 3
        (5.0, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_one_token_gets_the_loss_worked_by_hand(
    ratio: float, advantage: float, loss: float, clipped: float, lower: float
) -> None:
    behaviour = torch.tensor([-2.0], dtype=torch.float64)
    per_token, metrics = ppo_clip_loss(
        behaviour + math.log(ratio), behaviour, torch.tensor([advantage], dtype=torch.float64), **BOUNDS
    )
    assert per_token.item() == pytest.approx(loss, abs=1e-12)
    assert metrics["pg_clipfrac"].item() == clipped
    assert metrics["pg_clipfrac_lower"].item() == lower
    assert metrics["ppo_kl"].item() == pytest.approx(-math.log(ratio), abs=1e-12)


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages = torch.tensor([0.5, -1.5, 0.0])
    per_token, _ = ppo_clip_loss(log_probs, log_probs.detach(), advantages, **BOUNDS)
    torch.autograd.backward(per_token.sum())
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [-0.5, 1.5, 0.0]


def test_a_wild_ratio_stays_finite() -> None:
    log_probs = torch.tensor([500.0, -500.0], requires_grad=True)
    per_token, _ = ppo_clip_loss(log_probs, torch.zeros(2), torch.tensor([-1.0, 1.0]), **BOUNDS)
    torch.autograd.backward(per_token.sum())
    assert log_probs.grad is not None
    assert bool(torch.isfinite(per_token).all())
    assert bool(torch.isfinite(log_probs.grad).all())


@given(st.floats(-4, 4), st.floats(-3, 3), st.floats(0, 0.9), st.floats(0, 2), st.floats(1.01, 20))
def test_every_token_agrees_with_the_definition(
    log_ratio: float, advantage: float, clip_low: float, clip_high: float, clip_c: float
) -> None:
    ratio = math.exp(log_ratio)
    slow = -min(ratio * advantage, min(max(ratio, 1 - clip_low), 1 + clip_high) * advantage)
    if advantage < 0:
        slow = min(slow, -clip_c * advantage)
    per_token, _ = ppo_clip_loss(
        torch.tensor([log_ratio], dtype=torch.float64),
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        clip_low=clip_low,
        clip_high=clip_high,
        clip_c=clip_c,
    )
    assert per_token.item() == pytest.approx(slow, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "changed", [{"clip_c": 1.0}, {"clip_low": -0.1}, {"clip_high": -0.1}, {"clip_c": float("nan")}]
)
def test_bounds_that_make_no_sense_are_refused(changed: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="clip_"):
        ppo_clip_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), **(BOUNDS | changed))


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        ppo_clip_loss(torch.zeros(2), torch.zeros(2), torch.zeros(1), **BOUNDS)


def test_golden_losses_metrics_and_gradients_agree_with_verl(shared: Path) -> None:
    cases = json.loads((shared / "golden/verl_0_9_1.json").read_text())["cases"]
    arrays = np.load(shared / "golden/verl_0_9_1.npz")
    compared = 0
    for name, case in cases.items():
        if case["fn"] != "policy_loss:vanilla":
            continue
        tensors = {key: torch.from_numpy(arrays[path]) for key, path in case["args"].items()}
        options = case["kwargs"]
        mask = tensors["response_mask"] > 0
        log_probs = tensors["log_prob"].requires_grad_()
        per_token, metrics = ppo_clip_loss(
            log_probs,
            tensors["old_log_prob"],
            tensors["advantages"],
            clip_low=options["clip_ratio_low"],
            clip_high=options["clip_ratio_high"],
            clip_c=options["clip_ratio_c"],
        )
        # verl multiplies importance weights of the sampler's mismatch into this loss.
        per_token = per_token * tensors.get("rollout_is_weights", torch.ones(()))
        counts = mask.sum(-1)
        totals = LossTotals.of(counts.tolist())
        weights = token_weights(counts, mode=options["loss_agg_mode"], totals=totals)[:, None].float()
        loss = torch.where(mask, per_token * weights, 0.0).sum()
        (gradient,) = torch.autograd.grad(loss, log_probs)
        golden, golden_gradient = (torch.from_numpy(arrays[key]) for key in case["out"])
        torch.testing.assert_close(loss.detach(), golden, atol=1e-6, rtol=1e-5, msg=name)
        torch.testing.assert_close(gradient[mask], golden_gradient[mask], atol=1e-7, rtol=1e-5, msg=name)
        for key, values in metrics.items():
            assert values[mask].mean().item() == pytest.approx(case["metrics"][f"actor/{key}"], abs=1e-6)
        compared += 1
    assert compared > 10
