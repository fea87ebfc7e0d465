"""What the demo makes of the user's data; the run itself is `make demo`."""

import json
from pathlib import Path

import pytest
import yaml

from demo.run import config_text, converted_data
from ratchet.config import parse_text
from ratchet.data.sources import load_rows
from ratchet.errors import DataError


def write(path: Path, count: int) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_without_data_the_problems_are_generated(tmp_path: Path) -> None:
    config = parse_text(config_text(tmp_path, {}))
    assert config.data.train_files.startswith("ratchet/word-problems")
    assert config.actor_rollout_ref.model.path == str(tmp_path)


def test_a_folder_gives_both_splits(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", 5)
    write(tmp_path / "test.jsonl", 3)
    files = converted_data(str(tmp_path), tmp_path / "out")
    assert len(load_rows(files["train_files"], split="train")) == 5
    assert len(load_rows(files["val_files"], split="test")) == 3
    assert yaml.safe_load(config_text(tmp_path, files))["data"]["train_files"] == files["train_files"]


def test_a_single_file_holds_nothing_out(tmp_path: Path) -> None:
    write(tmp_path / "problems.jsonl", 4)
    files = converted_data(str(tmp_path / "problems.jsonl"), tmp_path / "out")
    assert len(load_rows(files["train_files"], split="train")) == 4
    assert files["val_files"] == ""


def test_a_test_split_alone_trains_nothing(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", 4)
    with pytest.raises(DataError, match="expected training problems"):
        converted_data(str(tmp_path / "test.jsonl"), tmp_path / "out")
