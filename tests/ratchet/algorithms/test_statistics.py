import math

import pytest
from scipy.stats import binomtest, norm

from ratchet.algorithms.statistics import paired_interval, wilson_interval


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


def _adjusted_wald(both: int, gained: int, lost: int, neither: int) -> tuple[float, float]:
    """The interval as it is written for a table of matched pairs: half a pair is added to each cell."""
    number = both + gained + lost + neither + 2
    p_gained, p_lost = (gained + 0.5) / number, (lost + 0.5) / number
    spread = norm.ppf(0.975) * math.sqrt((p_gained + p_lost - (p_gained - p_lost) ** 2) / number)
    return p_gained - p_lost - spread, p_gained - p_lost + spread


def test_paired_differences_worked_by_hand() -> None:
    # 2 won, 1 lost, 1 equal: 6 pairs with the added ones, mean 1/6, variance 4/6 - 1/36 = 23/36,
    # standard error sqrt(23/36/6) = 0.326315; 1.959964 of them are 0.639566.
    assert paired_interval([1, 1, 0, -1]) == pytest.approx((1 / 6 - 0.639566, 1 / 6 + 0.639566), abs=1e-6)


@pytest.mark.parametrize("cells", [(0, 0, 0, 1), (3, 2, 1, 4), (100, 40, 20, 160), (0, 30, 0, 30), (500, 1, 0, 500)])
def test_paired_differences_of_right_and_wrong_are_the_table_of_matched_pairs(cells: tuple[int, ...]) -> None:
    both, gained, lost, neither = cells
    differences = [1.0] * gained + [-1.0] * lost + [0.0] * (both + neither)
    assert paired_interval(differences) == pytest.approx(_adjusted_wald(both, gained, lost, neither), abs=1e-12)


def test_paired_differences_that_are_all_equal_still_leave_a_doubt() -> None:
    assert paired_interval([]) == (-1.0, 1.0)
    low, high = paired_interval([0.0] * 50)
    assert (low, high) == pytest.approx((-0.0377, 0.0377), abs=1e-4)
    assert paired_interval([1.0])[0] < 0
    assert paired_interval([1.0])[1] == 1.0


def test_many_paired_differences_of_means_have_the_normal_interval() -> None:
    differences = [(number % 9 - 3) / 8 for number in range(9000)]
    mean = sum(differences) / 9000
    deviation = math.sqrt(sum((value - mean) ** 2 for value in differences) / 8999)
    expected = norm.interval(0.95, loc=mean, scale=deviation / math.sqrt(9000))
    assert paired_interval(differences) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("gains", "losses"), [(0.1, 0.1), (0.3, 0.1), (0.05, 0.02), (0.6, 0.1), (0.4, 0.4)])
def test_the_paired_interval_holds_the_truth_about_as_often_as_it_says(gains: float, losses: float) -> None:
    held, pairs = 0.0, 30
    for gained in range(pairs + 1):
        for lost in range(pairs + 1 - gained):
            same = pairs - gained - lost
            chance = math.comb(pairs, gained) * math.comb(pairs - gained, lost)
            chance *= gains**gained * losses**lost * (1 - gains - losses) ** same
            low, high = paired_interval([1.0] * gained + [-1.0] * lost + [0.0] * same)
            held += chance * (low <= gains - losses <= high)
    assert held > 0.94
