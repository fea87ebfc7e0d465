"""Cron expressions as Kubeflow Pipelines reads them: six fields, of which the first is the second.

Trap: the server also takes five fields, reads them as second, minute, hour, day and month, and so starts an hourly run
where a daily one was meant (github.com/robfig/cron 1.2, whose grammar this is). Five fields are refused here.
"""

from collections.abc import Sequence

from ratchet.errors import ConfigError

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_FIELDS: tuple[tuple[str, int, int, Sequence[str]], ...] = (
    ("second", 0, 59, ()),
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of the month", 1, 31, ()),
    ("month", 1, 12, _MONTHS),
    ("day of the week", 0, 6, _DAYS),
)
"""What each field is, its range, and the names of its values in order."""
_LENGTHS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
"""Days of each month, in the years that have the most."""
_FORM = "SECOND MINUTE HOUR DAY MONTH WEEKDAY"


def check_cron(expression: str) -> str:
    """Return the expression with single spaces; ConfigError says what is wrong with it."""
    fields = expression.split()
    if expression.lstrip().startswith(("@", "TZ=", "CRON_TZ=")):
        raise ConfigError(
            f"--cron {expression!r}: expected six fields, {_FORM}, in UTC; for every N minutes take --every"
        )
    if len(fields) == 5:
        raise ConfigError(
            f"--cron {expression!r} has five fields, and Kubeflow Pipelines wants six, of which the first is the "
            f"second: {' '.join(['0', *fields])!r} ({_FORM}, in UTC)"
        )
    if len(fields) != len(_FIELDS):
        raise ConfigError(f"--cron {expression!r} has {len(fields)} fields: expected six, {_FORM}, in UTC")
    for text, (name, low, high, names) in zip(fields, _FIELDS, strict=True):
        for part in text.split(","):
            if not _is_right(part, low, high, names):
                raise ConfigError(
                    f"--cron {expression!r}: {part!r} is no {name}; expected *, {low} to {high}, a range (A-B) or a "
                    "step (*/N), several with commas"
                )
    if _is_never(*fields[3:]):
        raise ConfigError(f"--cron {expression!r} starts nothing: no month that it names has such a day")
    return " ".join(fields)


def _is_never(days: str, months: str, weekdays: str) -> bool:
    """Whether the days of the month are in none of the months, and no day of the week makes up for that."""
    # The server starts a run on either, unless one of the two is every day.
    if not any(part.partition("/")[0] in ("*", "?") for part in weekdays.split(",")):
        return False
    longest = max(_LENGTHS[month - 1] for month in _values(months, *_FIELDS[4][1:]))
    return min(_values(days, *_FIELDS[3][1:])) > longest


def _values(text: str, low: int, high: int, names: Sequence[str]) -> set[int]:
    """Return the values that a field, which was checked, names."""
    found: set[int] = set()
    for part in text.split(","):
        span, _, step = part.partition("/")
        ends = [low, high] if span in ("*", "?") else [_number(one, low, names) or 0 for one in span.split("-")]
        last = high if step and len(ends) == 1 else ends[-1]
        found.update(range(ends[0], last + 1, int(step or 1)))
    return found


def _is_right(part: str, low: int, high: int, names: Sequence[str]) -> bool:
    span, slash, step = part.partition("/")
    if slash and not (step.isascii() and step.isdecimal() and int(step) > 0):
        return False
    if span in ("*", "?"):
        return True
    ends = [_number(one, low, names) for one in span.split("-")]
    numbers = [one for one in ends if one is not None]
    return len(numbers) == len(ends) <= 2 and low <= numbers[0] <= numbers[-1] <= high


def _number(text: str, low: int, names: Sequence[str]) -> int | None:
    if text.lower() in names:
        return low + names.index(text.lower())
    return int(text) if text.isascii() and text.isdecimal() else None
