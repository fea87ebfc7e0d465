"""Metric names and values as people read them: summaries, console lines, and the names that MLflow accepts.

Trap: MLflow refuses a whole batch for one illegal name, and two of verl's names can become the same legal one
(`mean@1` and `mean_at_1`); a curve must never be drawn from both.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping

MAX_NAME = 250
"""Characters of the longest key that MLflow stores."""

_ILLEGAL = re.compile(r"[^/\w.\- :]")
_SLASHES = re.compile(r"/{2,}")


def summary(prefix: str, values: Iterable[float]) -> dict[str, float]:
    """Return `<prefix>/mean`, `/max` and `/min` of the values; nothing if there are none, NaN if any value is NaN."""
    numbers = [float(value) for value in values]
    if not numbers:
        return {}
    if any(math.isnan(number) for number in numbers):
        numbers = [math.nan]
    mean = sum(numbers) / len(numbers)
    return {f"{prefix}/mean": mean, f"{prefix}/max": max(numbers), f"{prefix}/min": min(numbers)}


def step_line(step: int, metrics: Mapping[str, float]) -> str:
    """Return one console line: `step: 287 | actor/pg_loss: -0.008 | ...`, in the order of `metrics`."""
    return " | ".join([f"step: {step}", *(f"{name}: {_digits(value)}" for name, value in metrics.items())])


def span(seconds: float) -> str:
    """Return a duration in the two largest units that people count it in."""
    left = max(0, round(seconds))
    if left < 100:
        return f"{left} s"
    minutes = round(left / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def mlflow_names(names: Iterable[str], known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return name -> the name under which MLflow stores it, no two alike.

    Rewritten as verl does: `@` becomes `_at_`, repeated slashes one, every other character that MLflow refuses `_`.
    Then what MLflow refuses besides: slashes at the ends go, the segments `.` and `..` and two dots at the start
    become `_` and `__`, and a name over 250 characters is cut. Of names that become equal, a legal one keeps its name;
    the others get the start of the sha256 of their own name. `known` holds names decided earlier: they keep theirs.
    """
    wanted = list(dict.fromkeys(names))
    result = dict(known or {})
    taken = set(result.values())
    # Legal names first, then by name: what a name becomes does not depend on the order of the metrics.
    fresh = sorted((name for name in wanted if name not in result), key=lambda name: (_legal(name) != name, name))
    for name in fresh:
        legal = _legal(name)
        digest = hashlib.sha256(name.encode()).hexdigest()
        candidates = (legal, *(_with_suffix(legal, digest[:length]) for length in range(8, len(digest) + 1)))
        result[name] = next(candidate for candidate in candidates if candidate not in taken)
        taken.add(result[name])
    return {name: result[name] for name in wanted}


def _legal(name: str) -> str:
    text = _ILLEGAL.sub("_", _SLASHES.sub("/", name.replace("@", "_at_"))).strip("/")
    # As a path, `.` and `..` would resolve to another name.
    text = "/".join("_" * len(part) if part in (".", "..") else part for part in text.split("/")) or "_"
    text = f"__{text[2:]}" if text.startswith("..") else text
    return text if len(text) <= MAX_NAME else _with_suffix(text, hashlib.sha256(name.encode()).hexdigest()[:8])


def _with_suffix(text: str, suffix: str) -> str:
    return f"{text[: MAX_NAME - len(suffix) - 1]}_{suffix}"


def _digits(value: float) -> str:
    """Four significant digits, without exponents where people count: steps, tokens, tokens a second."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.1f}" if abs(value) >= 1000 else f"{value:.4g}"
