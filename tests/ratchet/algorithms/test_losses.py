"""Policy losses that look at each token alone, against numbers worked by hand."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ratchet.algorithms.batch import LossBatch, LossOptions
from ratchet.algorithms.catalog import POLICY_LOSSES
from ratchet.algorithms.losses import cispo, dppo_kl, dppo_tv, dro, gpg, ppo_clip, sapo

OPTIONS = LossOptions(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0, dro_beta=0.4)


def one_token(ratio: float, advantage: float, *, behaviour: float = math.log(0.125), weight: float = 1.0) -> LossBatch:
    """A token of behaviour probability 1/8, unless it is given, whose probability has since grown by `ratio`."""
    old = torch.tensor([behaviour], dtype=torch.float64)
    return LossBatch(
        log_probs=(old + math.log(ratio)).requires_grad_(),
        behaviour_log_probs=old,
        advantages=torch.tensor([advantage], dtype=torch.float64),
        row_index=torch.zeros(1, dtype=torch.long),
        num_rows=1,
        importance_weights=torch.tensor([weight], dtype=torch.float64),
    )


def gradient(loss: Tensor, batch: LossBatch) -> float:
    """Derivative of a summed loss by the one token's log-prob."""
    (found,) = torch.autograd.grad(loss.sum(), batch.log_probs)
    return found.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped", "lower"),
    [
        (1.0, 2.0, -2.0, -2.0, 0.0, 0.0),
        (1.2, 2.0, -2.4, -2.4, 0.0, 0.0),
        (2.0, 2.0, -2.56, 0.0, 1.0, 0.0),  # above the upper bound and good: held at 1.28
        (0.5, 2.0, -1.0, -1.0, 0.0, 0.0),  # below the lower bound and good: not held
        (0.5, -1.0, 0.8, 0.0, 1.0, 0.0),  # below the lower bound and bad: held at 0.8
        (2.0, -1.0, 2.0, 2.0, 0.0, 0.0),  # above the upper bound and bad: not held ...
        (5.0, -1.0, 3.0, 0.0, 0.0, 1.0),  # ... until the dual clip holds it at 3
        (5.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_ppo_gives_one_token_the_loss_worked_by_hand(
    ratio: float, advantage: float, loss: float, slope: float, clipped: float, lower: float
) -> None:
    batch = one_token(ratio, advantage)
    per_token, metrics = ppo_clip(batch, OPTIONS)
    assert per_token.item() == pytest.approx(loss, abs=1e-12)
    assert gradient(per_token, batch) == pytest.approx(slope, abs=1e-12)
    assert metrics["pg_clipfrac"].item() == clipped
    assert metrics["pg_clipfrac_lower"].item() == lower
    assert metrics["ppo_kl"].item() == pytest.approx(-math.log(ratio), abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope", "clipped"),
    [(1.0, 2.0, -2.0, 0.0), (2.0, 2.0, -2.56, 1.0), (0.5, 2.0, -1.6, 1.0), (0.5, -1.0, 0.8, 1.0)],
)
def test_cispo_pulls_clipped_tokens_with_the_clipped_ratio(
    ratio: float, advantage: float, slope: float, clipped: float
) -> None:
    batch = one_token(ratio, advantage)
    per_token, metrics = cispo(batch, OPTIONS)
    assert gradient(per_token, batch) == pytest.approx(slope, abs=1e-12)
    assert per_token.item() == pytest.approx(slope * math.log(0.125 * ratio), abs=1e-12)
    assert metrics["pg_clipfrac"].item() == clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -4.0, -2.0),  # half of 4 / tau; on policy the slope is that of REINFORCE
        (1.0, -1.0, 2.0 / 1.05, 1.0),
        # sigmoid(ln 3) = 3/4, with the slope 4 * 3/4 * 1/4 = 3/4 times the ratio
        (1.0 + math.log(3.0), 2.0, -6.0, -1.5 * (1.0 + math.log(3.0))),
    ],
)
def test_sapo_fades_a_ratio_out_softly(ratio: float, advantage: float, loss: float, slope: float) -> None:
    batch = one_token(ratio, advantage)
    per_token, _ = sapo(batch, OPTIONS)
    assert per_token.item() == pytest.approx(loss, abs=1e-12)
    assert gradient(per_token, batch) == pytest.approx(slope, abs=1e-12)


def test_gpg_is_reinforce() -> None:
    batch = one_token(2.0, 3.0)
    per_token, _ = gpg(batch, OPTIONS)
    assert per_token.item() == pytest.approx(-3.0 * math.log(0.25), abs=1e-12)
    assert gradient(per_token, batch) == -3.0


def test_dro_adds_a_quadratic_of_the_log_ratio() -> None:
    batch = one_token(math.exp(0.5), 3.0)
    per_token, _ = dro(batch, OPTIONS)
    assert per_token.item() == pytest.approx(-3.0 * (math.log(0.125) + 0.5) + 0.2 * 0.25, abs=1e-12)
    assert gradient(per_token, batch) == pytest.approx(-3.0 + 0.4 * 0.5, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope", "left_out"),
    [
        (2.0, 1.0, -2.0, 0.0),  # 0.125 -> 0.25: by 0.125, within 0.28
        (3.5, 1.0, 0.0, 1.0),  # by 0.3125
        (3.5, -1.0, 3.0, 0.0),  # the wrong way round for a bad token: kept, the ratio truncated at 3
        (0.5, 1.0, -0.5, 0.0),
    ],
)
def test_dppo_tv_leaves_out_tokens_that_moved_too_far(
    ratio: float, advantage: float, slope: float, left_out: float
) -> None:
    batch = one_token(ratio, advantage)
    per_token, metrics = dppo_tv(batch, OPTIONS)
    assert gradient(per_token, batch) == pytest.approx(slope, abs=1e-12)
    assert metrics["pg_clipfrac"].item() == left_out
    assert metrics["pg_clipfrac_lower"].item() == float(slope == 3.0)


