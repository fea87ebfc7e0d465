"""CSV files and data frames as training sets."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ratchet.data.frames import csv_records, to_training_set
from ratchet.data.sources import load_rows, preprocess
from ratchet.errors import DataError

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
QA = [{"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}, {"question": 'a, "b"?', "answer": "#### 1,080"}]
QA_CSV = 'question,answer\r\n1 + 1?,"1 + 1 = 2\n#### 2"\r\n"a, ""b""?","#### 1,080"\r\n'


def _truths(path: str) -> list[str]:
    return [row.reward_model["ground_truth"] for row in load_rows(path, split="train")]


def _polars_like(records: list[dict[str, Any]]) -> Any:
    class Frame:
        def to_dicts(self) -> list[dict[str, Any]]:
            return records

    return Frame()


def _pandas(records: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("pandas").DataFrame(records)


@pytest.mark.parametrize("make", [list, pa.Table.from_pylist, _pandas, _polars_like, iter])
def test_a_frame_of_questions_and_answers_becomes_verl_s_rows(tmp_path: Path, make: Any) -> None:
    path = str(tmp_path / "train.parquet")
    assert to_training_set(make(QA), path) == 2
    first, second = load_rows(path, split="train")
    assert first.data_source == "openai/gsm8k"
    assert first.prompt == [{"role": "user", "content": f"1 + 1? {INSTRUCTION}"}]
    assert (first.reward_model["ground_truth"], second.reward_model["ground_truth"]) == ("2", "1080")
    assert first.extra_info == {"index": 0, "split": "train", **QA[0]}


def test_a_csv_file_becomes_the_same_training_set_and_is_a_source_itself(tmp_path: Path) -> None:
    (tmp_path / "qa.csv").write_bytes(b"\xef\xbb\xbf" + QA_CSV.encode())
    from_csv, from_rows = str(tmp_path / "csv.parquet"), str(tmp_path / "rows.parquet")
    to_training_set(tmp_path / "qa.csv", from_csv)
    to_training_set(QA, from_rows)
    assert Path(from_csv).read_bytes() == Path(from_rows).read_bytes()
    direct = load_rows(str(tmp_path / "qa.csv"), split="train")
    assert direct == load_rows(from_csv, split="train")
    assert direct[1].where == f"{tmp_path}/qa.csv, line 4"
    assert preprocess(str(tmp_path / "qa.csv"), str(tmp_path / "out")) == {f"{tmp_path}/out/train.parquet": 2}


def test_answers_that_are_plain_numbers_are_ground_truths(tmp_path: Path) -> None:
    path = str(tmp_path / "train.parquet")
    to_training_set([{"question": "q", "answer": 72}, {"question": "r", "answer": "-1.5"}], path)
    assert _truths(path) == ["72", "-1.5"]
    with pytest.raises(DataError, match="row 0: expected an answer with '#### <number>', got 'Paris'"):
        to_training_set([{"question": "q", "answer": "Paris"}], path)


def test_questions_of_another_data_source_stay_as_they_are(tmp_path: Path) -> None:
    path = str(tmp_path / "train.parquet")
    to_training_set([{"question": "Capital of France?", "answer": "Paris"}], path, data_source="trivia")
    (row,) = load_rows(path, split="train")
    assert (row.data_source, row.prompt) == ("trivia", [{"role": "user", "content": "Capital of France?"}])
    assert row.reward_model["ground_truth"] == "Paris"


def test_preferences_become_a_training_set_that_only_rewards_without_ground_truth_take(tmp_path: Path) -> None:
    path = str(tmp_path / "pairs.parquet")
    frame = [{"prompt": "q", "chosen": "yes", "rejected": "no"}, {"prompt": "r", "chosen": "yes", "rejected": None}]
    assert to_training_set(frame, path, data_source="pairs") == 2
    columns = pq.read_table(path).to_pydict()
    assert (columns["chosen"], columns["rejected"]) == (["yes", "yes"], ["no", None])
    assert columns["prompt"][0] == [{"content": "q", "role": "user"}]
    with pytest.raises(DataError, match=r"pairs\.parquet, row 0: expected a ground truth .*reward_model\.type=model"):
        load_rows(path, split="train")
    first, _ = load_rows(path, split="train", needs_ground_truth=False)
    assert first.reward_model == {"style": "rule"}
    assert (first.data_source, first.extra_info["chosen"], first.extra_info["rejected"]) == ("pairs", "yes", "no")


def test_a_csv_file_of_demonstrations_is_taken(tmp_path: Path) -> None:
    (tmp_path / "sft.csv").write_text("prompt,chosen\nq,yes\n")
    assert to_training_set(str(tmp_path / "sft.csv"), tmp_path / "sft.parquet") == 1
    assert "rejected" not in pq.read_schema(tmp_path / "sft.parquet").names


def test_a_csv_cell_may_hold_messages(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        'prompt,answer\n"[{""role"": ""system"", ""content"": ""s""}, {""role"": ""user"", ""content"": ""q""}]",1\n'
        '"[{x}] is a set?",2\n'
    )
    first, second = load_rows(str(tmp_path / "a.csv"), split="train")
    assert first.prompt == [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert second.prompt == [{"role": "user", "content": "[{x}] is a set?"}]


def test_conversations_survive_the_way_through_pandas(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    first, second = str(tmp_path / "first.parquet"), str(tmp_path / "second.parquet")
    to_training_set([{"prompt": chat, "answer": "1", "data_source": "mine"}], first)
    to_training_set(pandas.read_parquet(first), second)
    assert load_rows(second, split="train") == load_rows(first, split="train")
    assert load_rows(second, split="train")[0].prompt == chat


def test_missing_cells_of_a_frame_are_missing(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"prompt": ["q", "r"], "answer": [1, None], "response": [None, "#### 2"]})
    path = str(tmp_path / "train.parquet")
    to_training_set(frame, path)
    assert _truths(path) == ["1", "2"]


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ([], "expected at least one row"),
        ([{"prompt": "q"}], "row 0: expected answer, ground_truth, response or chosen beside the prompt, got nothing"),
        ([{"prompt": "q", "chosen": None, "note": "n"}], "row 0: expected answer, .* got note"),
        (
            [{"prompt": "q", "chosen": "a", "rejected": 3}],
            "row 0, rejected: expected a text or a list of messages, got 3",
        ),
        ([{"text": "q"}], "row 0: no column 'prompt'"),
        (["q"], "row 0: expected a dict of columns, got str"),
        ({"prompt": "q"}, "expected a data frame or rows as dicts, got dict"),
        (3, "expected a data frame or rows as dicts, got int"),
    ],
)
def test_frames_that_teach_nothing_are_refused_and_nothing_is_written(tmp_path: Path, frame: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        to_training_set(frame, tmp_path / "train.parquet")
    assert not (tmp_path / "train.parquet").exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"prompt,answer\nq\n", r"a\.csv, line 2: expected 2 cells \(prompt, answer\), got 1"),
        (b"prompt,answer\nq,1\n\nq,1,2\n", r"line 4: expected 2 cells .* got 3"),
        (b"prompt,prompt\nq,1\n", "line 1: expected a header of different column names"),
        (b"prompt,\nq,1\n", "line 1: expected a header"),
        (b'prompt,answer\nq,"1\n', r"line 2: expected CSV \(unexpected end of data\)"),
        (b'prompt,answer\nq,"1"x\n', r"line 2: expected CSV"),
        (b"prompt,answer\nq,\xff\n", "line 2: expected UTF-8, got byte 0xff"),
        (b"prompt,answer\n" + b"q" * 200_000 + b",1\n", r"line 2: expected CSV \(field larger .*JSON Lines"),
    ],
)
def test_a_csv_file_that_is_none_is_told_by_line(body: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(csv_records(body, "a.csv"))
