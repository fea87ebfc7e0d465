"""Finding reward functions by data source, and adapting those written for verl."""

from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from ratchet.errors import DataError, NumericsError
from ratchet.rewards.registry import RewardResult, from_verl_function, reward_for


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


def _adapted(result: Any) -> RewardResult:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        assert (data_source, solution_str, ground_truth, extra_info) == ("mine", "text", "72", {"index": 3})
        return result

    return from_verl_function(compute_score)("mine", "text", "72", {"index": 3})


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.array(0.5), Decimal("0.5")])
def test_a_verl_function_may_return_any_single_number(value: Any) -> None:
    assert _adapted(value) == RewardResult(0.5, {"score": 0.5}, None, True)


def test_a_verl_function_may_return_a_dict() -> None:
    result = _adapted({"score": 1, "acc": True, "pred": "72", "note": "fine"})
    assert result == RewardResult(1.0, {"score": 1.0, "acc": 1.0}, "72", True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float64("nan"), {"score": float("-inf")}])
def test_a_reward_that_is_not_finite_raises(value: Any) -> None:
    with pytest.raises(NumericsError, match=r"compute_score.*finite"):
        _adapted(value)


@pytest.mark.parametrize("value", [None, "1.0", [1.0], {"acc": 1.0}, {"score": "1"}, 1j, np.array([0.5, 1.0])])
def test_a_reward_of_another_type_raises(value: Any) -> None:
    with pytest.raises(DataError, match="compute_score"):
        _adapted(value)
