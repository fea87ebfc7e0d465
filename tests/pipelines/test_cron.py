import pytest

from pipelines.cron import check_cron
from ratchet.errors import ConfigError


@pytest.mark.parametrize(
    "expression",
    [
        "0 0 2 * * *",
        "0  */10 2-5 * * *",
        "0 0 9 ? * 2-6",
        "0 0 9 ? JAN,jul MON-fri",
        "*/30 1,2,3 0-23/2 1-31 12 0",
        "59 59 23 31 12 6",
        "5/15 * * * * *",
    ],
)
def test_what_the_server_understands_is_taken(expression: str) -> None:
    assert check_cron(expression) == " ".join(expression.split())


def test_five_fields_are_refused_with_the_six_that_were_meant() -> None:
    """A server reads them as second, minute, hour, day and month: this one would start every hour."""
    with pytest.raises(
        ConfigError, match=r"'0 2 \* \* \*' has five fields, .* the first is the second: '0 0 2 \* \* \*'"
    ):
        check_cron("0 2 * * *")


@pytest.mark.parametrize(("expression", "count"), [("* * *", 3), ("", 0), ("0 0 2 * * * 2026", 7)])
def test_another_number_of_fields_is_refused(expression: str, count: int) -> None:
    with pytest.raises(
        ConfigError, match=f"has {count} fields: expected six, SECOND MINUTE HOUR DAY MONTH WEEKDAY, in UTC"
    ):
        check_cron(expression)


@pytest.mark.parametrize("expression", ["@daily", "@every 1h", "TZ=Europe/Berlin 0 0 2 * * *"])
def test_words_and_time_zones_are_refused(expression: str) -> None:
    with pytest.raises(ConfigError, match=r"expected six fields, .* in UTC"):
        check_cron(expression)


@pytest.mark.parametrize(
    "expression",
    ["0 0 2 30 2 *", "0 0 2 31 feb,4,JUN ?", "0 0 2 30,31 2/12 *", "0 0 2 31 4-6/5 *", "0 0 2 30/1 2 */2"],
)
def test_a_day_that_no_month_has_is_refused(expression: str) -> None:
    with pytest.raises(ConfigError, match="starts nothing: no month that it names has such a day"):
        check_cron(expression)


@pytest.mark.parametrize(
    "expression",
    ["0 0 2 29 2 *", "0 0 2 31 */2 *", "0 0 2 28-31 2 *", "0 0 2 30 2 MON", "0 0 2 * 2 *", "0 0 2 31 2-3 *"],
)
def test_a_day_that_some_month_or_a_weekday_has_is_taken(expression: str) -> None:
    """Where both days are named, either of them starts a run."""
    assert check_cron(expression) == expression


@pytest.mark.parametrize(
    ("expression", "part", "name"),
    [
        ("60 0 2 * * *", "60", "second"),
        ("0 -1 2 * * *", "-1", "minute"),
        ("0 0 24 * * *", "24", "hour"),
        ("0 0 2 0 * *", "0", "day of the month"),
        ("0 0 2 * 13 *", "13", "month"),
        ("0 0 2 * * 7", "7", "day of the week"),
        ("0 0 5-2 * * *", "5-2", "hour"),
        ("0 */0 2 * * *", "*/0", "minute"),
        ("0 1,,2 2 * * *", "", "minute"),
        ("0 1-2-3 2 * * *", "1-2-3", "minute"),
        ("0 0 2 * MON *", "MON", "month"),
        ("0 0 2 * * ²", "²", "day of the week"),
        ("0 0 2/ * * *", "2/", "hour"),
    ],
)
def test_a_field_out_of_its_range_is_named(expression: str, part: str, name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_cron(expression)
    assert f"{part!r} is no {name}; expected *, " in str(refused.value)
