"""Losses of pairs by hand."""

import math

import pytest
import torch

from ratchet.algorithms.preference import bradley_terry_loss, dpo_loss

CHOSEN = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
REJECTED = torch.tensor([-1.0, 2.0, 0.0], dtype=torch.float64)  # differences 2, -4, 0


def test_sigmoid_is_the_log_likelihood_of_the_preference() -> None:
    losses = dpo_loss(CHOSEN, REJECTED, beta=0.5, loss_type="sigmoid")
    assert losses.tolist() == pytest.approx([math.log(1 + math.exp(-1)), math.log(1 + math.exp(2)), math.log(2)])
    assert bradley_terry_loss(0.5 * CHOSEN, 0.5 * REJECTED).tolist() == pytest.approx(losses.tolist())


def test_hinge_asks_for_a_margin_of_one_over_beta_and_no_more() -> None:
    assert dpo_loss(CHOSEN, REJECTED, beta=0.5, loss_type="hinge").tolist() == [0.0, 3.0, 1.0]
    assert dpo_loss(CHOSEN, REJECTED, beta=0.25, loss_type="hinge").tolist() == [0.5, 2.0, 1.0]


def test_ipo_is_the_square_of_the_distance_to_half_over_beta() -> None:
    # 1 / (2 * 0.25) = 2: the first pair is where it shall be.
    assert dpo_loss(CHOSEN, REJECTED, beta=0.25, loss_type="ipo").tolist() == [0.0, 36.0, 4.0]


def test_smoothing_is_the_expected_loss_of_labels_that_are_sometimes_wrong() -> None:
    right = dpo_loss(CHOSEN, REJECTED, beta=0.5, loss_type="sigmoid")
    wrong = dpo_loss(REJECTED, CHOSEN, beta=0.5, loss_type="sigmoid")
    smooth = dpo_loss(CHOSEN, REJECTED, beta=0.5, loss_type="sigmoid", label_smoothing=0.1)
    torch.testing.assert_close(smooth, 0.9 * right + 0.1 * wrong)
    # Its least loss is at a finite margin, log(0.9 / 0.1).
    best = torch.tensor([math.log(9.0)], dtype=torch.float64, requires_grad=True)
    loss = dpo_loss(best, torch.zeros_like(best), beta=1.0, loss_type="sigmoid", label_smoothing=0.1)
    (slope,) = torch.autograd.grad(loss.sum(), best)
    assert slope.item() == pytest.approx(0.0, abs=1e-12)


def test_the_gradient_pushes_the_sides_apart_by_how_wrong_the_pair_is() -> None:
    chosen, rejected = CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()
    by_chosen, by_rejected = torch.autograd.grad(
        dpo_loss(chosen, rejected, beta=0.5, loss_type="sigmoid").sum(), (chosen, rejected)
    )
    expected = [-0.5 / (1 + math.exp(margin)) for margin in (1.0, -2.0, 0.0)]
    assert by_chosen.tolist() == pytest.approx(expected)
    assert by_rejected.tolist() == pytest.approx([-value for value in expected])


def test_large_margins_stay_finite() -> None:
    far = torch.tensor([1e4, -1e4], requires_grad=True)
    losses = dpo_loss(far, torch.zeros(2), beta=1.0, loss_type="sigmoid")
    assert losses.tolist() == [0.0, 1e4]
    (slopes,) = torch.autograd.grad(losses.sum(), far)
    assert slopes.tolist() == [0.0, -1.0]
    assert bradley_terry_loss(far, torch.zeros(2)).tolist() == [0.0, 1e4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "kto"}, "loss_type of sigmoid, ipo, hinge, got 'kto'"),
        ({"beta": 0.0}, "beta above 0, got 0.0"),
        ({"beta": float("nan")}, "beta above 0, got nan"),
        ({"label_smoothing": 0.5}, "below 0.5, got 0.5"),
        ({"label_smoothing": -0.1}, "at least 0"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "no label_smoothing beside loss_type 'ipo', got 0.1"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"beta": 0.1, "loss_type": "sigmoid", **options}
    with pytest.raises(ValueError, match=message):
        dpo_loss(CHOSEN, REJECTED, **given)  # type: ignore[arg-type]


def test_sides_of_unequal_number_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[3\] and \[2\]"):
        dpo_loss(CHOSEN, REJECTED[:2], beta=0.1, loss_type="sigmoid")
    with pytest.raises(ValueError, match=r"\[3, 1\] and \[3, 1\]"):
        bradley_terry_loss(CHOSEN[:, None], REJECTED[:, None])
