"""KL estimates against hand-worked numbers, the exact KL, and numbers computed by verl."""

import json
import math
from pathlib import Path

import numpy as np
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


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'full'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "full")  # type: ignore[arg-type]


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2\] and \[1\]"):
        kl_estimate(torch.zeros(2), torch.zeros(1), "k1")


def test_golden_kl_estimates_and_gradients_agree_with_verl(shared: Path) -> None:
    cases = json.loads((shared / "golden/verl_0_9_1.json").read_text())["cases"]
    arrays = np.load(shared / "golden/verl_0_9_1.npz")
    compared = 0
    for name, case in cases.items():
        # A trailing "+" mixes one estimate's value with another's gradient, which is not offered here.
        if case["fn"] != "kl_penalty" or case["kwargs"]["kl_penalty"].endswith("+"):
            continue
        log_probs = torch.from_numpy(arrays[case["args"]["logprob"]]).requires_grad_()
        reference = torch.from_numpy(arrays[case["args"]["ref_logprob"]])
        mask = torch.from_numpy(arrays[case["args"]["response_mask"]]) > 0
        estimate = kl_estimate(log_probs, reference, case["kwargs"]["kl_penalty"])
        value, gradient = (torch.from_numpy(arrays[key]) for key in case["out"])
        torch.testing.assert_close(estimate[mask], value[mask], atol=1e-6, rtol=1e-5, msg=name)
        (ours,) = torch.autograd.grad(estimate[mask].sum(), log_probs)
        torch.testing.assert_close(ours[mask], gradient[mask], atol=1e-6, rtol=1e-5, msg=name)
        compared += 1
    assert compared > 10
