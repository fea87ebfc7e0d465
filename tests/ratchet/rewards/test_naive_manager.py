"""Showing examined completions, and grading a DataProto row by row."""

import io
import sys
from typing import Any

import pytest

from ratchet.errors import DataError
from ratchet.rewards.data_proto import DataProto, GradeRow
from ratchet.rewards.naive_manager import NaiveRewardManager, examine
from ratchet.rewards.results import RewardResult
from ratchet.workers import reward_manager


class FakeTokenizer:
    """Ids are characters; 0 is the end."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join("<end>" if id_ == 0 else chr(id_) for id_ in token_ids if id_ or not skip_special_tokens)


def _row(completion: str, data_source: str = "openai/gsm8k", **fields: Any) -> GradeRow:
    prompt = [{"role": "user", "content": "How many?"}]
    return GradeRow(data_source=data_source, prompt=prompt, completion=completion, ground_truth="72", **fields)


def test_it_returns_a_reward_a_row_and_shows_the_first_of_each_source(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [_row("#### 72"), _row("#### 73"), _row("72", "ratchet/word-problems")]
    rewards = NaiveRewardManager(None, num_examine=1)(DataProto(rows))
    assert rewards.tolist() == [1.0, 0.0, 1.0]  # type: ignore[union-attr]
    assert capsys.readouterr().out == (
        "[data_source] openai/gsm8k\n[prompt] How many?\n[completion] #### 72\n[ground_truth] 72\n[reward] 1.0\n"
        "[data_source] ratchet/word-problems\n[prompt] How many?\n[completion] 72\n[ground_truth] 72\n[reward] 1.0\n"
    )


def test_nothing_is_shown_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    NaiveRewardManager(None, 0)(DataProto([_row("#### 72")]))
    assert capsys.readouterr().out == ""


def test_rows_of_token_ids_alone_are_decoded(capsys: pytest.CaptureFixture[str]) -> None:
    ids = {"prompt_token_ids": [ord("?")], "completion_token_ids": [*map(ord, "#### 72"), 0]}
    rewards = NaiveRewardManager(FakeTokenizer(), 1)(DataProto([_row("", **ids)]))
    assert rewards.tolist() == [1.0]  # type: ignore[union-attr]
    assert "[prompt] ?\n[completion] #### 72\n" in capsys.readouterr().out


def test_a_hook_takes_the_place_of_the_rules_and_its_numbers_are_returned() -> None:
    def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> dict[str, float]:
        return {"score": 0.5, "length": float(len(solution_str))}

    answer = NaiveRewardManager(None, 0, compute_score=score)(DataProto([_row("abc")]), return_dict=True)
    assert answer["reward_tensor"].tolist() == [0.5]
    assert answer["reward_extra_info"] == {"length": [3.0]}


def test_a_row_that_cannot_be_graded_is_named() -> None:
    with pytest.raises(DataError, match=r"rollout 3: .*'mine'"):
        NaiveRewardManager(None, 0)(DataProto([_row("72", "mine", where="rollout 3")]))


def test_control_codes_and_what_the_output_cannot_encode_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\n")
    monkeypatch.setattr(sys, "stdout", output)
    examine([_row("\x1b[2J\u20ac\ud800\nnext")], [RewardResult(0.0)], 1)
    output.seek(0)
    assert "[completion] \\x1b[2J\\u20ac\\ud800\nnext\n" in output.read()


def test_verl_s_import_path_leads_here() -> None:
    assert reward_manager.NaiveRewardManager is NaiveRewardManager
