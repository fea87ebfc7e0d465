import pytest
from scipy.stats import binomtest

from ratchet.algorithms.statistics import wilson_interval


@pytest.mark.parametrize("trials", [1, 2, 7, 100, 1319])
def test_the_interval_is_scipys_at_every_share(trials: int) -> None:
    for successes in {0, 1, trials // 3, trials - 1, trials}:
        expected = binomtest(successes, trials).proportion_ci(confidence_level=0.95, method="wilson")
        assert wilson_interval(successes, trials) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_another_level_is_another_z() -> None:
    expected = binomtest(30, 80).proportion_ci(confidence_level=0.99, method="wilson")
    assert wilson_interval(30, 80, z=2.5758293035489004) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_nothing_is_known_without_trials() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_a_sum_of_means_lies_between_its_neighbours() -> None:
    low, high = wilson_interval(2.5, 4)
    assert wilson_interval(2, 4)[0] < low < wilson_interval(3, 4)[0]
    assert wilson_interval(2, 4)[1] < high < wilson_interval(3, 4)[1]
