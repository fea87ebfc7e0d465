"""The critic's clipped loss against numbers worked by hand and finite differences."""

import pytest
import torch

from ratchet.algorithms.value_loss import value_loss


@pytest.mark.parametrize(
    ("value", "loss", "slope", "clipped"),
    [
        (1.25, 0.5 * 0.75**2, -0.75, 0.0),  # within 0.5 of the old value 1: the error is the gradient
        (1.75, 0.5 * 0.5**2, 0.0, 1.0),  # ran ahead towards the return 2: held at 1.5, no gradient
        (3.5, 0.5 * 1.5**2, 1.5, 0.0),  # ran past it: the plain square is the larger
        (0.25, 0.5 * 1.75**2, -1.75, 0.0),  # ran away from it: the plain square is the larger
    ],
)
def test_a_value_gets_the_loss_worked_by_hand(value: float, loss: float, slope: float, clipped: float) -> None:
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    old, returns = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), 2.0, dtype=torch.float64)
    per_token, metrics = value_loss(values, returns, old, cliprange_value=0.5)
    (gradient,) = torch.autograd.grad(per_token.sum(), values)
    assert per_token.tolist() == [[loss]]
    assert gradient.tolist() == [[slope]]
    assert metrics["vf_clipfrac"].tolist() == [[clipped]]
    assert not metrics["vf_clipfrac"].requires_grad


def test_the_gradient_agrees_with_finite_differences() -> None:
    generator = torch.Generator().manual_seed(3)
    values, returns, old = (torch.randn(6, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, returns, old, cliprange_value=0.4)[0], (values,))


def test_a_range_of_nothing_and_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="cliprange_value"):
        value_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), cliprange_value=0.0)
    with pytest.raises(ValueError, match="one shape"):
        value_loss(torch.zeros(2), torch.zeros(1), torch.zeros(2), cliprange_value=0.5)
