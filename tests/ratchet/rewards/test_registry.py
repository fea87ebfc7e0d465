"""Finding reward functions by data source."""

import pytest

from ratchet.errors import DataError
from ratchet.rewards.registry import RewardResult, reward_for


@pytest.mark.parametrize("data_source", ["openai/gsm8k", "ratchet/word-problems"])
def test_gsm8k_format_sources_are_graded_by_the_gsm8k_rule(data_source: str) -> None:
    reward = reward_for(data_source)
    assert reward(data_source, "#### 72.0", "72", {}) == RewardResult(1.0, {"gsm8k": 1.0}, "72", True)
    assert reward(data_source, "#### ?", "72", {}) == RewardResult(0.0, {"gsm8k": 0.0}, None, False)


def test_the_mode_reaches_the_grader() -> None:
    assert reward_for("openai/gsm8k", gsm8k_mode="strict")("openai/gsm8k", "#### 72.0", "72", {}).reward == 0.0


def test_an_unknown_data_source_is_named_with_the_nearest_known_one_first() -> None:
    with pytest.raises(DataError, match=r"'gsm8k'; known: openai/gsm8k, ratchet/word-problems"):
        reward_for("gsm8k")
    with pytest.raises(DataError, match=r"'word_problems'; known: ratchet/word-problems, openai/gsm8k"):
        reward_for("word_problems")
