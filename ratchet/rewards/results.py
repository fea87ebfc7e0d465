"""What a reward says about one completion, and how the values that users' functions return are read.

The trap: a reward that is NaN, of the wrong length or of the wrong type must not become a 0 that a policy is trained
on; every reader here raises and names the row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ratchet.errors import DataError, NumericsError

_EXTRACTED_KEYS = ("extracted", "pred")


@dataclass(frozen=True, slots=True)
class RewardResult:
    """One completion's reward. Example: RewardResult(1.0, {"rule": 1.0}, "72", True)."""

    reward: float
    breakdown: dict[str, float] = field(default_factory=dict)
    """What the reward is made of, by name, before weights; and the other numbers that a function returned."""
    extracted: str | None = None
    is_parseable: bool = True
    error: str | None = None
    """What a reward function has to say about a completion that it could not grade; the reward counts all the same."""
    token_rewards: list[float] | None = None
    """One entry per completion token where a part rewards tokens, else None. Their sum is the reward, unless there are
    no tokens."""
    is_failed: bool = False
    """Whether a service could not grade the completion, which says nothing about it: made by `failed_result`."""


def failed_result(error: str, breakdown: Mapping[str, float] | None = None) -> RewardResult:
    """The result of a completion that could not be graded: a reward of NaN, which nobody takes for a wrong answer.

    `error` says which service failed and how. reward_model.on_failure decides what becomes of the completion.
    """
    return RewardResult(math.nan, dict(breakdown or {}), is_parseable=False, error=error, is_failed=True)


def _item(value: Any) -> Any:
    """A plain number for numpy's scalars and for tensors of one element without dimensions."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def number(value: Any, where: str) -> float:
    """`value` as a finite float; True is 1. DataError where it is no number, NumericsError where it is not finite."""
    plain = _item(value)
    if not isinstance(plain, int | float):
        raise DataError(f"{where}: expected a number as reward, got {type(value).__name__} {value!r:.80}")
    try:
        found = float(plain)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise NumericsError(f"{where}: the reward is {found}, expected a finite number")
    return found


def is_sequence(value: Any) -> bool:
    """Whether a returned value holds one entry per row or token: a list, tuple, array or tensor with a dimension."""
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0


def to_list(value: Any) -> list[Any]:
    """A list, tuple, array or tensor as a list; a tensor leaves its device and graph."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    return list(value.tolist() if hasattr(value, "tolist") else value)


def token_result(values: Sequence[Any], num_tokens: int, width: int, where: str) -> RewardResult:
    """Per-token rewards of one row: `num_tokens` entries, or `width` entries of which those behind the end are 0."""
    if len(values) not in (num_tokens, width):
        padded = f", or {width} with padding" if width != num_tokens else ""
        raise DataError(f"{where}: expected one reward per completion token ({num_tokens}{padded}), got {len(values)}")
    rewards = [number(value, f"{where}, token {index}") for index, value in enumerate(values[:num_tokens])]
    for index, value in enumerate(values[num_tokens:], start=num_tokens):
        if _item(value) != 0:
            raise DataError(
                f"{where}: the completion has {num_tokens} tokens, but position {index}, which is padding, has the "
                f"reward {value!r:.20}; put a reward on the last token at position {num_tokens - 1}"
            )
    return RewardResult(math.fsum(rewards), token_rewards=rewards)


def dict_result(values: Mapping[Any, Any], where: str) -> RewardResult:
    """The result of `{"score": 1.0, ...}`: other finite numbers go to the breakdown.

    `extracted` or `pred` (text), `is_parseable` and `error` (text) become the fields of that name; other values that
    are no numbers are left out.
    """
    if "score" not in values:
        raise DataError(f"{where}: expected a dict with the key score, got {', '.join(map(str, values)) or 'no keys'}")
    extracted = next((values[key] for key in _EXTRACTED_KEYS if values.get(key) is not None), None)
    is_parseable, error = values.get("is_parseable", True), values.get("error")
    own = {"score", "is_parseable", "error", *_EXTRACTED_KEYS}
    numbers = {str(key): value for key, value in values.items() if key not in own}
    return RewardResult(
        number(values["score"], f"{where}, score"),
        {key: number(value, f"{where}, {key}") for key, value in numbers.items() if _is_number(value)},
        extracted=None if extracted is None else str(extracted),
        is_parseable=bool(is_parseable),
        error=None if error is None else str(error),
    )


def _is_number(value: Any) -> bool:
    return isinstance(_item(value), int | float)


def as_result(value: Any, where: str) -> RewardResult:
    """What a function returned for one completion, as a RewardResult: a number, a dict with a score, or a result."""
    if isinstance(value, RewardResult):
        if value.is_failed:
            return failed_result(value.error or f"{where} says that it failed", value.breakdown)
        return replace(value, reward=number(value.reward, where))
    if isinstance(value, Mapping):
        return dict_result(value, where)
    return RewardResult(number(value, where))
