"""KL estimates against hand-worked numbers, the exact KL, and finite differences."""

import math
from typing import cast

import pytest
import torch

from ratchet.algorithms.kl import KLKind, kl_estimate


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("kl", [0.5, -0.5, 0.0]),
        ("k1", [0.5, -0.5, 0.0]),
        ("abs", [0.5, 0.5, 0.0]),
        ("mse", [0.125, 0.125, 0.0]),
        ("k2", [0.125, 0.125, 0.0]),
        ("low_var_kl", [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5, 0.0]),
        ("k3", [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5, 0.0]),
    ],
)
def test_each_estimate_gives_the_numbers_worked_by_hand(kind: KLKind, expected: list[float]) -> None:
    log_probs = torch.tensor([-1.0, -1.5, -2.0], dtype=torch.float64)
    reference = torch.tensor([-1.5, -1.0, -2.0], dtype=torch.float64)
    assert kl_estimate(log_probs, reference, kind).tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_estimate_averages_to_the_exact_kl(kind: KLKind) -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = (policy * (policy / reference).log()).sum().item()
    estimates = kl_estimate(policy.log(), reference.log(), kind)
    assert (policy * estimates).sum().item() == pytest.approx(exact, abs=1e-12)


def test_k3_is_bounded_and_flat_where_it_saturates() -> None:
    log_probs = torch.tensor([-30.0, -1.0, -1.0], requires_grad=True)
    estimate = kl_estimate(log_probs, torch.tensor([-1.0, -30.0, -1.25]), "k3")
    assert estimate[:2].tolist() == [10.0, 10.0]
    torch.autograd.backward(estimate.sum())
    assert log_probs.grad is not None
    assert log_probs.grad[:2].tolist() == [0.0, 0.0]
    assert log_probs.grad[2].item() == pytest.approx(1 - math.exp(-0.25), abs=1e-6)


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2\] and \[1\]"):
        kl_estimate(torch.zeros(2), torch.zeros(1), "k1")


@pytest.mark.parametrize("kind", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind: str) -> None:
    log_probs = torch.tensor([-1.0, -1.5, -30.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, -1.0], dtype=torch.float64)
    plain = kl_estimate(log_probs, reference, cast(KLKind, kind))
    straight = kl_estimate(log_probs, reference, cast(KLKind, f"{kind}+"))
    assert straight.tolist() == plain.tolist()
    (gradient,) = torch.autograd.grad(straight.sum(), log_probs)
    assert gradient.tolist() == [0.5, -0.5, -29.0]


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_gradients_agree_with_finite_differences(kind: KLKind) -> None:
    log_probs = torch.tensor([-1.0, -1.5, -2.25, -0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, -2.0, -0.3], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda values: kl_estimate(values, reference, kind), (log_probs,))


@pytest.mark.parametrize("kind", ["full", "k4", "+", "k1++", ""])
def test_what_is_no_estimate_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="low_var_kl"):
        kl_estimate(torch.zeros(1), torch.zeros(1), cast(KLKind, kind))