def test_dppo_tv_leaves_out_a_bad_token_that_fell_too_far() -> None:
    batch = one_token(0.5, -1.0, behaviour=math.log(0.5))  # by 0.25, beyond 0.2
    per_token, metrics = dppo_tv(batch, OPTIONS)
    assert per_token.item() == 0.0
    assert metrics["pg_clipfrac"].item() == 1.0


@pytest.mark.parametrize(("bound", "left_out"), [(0.144, 0.0), (0.143, 1.0)])
def test_dppo_kl_measures_a_token_against_all_others_together(bound: float, left_out: float) -> None:
    # 0.5 -> 0.75: 0.5 ln(0.5 / 0.75) + 0.5 ln(0.5 / 0.25) = 0.5 ln(4 / 3) = 0.143841
    batch = one_token(1.5, 1.0, behaviour=math.log(0.5))
    per_token, metrics = dppo_kl(batch, LossOptions(clip_ratio_high=bound, clip_ratio_low=0.0))
    assert gradient(per_token, batch) == pytest.approx(-1.5 * (1.0 - left_out), abs=1e-12)
    assert metrics["pg_clipfrac"].item() == left_out
    bad = one_token(1.5, -1.0, behaviour=math.log(0.5))
    assert dppo_kl(bad, LossOptions(clip_ratio_low=0.0))[1]["pg_clipfrac"].item() == 0.0


def test_dppo_kl_of_a_sure_token_is_finite() -> None:
    batch = one_token(1.0, 1.0, behaviour=0.0)
    per_token, _ = dppo_kl(batch, OPTIONS)
    assert per_token.item() == 0.0
    assert gradient(per_token, batch) == -1.0


@pytest.mark.parametrize("loss", [ppo_clip, cispo, sapo, gpg, dro, dppo_tv, dppo_kl])
def test_importance_weights_multiply_value_and_gradient(loss: Any) -> None:
    plain, heavy = one_token(1.1, 0.7), one_token(1.1, 0.7, weight=1.5)
    assert loss(heavy, OPTIONS)[0].item() == pytest.approx(1.5 * loss(plain, OPTIONS)[0].item(), rel=1e-12)
    slope = gradient(loss(plain, OPTIONS)[0], plain)
    assert gradient(loss(heavy, OPTIONS)[0], heavy) == pytest.approx(1.5 * slope, rel=1e-12)


@pytest.mark.parametrize("loss", [ppo_clip, cispo, sapo, gpg, dppo_tv])
def test_on_policy_the_gradient_is_that_of_reinforce(loss: Any) -> None:
    batch = one_token(1.0, -1.75)
    assert gradient(loss(batch, OPTIONS)[0], batch) == pytest.approx(1.75, abs=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_a_wild_ratio_stays_finite(name: str) -> None:
    entry = POLICY_LOSSES.get(name)
    log_probs = torch.tensor([500.0, -500.0], requires_grad=True)
    batch = LossBatch(
        log_probs=log_probs,
        behaviour_log_probs=torch.zeros(2),
        advantages=torch.tensor([-1.0, 1.0]),
        row_index=torch.tensor([0, 1]),
        num_rows=2,
        selection=None if entry.select is None else torch.tensor([True, False]),
    )
    per_token, metrics = entry.function()(batch, OPTIONS)
    (found,) = torch.autograd.grad(per_token.sum(), log_probs)
    assert bool(torch.isfinite(per_token).all())
    assert bool(torch.isfinite(found).all())
    assert metrics.keys() == {"pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"}
    assert not any(values.requires_grad for values in metrics.values())


@given(st.floats(-4, 4), st.floats(-3, 3), st.floats(0, 0.9), st.floats(0, 2), st.floats(1.01, 20))
def test_every_token_agrees_with_the_definition_of_ppo(
    log_ratio: float, advantage: float, low: float, high: float, most: float
) -> None:
    ratio = math.exp(log_ratio)
    slow = -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if advantage < 0:
        slow = min(slow, -most * advantage)
    options = LossOptions(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=most)
    per_token, _ = ppo_clip(one_token(ratio, advantage), options)
    assert per_token.item() == pytest.approx(slow, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("vanilla", {"clip_ratio_c": 1.0}),
        ("vanilla", {"clip_ratio_c": float("nan")}),
        ("vanilla", {"clip_ratio_low": -0.1}),
        ("gspo", {"clip_ratio_high": -0.1}),
        ("dppo_tv", {"clip_ratio_c": 0.5}),
        ("sapo", {"tau_neg": 0.0}),
        ("dro", {}),
        ("dro", {"dro_beta": 0.0}),
    ],
)
def test_options_that_make_no_sense_are_refused(name: str, changed: dict[str, float]) -> None:
    options = LossOptions(**changed)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=next(iter(changed), "dro_beta")):
        POLICY_LOSSES.get(name).function()(one_token(1.0, 1.0), options)


def test_shapes_that_differ_are_refused() -> None:
    batch = LossBatch(
        log_probs=torch.zeros(2),
        behaviour_log_probs=torch.zeros(2),
        advantages=torch.zeros(1),
        row_index=torch.zeros(2, dtype=torch.long),
        num_rows=1,
    )
    with pytest.raises(ValueError, match=r"'advantages': \[1\]"):
        ppo_clip(batch, OPTIONS)
