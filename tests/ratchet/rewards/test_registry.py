"""Finding reward functions by data source."""

import pytest

from ratchet.errors import ConfigError, DataError
from ratchet.rewards.registry import RewardResult, register_reward, reward_for, rule_for


@pytest.mark.parametrize("data_source", ["openai/gsm8k", "ratchet/word-problems"])
def test_gsm8k_format_sources_are_graded_by_the_gsm8k_rule(data_source: str) -> None:
    reward = reward_for(data_source)
    assert reward(data_source, "#### 72.0", "72", {}) == RewardResult(1.0, {}, "72", True)
    assert reward(data_source, "#### ?", "72", {}) == RewardResult(0.0, {}, None, False)


def test_the_mode_reaches_the_grader() -> None:
    assert reward_for("openai/gsm8k", gsm8k_mode="strict")("openai/gsm8k", "#### 72.0", "72", {}).reward == 0.0


def test_an_unknown_data_source_is_named_with_the_nearest_known_one_first() -> None:
    with pytest.raises(DataError, match=r"'gsm8k'; known: openai/gsm8k, "):
        reward_for("gsm8k")
    with pytest.raises(DataError, match=r"'word_problems'; known: ratchet/word-problems, "):
        reward_for("word_problems")


def test_a_decorated_function_grades_its_data_source() -> None:
    @register_reward("tests/capitals", needs_ground_truth=False)
    def is_upper(solution_str: str, extra_info: dict[str, int]) -> dict[str, float]:
        return {"score": float(solution_str.isupper()), "length": len(solution_str) + extra_info["more"]}

    reward = reward_for("tests/capitals")
    assert reward("tests/capitals", "ABC", "", {"more": 2}) == RewardResult(1.0, {"length": 5.0})
    assert not rule_for("tests/capitals").needs_ground_truth
    with pytest.raises(DataError, match="'tests/capitalz'; known: tests/capitals, "):
        reward_for("tests/capitalz")


@pytest.mark.parametrize(
    "data_source",
    ["HuggingFaceH4/MATH-500", "DigitalLearningGmbH/MATH-lighteval", "lighteval/MATH", "math_dapo", "math-ai/aime25"],
)
def test_sources_of_mathematics_are_graded_by_what_an_answer_means(data_source: str) -> None:
    rule = rule_for(data_source)
    assert rule.reference_answer is not None
    assert rule.reference_answer(r"\frac12") == r"\boxed{\frac12}"
    assert rule.grade_rows is not None
    with pytest.raises(ConfigError, match="exists already"):
        register_reward(data_source)(lambda solution_str: 0.0)


def test_a_rule_that_is_named_grades_whatever_the_source_is() -> None:
    assert rule_for("mine", rule="math").grade_rows is not None
    assert rule_for("lighteval/MATH", rule="gsm8k").grade_rows is None
    assert rule_for("mine", rule="gsm8k").function("mine", "#### 72", "72", {}).reward == 1.0


def test_a_name_is_taken_once_but_the_same_file_may_be_loaded_again() -> None:
    source = "@register_reward('tests/again')\ndef grade(solution_str):\n    return 1.0\n"
    for _ in range(2):
        exec(source, {"register_reward": register_reward})
    with pytest.raises(ConfigError, match="'tests/again' exists already"):
        register_reward("tests/again")(lambda solution_str: 0.0)
    with pytest.raises(ConfigError, match="'openai/gsm8k' exists already"):
        register_reward("openai/gsm8k")(lambda solution_str: 0.0)
