"""The coefficient of the KL penalty, against hand-worked numbers."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.algorithms.kl_controller import AdaptiveKLController, FixedKLController


@pytest.mark.parametrize(
    ("current_kl", "expected"),
    [
        (0.5, 0.00102048),  # 24 times too much counts as 0.2: 0.001 * (1 + 0.2 * 1024 / 10000)
        (0.0, 0.00097952),  # 1 - 0.2 * 0.1024
        (0.02, 0.001),
        (0.022, 0.00101024),  # 10% too much: 1 + 0.1 * 0.1024
    ],
)
def test_the_adaptive_coefficient_moves_by_a_clipped_share_of_the_error(current_kl: float, expected: float) -> None:
    controller = AdaptiveKLController(init_kl_coef=0.001, target=0.02, horizon=10_000)
    controller.update(current_kl, n_steps=1024)
    assert controller.value == pytest.approx(expected, rel=1e-12)


def test_a_controller_goes_on_from_anothers_state() -> None:
    first = AdaptiveKLController(0.1, 0.02, 1000)
    first.update(0.5, 100)
    resumed = AdaptiveKLController(0.1, 0.02, 1000)
    resumed.load_state(first.state())
    first.update(0.5, 100)
    resumed.update(0.5, 100)
    assert resumed.value == first.value == pytest.approx(0.1 * 1.02 * 1.02)


def test_a_fixed_coefficient_stays() -> None:
    controller = FixedKLController(0.05)
    controller.update(9.0, 1024)
    assert controller.value == 0.05
    resumed = FixedKLController(0.0)
    resumed.load_state(controller.state())
    assert resumed.value == 0.05


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_kl_that_is_not_finite_is_refused_and_changes_nothing(bad: float) -> None:
    for controller in (AdaptiveKLController(0.1, 0.02, 1000, compat="verl"), FixedKLController(0.1)):
        with pytest.raises(ValueError, match="current_kl"):
            controller.update(bad, 8)
        assert controller.value == 0.1


@pytest.mark.parametrize("target", [0.0, -0.1, float("nan")])
def test_a_target_that_is_not_above_zero_is_refused(target: float) -> None:
    with pytest.raises(ValueError, match="target"):
        AdaptiveKLController(0.1, target, 1000)


def test_a_horizon_of_zero_and_a_negative_coefficient_are_refused() -> None:
    with pytest.raises(ValueError, match="horizon"):
        AdaptiveKLController(0.1, 0.02, 0)
    with pytest.raises(ValueError, match="init_kl_coef"):
        AdaptiveKLController(-0.1, 0.02, 10)
    with pytest.raises(ValueError, match="kl_coef"):
        FixedKLController(-0.1)


def test_a_step_larger_than_five_horizons_stops_at_zero_and_goes_below_with_verls_arithmetic() -> None:
    # 0.001 * (1 - 0.2 * 1024 / 10) = -0.01948
    ours, theirs = AdaptiveKLController(0.001, 0.02, 10), AdaptiveKLController(0.001, 0.02, 10, compat="verl")
    ours.update(0.0, 1024)
    theirs.update(0.0, 1024)
    assert ours.value == 0.0
    assert theirs.value == pytest.approx(-0.01948)
    with pytest.raises(ValueError, match="value"):
        ours.load_state(theirs.state())


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 10**6)), max_size=20))
def test_no_sequence_of_steps_makes_the_coefficient_negative(steps: list[tuple[float, int]]) -> None:
    controller = AdaptiveKLController(0.1, 0.05, 100)
    for current_kl, n_steps in steps:
        controller.update(current_kl, n_steps)
    assert controller.value >= 0


def test_the_controllers_load_no_torch() -> None:
    code = "import sys, ratchet.algorithms.kl_controller; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
