"""The gate's arithmetic, by numbers that were worked by hand."""

from collections.abc import Sequence

import pytest

from ratchet.errors import StoreError
from ratchet.stages.gate import compare, judge
from ratchet.stages.measurement import Measurement
from ratchet.store.champions import Bars


def measured(accuracies: Sequence[float], *, are_shares: bool = True, place: str = "run/step-000001") -> Measurement:
    return Measurement(
        accuracies={f"val-{number:07d}": value for number, value in enumerate(accuracies)},
        are_shares=are_shares,
        table="t" * 64,
        held_out="h" * 64,
        settings="s" * 64,
        place=place,
    )


def bars(min_accuracy: float = 0.0, min_improvement: float = 0.0, *, significant: bool = True) -> Bars:
    return Bars(min_accuracy=min_accuracy, min_improvement=min_improvement, significant=significant)


NINE_OF_TWELVE = measured([1.0] * 9 + [0.0] * 3)


def test_accuracy_and_interval_are_over_prompts_of_all_data_sources() -> None:
    shown = NINE_OF_TWELVE.describe()
    # Wilson: (0.75 + z^2/24 -+ z sqrt(0.75 * 0.25 / 12 + z^2/576)) / (1 + z^2/12), z = 1.959964.
    assert (shown.accuracy, shown.prompts) == (0.75, 12)
    assert (shown.low, shown.high) == pytest.approx((0.46769, 0.91106), abs=1e-5)
    assert measured([0.5, 0.25, 1.0, 0.25]).describe().accuracy == 0.5


@pytest.mark.parametrize(
    ("bar", "significant", "is_cleared"),
    [
        (0.467, True, True),
        (0.468, True, False),
        (0.75, False, True),  # the bar itself is enough
        (0.7501, False, False),
        (0.0, True, True),
    ],
)
def test_the_absolute_bar_is_reached_by_the_lower_end_or_by_the_mean(
    bar: float, significant: bool, is_cleared: bool
) -> None:
    found = judge(NINE_OF_TWELVE, bars(bar, significant=significant))
    assert found.improvement is None
    assert (found.reasons == ()) is is_cleared
    if not is_cleared:
        what = "the lower end of its 95% interval" if significant else "it"
        assert found.reasons == (f"accuracy 0.7500 [0.4677, 0.9111]: {what} is below promotion.min_accuracy={bar:g}",)


def test_no_accuracy_clears_a_bar_of_one_significantly() -> None:
    assert judge(measured([1.0] * 1000), bars(1.0)).reasons
    assert not judge(measured([1.0] * 1000), bars(1.0, significant=False)).reasons


EIGHT_WON = (measured([1.0] * 8 + [0.0] * 4), measured([0.0] * 12))
FIVE_WON_ONE_LOST = (measured([1.0] * 5 + [0.0] + [1.0] * 4 + [0.0] * 2), measured([0.0] * 5 + [1.0] * 5 + [0.0] * 2))


def test_the_improvement_is_paired_prompt_by_prompt() -> None:
    # With the added pairs 14: mean 8/14, variance 9/14 - (8/14)^2 = 0.316327, standard error 0.150317.
    found = compare(*EIGHT_WON)
    assert (found.mean, found.champion_accuracy) == pytest.approx((8 / 12, 0.0))
    assert (found.low, found.high) == pytest.approx((0.276813, 0.866044), abs=1e-5)
    # Mean 4/14, variance 7/14 - (4/14)^2 = 0.418367, standard error 0.172869.
    found = compare(*FIVE_WON_ONE_LOST)
    assert (found.mean, found.champion_accuracy) == pytest.approx((4 / 12, 5 / 12))
    assert (found.low, found.high) == pytest.approx((-0.053103, 0.624531), abs=1e-5)


@pytest.mark.parametrize(
    ("pair", "bar", "significant", "is_cleared"),
    [
        (EIGHT_WON, 0.27, True, True),
        (EIGHT_WON, 0.28, True, False),
        (FIVE_WON_ONE_LOST, 0.0, True, False),
        (FIVE_WON_ONE_LOST, 0.0, False, True),
        (FIVE_WON_ONE_LOST, 0.33, False, True),
        (FIVE_WON_ONE_LOST, 0.34, False, False),
        ((NINE_OF_TWELVE, NINE_OF_TWELVE), 0.0, False, False),  # as good is not better
    ],
)
def test_the_champion_is_exceeded_by_the_lower_end_or_by_the_mean(
    pair: tuple[Measurement, Measurement], bar: float, significant: bool, is_cleared: bool
) -> None:
    found = judge(pair[0], bars(0.0, bar, significant=significant), pair[1], 7)
    assert found.improvement == compare(*pair)
    assert (found.reasons == ()) is is_cleared
    for reason in found.reasons:
        assert reason.startswith("improvement over champion 7 ")
        assert reason.endswith(f"does not exceed promotion.min_improvement={bar:g}")


def test_both_bars_are_named_where_both_are_missed() -> None:
    found = judge(FIVE_WON_ONE_LOST[0], bars(0.9), FIVE_WON_ONE_LOST[1], 7)
    assert [reason.split()[0] for reason in found.reasons] == ["accuracy", "improvement"]
    assert "[-0.0531, +0.6245]" in found.reasons[1]


def test_a_small_gain_on_many_prompts_is_significant_and_on_few_it_is_not() -> None:
    for times, is_cleared in ((10, False), (200, True)):
        new, old = measured(([1.0] * 6 + [0.0] * 4) * times), measured(([1.0] * 5 + [0.0] * 5) * times)
        wanted = bars(0.0, 0.05)
        assert (judge(new, wanted, old, 1).reasons == ()) is is_cleared


def test_rewards_that_are_no_shares_promote_nothing() -> None:
    scores = measured([3.0, 0.5], are_shares=False)
    assert (scores.describe().low, scores.describe().high, scores.describe().accuracy) == (None, None, 1.75)
    (reason,) = judge(scores, bars()).reasons
    assert "lie outside [0, 1]" in reason
    (reason,) = judge(NINE_OF_TWELVE, bars(), measured([2.0] * 12, are_shares=False, place="there"), 7).reasons
    assert reason == "some rewards of champion 7 in there lie outside [0, 1]"


def test_tables_of_other_prompts_are_never_compared() -> None:
    with pytest.raises(StoreError, match="of other ids"):
        compare(NINE_OF_TWELVE, measured([1.0] * 11))
