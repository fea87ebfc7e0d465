"""Scoring a file of completions line by line."""

import json
from pathlib import Path

import pytest

from ratchet.config import RunConfig
from ratchet.errors import DataError
from ratchet.rewards.score_file import score_lines


def _file(folder: Path, *lines: str) -> Path:
    path = folder / "completions.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _line(completion: object, ground_truth: object) -> str:
    return json.dumps({"completion": completion, "ground_truth": ground_truth}, ensure_ascii=False)


def test_lines_are_scored_in_order(tmp_path: Path) -> None:
    path = _file(tmp_path, _line("#### 72\u2028done", "72"), "", _line("#### 3", 4), _line("", "4"))
    assert list(score_lines(path)) == [
        {"reward": 1.0, "extracted": "72", "is_parseable": True},
        {"reward": 0.0, "extracted": "3", "is_parseable": True},
        {"reward": 0.0, "extracted": None, "is_parseable": False},
    ]


def test_the_mode_is_verl_s_when_asked(tmp_path: Path) -> None:
    path = _file(tmp_path, _line("#### 72 or 73", "72"))
    assert [
        score["reward"]
        for score in score_lines(path, RunConfig.model_validate({"reward_model": {"gsm8k_mode": "strict"}}))
    ] == [1.0]
    assert [score["reward"] for score in score_lines(path)] == [0.0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "expected a JSON object"),
        ("[1]", "expected one JSON object a line, got list"),
        ('{"completion": "x"}', "expected the keys completion and ground_truth, got completion"),
        (_line(None, "72"), "expected completion to be a text, got NoneType"),
        (_line("#### 72", None), "ground truth"),
        (_line("#### 72", "many"), "ground truth"),
    ],
)
def test_errors_name_file_and_line_and_come_after_the_lines_before(tmp_path: Path, bad: str, message: str) -> None:
    path = _file(tmp_path, _line("#### 72", "72"), "", bad)
    scores = score_lines(path)
    assert next(scores)["reward"] == 1.0
    with pytest.raises(DataError, match=rf"completions\.jsonl, line 3: .*{message}"):
        next(scores)


def test_a_missing_file_and_an_unknown_source_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read"):
        next(score_lines(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="'gsm8k'"):
        next(score_lines(_file(tmp_path), data_source="gsm8k"))
