"""Finds the reward function of a data source.

The trap: a source without one is an error before anything is sampled, so callers ask here first; the error names what
is known, and the caller, who knows the row, adds which one it was.
"""

import difflib
from dataclasses import dataclass, field
from typing import Any, Protocol

from ratchet.errors import DataError
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
