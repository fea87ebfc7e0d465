"""What is added to a reward for the form and the length of a completion."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.algorithms.shaping import length_penalty
from ratchet.config import RunConfig, parse_config
from ratchet.errors import ConfigError, DataError
from ratchet.rewards import shaping
from ratchet.rewards.graders import GradeRow, open_grader
from ratchet.rewards.shaping import penalties
from ratchet.stages.reward import Reward


def _config(reward: dict[str, Any], **sections: Any) -> RunConfig:
    return RunConfig.model_validate({"data": {"max_response_length": 100}, "reward_model": reward, **sections})


def _row(completion: str = "<think>6 * 12</think> #### 72", num_tokens: int = 60) -> GradeRow:
    return GradeRow(
        where="rollout 0",
        data_source="openai/gsm8k",
        completion=completion,
        ground_truth="72",
        completion_token_ids=list(range(num_tokens)),
    )


FORM = {"pattern": r"(?s)<think>.*</think>", "weight": 0.25}
LENGTH = {"weight": 0.5, "free_tokens": 20}


@pytest.mark.parametrize(
    ("num_tokens", "share"),
    [(0, 0.0), (20, 0.0), (21, -0.0125), (60, -0.5), (100, -1.0), (120, -1.0)],
)
def test_the_penalty_grows_evenly_from_the_free_tokens_to_the_limit(num_tokens: int, share: float) -> None:
    assert length_penalty(num_tokens, max_tokens=100, free_tokens=20) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("free_tokens", [-1, 100, 101])
def test_free_tokens_beyond_the_limit_leave_nothing_to_penalise(free_tokens: int) -> None:
    with pytest.raises(ValueError, match="expected 0 to 99 free tokens"):
        length_penalty(5, max_tokens=100, free_tokens=free_tokens)


def test_form_and_length_are_added_with_their_weights_and_kept_before_them() -> None:
    grader = open_grader(_config({"format": FORM, "length_penalty": LENGTH}))
    long, short, wrong = grader.grade([_row(), _row("#### 72", 10), _row("<think>?</think>\n#### 71", 100)])
    # 1 + 0.25 * 1 - 0.5 * 40/80
    assert long.reward == 1.0
    assert long.breakdown == {"rule": 1.0, "format": 1.0, "length_penalty": -0.5}
    assert (short.reward, short.breakdown) == (1.0, {"rule": 1.0, "format": 0.0, "length_penalty": 0.0})
    # 0 + 0.25 - 0.5
    assert wrong.reward == -0.25


def test_every_shaping_at_once() -> None:
    overlong = {"enable": True, "len": 50, "penalty_factor": 2.0}
    grader = open_grader(_config({"format": FORM, "length_penalty": LENGTH, "overlong_buffer": overlong}))
    (result,) = grader.grade([_row(num_tokens=75)])
    # 25 of 50 buffer tokens cost half of 2; 55 of 80 tokens cost 0.5 * 0.6875.
    assert result.breakdown == pytest.approx({"rule": 1.0, "format": 1.0, "length_penalty": -0.6875, "overlong": -1.0})
    assert result.reward == pytest.approx(1.0 + 0.25 - 0.34375 - 1.0)


def test_evaluations_leave_all_of_it_out() -> None:
    grader = open_grader(_config({"format": FORM, "length_penalty": LENGTH}))
    (result,) = grader.grade([_row()], shaping=False)
    assert (result.reward, result.breakdown) == (1.0, {"rule": 1.0})


def test_token_rewards_are_shaped_at_the_last_token(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def by_token(data):\n    return [[0.5] * len(item.completion_token_ids) for item in data]\n")
    config = _config(
        {"type": "custom", "format": {"pattern": "<think>", "weight": 0.25}, "length_penalty": {"weight": 1.0}},
        custom_reward_function={"path": str(path), "name": "by_token", "sandbox": False},
    )
    (result,) = open_grader(config).grade([_row(num_tokens=3)])
    # -3/100 of the penalty and 0.25 for the form go where the completion ends.
    assert result.token_rewards == pytest.approx([0.5, 0.5, 0.72])
    assert result.reward == pytest.approx(1.72)


def test_groups_are_compared_without_what_length_took() -> None:
    config = _config({"length_penalty": LENGTH})
    assert penalties(config, {"rule": 1.0, "length_penalty": -0.5, "overlong": -0.25}) == -0.5
    assert penalties(config, {"rule": 1.0, "format": 1.0}) == 0.0


def test_the_limit_is_an_input_of_the_reward_where_length_is_penalised() -> None:
    limit = "data.max_response_length"
    assert limit in Reward().keys(_config({"length_penalty": LENGTH}))
    assert limit not in Reward().keys(_config({"format": FORM}))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"format": {"pattern": "(<think>"}}, r"reward_model\.format\.pattern: expected a regular expression"),
        (
            {"judge": {"url": "http://h/v1", "model": "m", "pattern": "[0-9]+"}},
            r"judge\.pattern: .*group",
        ),
        ({"judge": {"url": "http://h/v1", "model": "m", "scale": [1, 1]}}, r"judge\.scale: .*different"),
    ],
)
def test_what_cannot_be_searched_or_scaled_is_refused_when_the_grader_opens(
    reward: dict[str, Any], message: str
) -> None:
    kind = "judge" if "judge" in reward else "rule"
    with pytest.raises(ConfigError, match=message):
        open_grader(_config({"type": kind, **reward}))


def test_a_penalty_that_no_completion_could_bear_is_refused_with_the_config() -> None:
    keys = {"data.max_response_length": 100, "reward_model.length_penalty.weight": 0.5}
    with pytest.raises(ConfigError, match=r"length_penalty\.free_tokens is 100, which data\.max_response_length"):
        parse_config(keys | {"reward_model.length_penalty.free_tokens": 100})


def test_a_pattern_that_takes_for_ever_names_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shaping, "SEARCH_S", 0.05)
    grader = open_grader(_config({"format": {"pattern": r"^(a|a)*$"}}))
    with pytest.raises(DataError, match=r"rollout 0: reward_model\.format\.pattern .*0\.05 s"):
        grader.grade([_row("a" * 60 + "#### 72")])
