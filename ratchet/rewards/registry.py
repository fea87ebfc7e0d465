"""Finds the reward function of a data source, and adapts the ones that verl users bring.

The trap: verl calls `compute_score` by keyword and takes a float or a dict; numpy scalars and 0-d tensors count as
floats, NaN never does. Errors name the value; the caller, who knows the row, adds which one it was.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsFloat

from ratchet.errors import DataError, NumericsError
from ratchet.rewards.gsm8k import Gsm8kMode, grade


@dataclass(frozen=True, slots=True)
class RewardResult:
    """One completion's reward. Example: RewardResult(1.0, {"gsm8k": 1.0}, "72", True)."""

    reward: float
    breakdown: dict[str, float] = field(default_factory=dict)
    """What the reward is made of, by name."""
    extracted: str | None = None
    is_parseable: bool = True


class RewardFunction(Protocol):
    """Scores one completion. Wrong answers earn a low reward; a row that cannot be scored raises DataError."""

    def __call__(
        self, data_source: str, completion: str, ground_truth: str, extra_info: dict[str, Any]
    ) -> RewardResult: ...


VerlRewardFunction = Callable[..., Any]
"""`compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict` with "score" in the dict."""

GSM8K_DATA_SOURCES = ("openai/gsm8k", "ratchet/word-problems")


def known_data_sources() -> tuple[str, ...]:
    """The data sources that have a reward function of their own."""
    return GSM8K_DATA_SOURCES


def gsm8k_reward(mode: Gsm8kMode = "default") -> RewardFunction:
    """The rule reward of GSM8K and of everything written in its format."""

    def reward(data_source: str, completion: str, ground_truth: str, extra_info: dict[str, Any]) -> RewardResult:
        result = grade(completion, ground_truth, mode)
        return RewardResult(result.reward, {"gsm8k": result.reward}, result.extracted, result.is_parseable)

    return reward


def reward_for(data_source: str, *, gsm8k_mode: Gsm8kMode = "default") -> RewardFunction:
    """The reward function of `data_source`; DataError names the known ones, the most similar first."""
    if data_source in GSM8K_DATA_SOURCES:
        return gsm8k_reward(gsm8k_mode)
    known = sorted(
        known_data_sources(),
        key=lambda name: difflib.SequenceMatcher(None, data_source.lower(), name.lower()).ratio(),
        reverse=True,
    )
    raise DataError(
        f"no reward function for data_source {data_source!r}; known: {', '.join(known)} "
        "(set the rows' data_source, or data.data_source, to one of these)"
    )


def _finite(value: object, what: str) -> float:
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        raise DataError(f"{what}: expected a number, got {type(value).__name__} {value!r:.100}")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:  # an array or tensor of more than one element
        raise DataError(f"{what}: expected one number, got {type(value).__name__} {value!r:.100}") from error
    if not math.isfinite(number):
        raise NumericsError(f"{what}: expected a finite number, got {number}")
    return number


def _from_mapping(scores: Mapping[str, Any], name: str) -> RewardResult:
    if "score" not in scores:
        raise DataError(f"reward function {name}: expected a dict with the key 'score', got {sorted(map(str, scores))}")
    reward = _finite(scores["score"], f"reward function {name}, 'score'")
    breakdown = {
        str(key): _finite(value, f"reward function {name}, {key!r}")
        for key, value in scores.items()
        # verl's functions also return texts (the prediction) beside the numbers.
        if isinstance(value, SupportsFloat)
    }
    predicted = next((scores[key] for key in ("extracted", "pred") if scores.get(key) is not None), None)
    extracted = None if predicted is None else str(predicted)
    return RewardResult(reward, breakdown, extracted, bool(scores.get("is_parseable", True)))


def from_verl_function(function: VerlRewardFunction) -> RewardFunction:
    """Adapts `function(data_source=, solution_str=, ground_truth=, extra_info=) -> float | dict`.

    Of a dict, "score" is the reward, every number joins the breakdown, and "pred" or "extracted" is kept as the
    answer. A NaN or infinity raises NumericsError, any other type DataError.
    """
    name = getattr(function, "__qualname__", None) or type(function).__qualname__

    def reward(data_source: str, completion: str, ground_truth: str, extra_info: dict[str, Any]) -> RewardResult:
        scored = function(
            data_source=data_source, solution_str=completion, ground_truth=ground_truth, extra_info=extra_info
        )
        if isinstance(scored, RewardResult):
            _finite(scored.reward, f"reward function {name}")
            return scored
        if isinstance(scored, Mapping):
            return _from_mapping(scored, name)
        number = _finite(scored, f"reward function {name}")
        return RewardResult(number, {"score": number})

    return reward
