"""DAPO's penalty on length and its choice of groups."""

import subprocess
import sys

import pytest

from ratchet.algorithms.shaping import informative_groups, overlong_penalty


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (120, -2.0)],
)
def test_the_penalty_grows_along_the_buffer(num_tokens: int, penalty: float) -> None:
    assert overlong_penalty(num_tokens, max_tokens=100, buffer_tokens=20) == pytest.approx(penalty, abs=1e-15)


def test_the_penalty_is_scaled() -> None:
    assert overlong_penalty(90, max_tokens=100, buffer_tokens=20, penalty_factor=0.5) == -0.25
    assert overlong_penalty(90, max_tokens=100, buffer_tokens=20, penalty_factor=0.0) == 0.0


@pytest.mark.parametrize(("buffer_tokens", "penalty_factor"), [(0, 1.0), (101, 1.0), (20, -1.0), (20, float("nan"))])
def test_a_penalty_that_makes_no_sense_is_refused(buffer_tokens: int, penalty_factor: float) -> None:
    with pytest.raises(ValueError, match="overlong"):
        overlong_penalty(90, max_tokens=100, buffer_tokens=buffer_tokens, penalty_factor=penalty_factor)


def test_groups_whose_values_differ_are_informative() -> None:
    groups = ["a", "b", "a", "b", "c", "c"]
    assert informative_groups(groups, [1.0, 0.0, 0.0, 0.0, 0.1, 0.2]) == {"a", "c"}


def test_equal_values_are_equal_whatever_their_mean_rounds_to() -> None:
    # The mean of seven times 0.9 is not 0.9 in floating point, so that their standard deviation is not 0.
    assert informative_groups([0] * 7, [0.9] * 7) == set()


def test_a_lone_sample_is_informative_for_verl_only() -> None:
    assert informative_groups(["a"], [1.0]) == set()
    assert informative_groups(["a"], [1.0], compat="verl") == {"a"}


def test_a_value_for_each_rollout_is_needed() -> None:
    with pytest.raises(ValueError, match="2 rollouts, got 1"):
        informative_groups(["a", "a"], [1.0])


@pytest.mark.parametrize("module", ["shaping", "rollout_bands"])
def test_plain_numbers_need_no_torch(module: str) -> None:
    code = f"import sys, ratchet.algorithms.{module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
