"""What a reward adds for the form and the length of a completion, beside the parts that grade what it says.

Each is kept in the breakdown before its weight. Evaluations leave all of it out: it steers training, and an accuracy
with it is none. The trap: a user's regular expression may take for ever on what a model writes, so searching has a
limit of time, which Python's own `re` does not know.
"""

from collections.abc import Callable, Mapping
from typing import Any

import regex

from ratchet.algorithms.shaping import length_penalty, overlong_penalty
from ratchet.config import RunConfig
from ratchet.errors import ConfigError, DataError
from ratchet.rewards.data_proto import GradeRow

OVERLONG, FORMAT, LENGTH = "overlong", "format", "length_penalty"
SEARCH_S = 5.0
"""Seconds that one search may take."""


def is_penalised_by_length(config: RunConfig) -> bool:
    """Whether the reward depends on the number of a completion's tokens and on data.max_response_length."""
    return config.reward_model.overlong_buffer.enable or config.reward_model.length_penalty.weight > 0


def penalties(config: RunConfig, breakdown: Mapping[str, float]) -> float:
    """What length has taken from a reward with this breakdown, as 0 or less."""
    weights = {OVERLONG: 1.0, LENGTH: config.reward_model.length_penalty.weight}
    return sum(weight * breakdown.get(name, 0.0) for name, weight in weights.items())


def compiled(pattern: str, key: str) -> Any:
    """The pattern that a config key holds; ConfigError for one that is none."""
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise ConfigError(f"{key}: expected a regular expression, got {pattern!r} ({error})") from error


class Shaping:
    """The parts of a config's reward that are added to every completion: name, weight and what it earns."""

    def __init__(self, config: RunConfig) -> None:
        reward, longest = config.reward_model, config.data.max_response_length
        self._parts: dict[str, tuple[float, Callable[[GradeRow], float]]] = {}
        buffer = reward.overlong_buffer
        if buffer.enable:
            self._parts[OVERLONG] = (
                1.0,
                lambda row: overlong_penalty(
                    len(row.completion_token_ids),
                    max_tokens=longest,
                    buffer_tokens=buffer.len,
                    penalty_factor=buffer.penalty_factor,
                ),
            )
        if reward.format.pattern:
            pattern = compiled(reward.format.pattern, "reward_model.format.pattern")
            self._parts[FORMAT] = (reward.format.weight, lambda row: _has_form(pattern, row))
        length = reward.length_penalty
        if length.weight:
            self._parts[LENGTH] = (
                length.weight,
                lambda row: length_penalty(
                    len(row.completion_token_ids), max_tokens=longest, free_tokens=length.free_tokens
                ),
            )

    def of(self, row: GradeRow) -> dict[str, tuple[float, float]]:
        """(weight, value) of each part, by name."""
        return {name: (weight, value(row)) for name, (weight, value) in self._parts.items()}


def _has_form(pattern: Any, row: GradeRow) -> float:
    try:
        return float(pattern.search(row.completion, timeout=SEARCH_S) is not None)
    except TimeoutError as error:
        raise DataError(
            f"{row.place}: reward_model.format.pattern was not looked through within {SEARCH_S:g} s; a pattern such as "
            "(a+)+ takes for ever: write it without repetitions of repetitions"
        ) from error
