"""Where a source really lies, as records and people are told."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ratchet.data.sources import load_rows, resolved_source
from ratchet.errors import DataError
from tests.runs import write_problems

REVISION = "0123456789abcdef0123456789abcdef01234567"


def test_a_local_place_is_absolute_and_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "2026-10-01"
    folder.mkdir()
    path = write_problems(folder / "train.jsonl")
    (tmp_path / "latest").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for spec in ("latest/train.jsonl", f"file://{path}", f"json:{path}", "~/latest/train.jsonl"):
        assert resolved_source(spec, split="train") == str(path)
    assert resolved_source("latest", split="train") == str(folder)


def test_a_folder_wins_over_the_hub_s_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    assert resolved_source("openai/gsm8k", split="train") == str(tmp_path / "openai" / "gsm8k")


def test_object_storage_is_its_own_place() -> None:
    assert resolved_source("s3://bucket/gsm8k/", split="train") == "s3://bucket/gsm8k"
    assert resolved_source("s3://bucket/gsm8k/train.jsonl", split="train") == "s3://bucket/gsm8k/train.jsonl"


def test_generated_problems_are_named_with_every_parameter() -> None:
    full = "ratchet/word-problems?level=2&size=512&seed=0&instruction=steps"
    assert resolved_source("ratchet/word-problems?level=2", split="train") == full
    assert resolved_source(full, split="test") == full
    assert load_rows(full, split="train") == load_rows("ratchet/word-problems?level=2", split="train")
    with pytest.raises(DataError, match="level=high"):
        resolved_source("ratchet/word-problems?level=high", split="train")


@pytest.mark.parametrize(
    ("checksums", "expected"),
    [
        ({f"hf://datasets/some/set@{REVISION}/{part}.parquet": {"num_bytes": 9} for part in "ab"}, f"@{REVISION}"),
        ({f"hf://datasets/some/set@{digit * 40}/a.parquet": {} for digit in "01"}, ""),
        ({"https://host/a.parquet": {}}, ""),
        (None, ""),
    ],
    ids=["one revision", "two", "no place of the hub", "unknown"],
)
def test_a_data_set_of_the_hub_is_named_with_its_revision(
    monkeypatch: pytest.MonkeyPatch, checksums: Any, expected: str
) -> None:
    datasets = pytest.importorskip("datasets")
    table = SimpleNamespace(info=SimpleNamespace(download_checksums=checksums))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
    assert resolved_source("some/set", split="train") == f"some/set{expected}"
