"""The rule rewards: which function grades the rows of a data source.

The trap: a source without one is an error before anything is sampled, so callers ask here first; the error names what
is known, and the caller, who knows the row, adds which one it was.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ratchet.config.rewards import RuleName
from ratchet.errors import ConfigError, DataError
from ratchet.rewards import math_rule
from ratchet.rewards.data_proto import GradeRow
from ratchet.rewards.gsm8k import Gsm8kMode, grade, ground_truth_value
from ratchet.rewards.hooks import keyword_call
from ratchet.rewards.results import RewardResult, as_result

__all__ = ["RewardFunction", "RewardResult", "Rule", "register_reward", "reward_for", "rule_for"]

Function = TypeVar("Function", bound=Callable[..., Any])


class RewardFunction(Protocol):
    """Scores one completion. Wrong answers earn a low reward; a row that cannot be scored raises DataError."""

    def __call__(
        self, data_source: str, completion: str, ground_truth: str, extra_info: dict[str, Any]
    ) -> RewardResult: ...


@dataclass(frozen=True, slots=True)
class Rule:
    """How the rows of one data source are graded."""

    function: Callable[..., Any]
    """`(data_source, solution_str, ground_truth, extra_info)`; returns a number, a dict with "score", or a result."""
    needs_ground_truth: bool = True
    check_ground_truth: Callable[[str], object] | None = None
    """Raises DataError for a ground truth that no completion could match."""
    reference_answer: Callable[[str], str] | None = None
    """Writes the completion that a ground truth stands for, which preflight has graded; None where nobody has said."""
    grade_rows: Callable[[Sequence[GradeRow]], list[RewardResult]] | None = None
    """Grades many rows at once where that is faster than `function`, one by one."""


GSM8K_DATA_SOURCES = ("openai/gsm8k", "ratchet/word-problems")

_REGISTERED: dict[str, Rule] = {}


def known_data_sources() -> tuple[str, ...]:
    """The data sources that have a reward function of their own."""
    return (*GSM8K_DATA_SOURCES, *math_rule.MATH_DATA_SOURCES, *_REGISTERED)


def registered_data_sources() -> tuple[str, ...]:
    """The data sources whose rules are no part of Ratchet."""
    return tuple(_REGISTERED)


def register_reward(
    data_source: str,
    *,
    needs_ground_truth: bool = True,
    check_ground_truth: Callable[[str], object] | None = None,
    reference_answer: Callable[[str], str] | None = None,
) -> Callable[[Function], Function]:
    """Decorate the function that grades rows of `data_source`; its arguments and result are those of verl's hook.

    `reference_answer` writes the completion that a ground truth stands for: "72" -> "#### 72". Preflight has it graded,
    and refuses a reward that gives all of them 0.

    A name is taken once: ConfigError where another function has it. The same function may come again, as when its file
    is loaded twice.
    """

    def register(function: Function) -> Function:
        known = _REGISTERED.get(data_source)
        is_own = data_source in GSM8K_DATA_SOURCES or math_rule.is_math(data_source)
        if is_own or (known is not None and not _is_same(known.function, function)):
            raise ConfigError(f"the reward of data_source {data_source!r} exists already; choose another name")
        _REGISTERED[data_source] = Rule(function, needs_ground_truth, check_ground_truth, reference_answer)
        return function

    return register


def _is_same(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Whether two functions are one that was loaded again: modules by path get another name each time."""
    if one is other:
        return True
    codes = [getattr(function, "__code__", None) for function in (one, other)]
    return codes[0] is not None and codes[0] == codes[1] and one.__qualname__ == other.__qualname__


def gsm8k_reward(mode: Gsm8kMode = "default") -> RewardFunction:
    """The rule reward of GSM8K and of everything written in its format."""

    def reward(data_source: str, completion: str, ground_truth: str, extra_info: dict[str, Any]) -> RewardResult:
        result = grade(completion, ground_truth, mode)
        return RewardResult(result.reward, {}, result.extracted, result.is_parseable)

    return reward


def math_reward(data_source: str, completion: str, ground_truth: str, extra_info: dict[str, Any]) -> RewardResult:
    """The rule reward of mathematics, one completion at a time."""
    row = GradeRow(data_source=data_source, completion=completion, ground_truth=ground_truth)
    return math_rule.shared_math_rule().score([row])[0]


def rule_for(data_source: str, *, gsm8k_mode: Gsm8kMode = "default", rule: RuleName = "") -> Rule:
    """The rule of `data_source`, or the one called `rule`; DataError names the known sources, the nearest first."""
    if rule == "gsm8k" or (not rule and data_source in GSM8K_DATA_SOURCES):
        # verl's modes compare texts: whatever the ground truth is, a completion may repeat it.
        check = ground_truth_value if gsm8k_mode == "default" else None
        return Rule(gsm8k_reward(gsm8k_mode), True, check, "#### {}".format)
    if rule == "math" or math_rule.is_math(data_source):
        return Rule(
            math_reward,
            check_ground_truth=math_rule.check_ground_truth,
            reference_answer=math_rule.reference_answer,
            grade_rows=lambda rows: math_rule.shared_math_rule().score(rows),
        )
    if data_source in _REGISTERED:
        return _REGISTERED[data_source]
    known = sorted(
        known_data_sources(),
        key=lambda name: difflib.SequenceMatcher(None, data_source.lower(), name.lower()).ratio(),
        reverse=True,
    )
    raise DataError(
        f"no reward function for data_source {data_source!r}; known: {', '.join(known)} "
        "(set the rows' data_source, or data.data_source, to one of these, or reward_model.rule)"
    )


def reward_for(data_source: str, *, gsm8k_mode: Gsm8kMode = "default") -> RewardFunction:
    """The reward function of `data_source`; DataError names the known ones, the most similar first."""
    call = keyword_call(rule_for(data_source, gsm8k_mode=gsm8k_mode).function)

    def reward(data_source: str, completion: str, ground_truth: str, extra_info: dict[str, Any]) -> RewardResult:
        return as_result(call(data_source, completion, ground_truth, extra_info), f"data_source {data_source!r}")

    return reward
