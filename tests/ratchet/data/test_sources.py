"""Reading what users bring into verl's prompt schema, and writing it."""

import datetime
import json
import re
import time
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ratchet.data.sources import PromptRow, load_rows, preprocess, split_of_file, write_verl_parquet
from ratchet.errors import DataError
from ratchet.stages.data_stage import row_values

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
QUESTION = "Tom has 1,000 apples and gets 80 more. How many are there?"
ANSWER = "1000 + 80 = <<1000+80=1080>>1080\n#### 1,080"
GSM8K_ROW = PromptRow(
    data_source="openai/gsm8k",
    prompt=[{"role": "user", "content": f"{QUESTION} {INSTRUCTION}"}],
    ability="math",
    reward_model={"style": "rule", "ground_truth": "1080"},
    extra_info={"split": "train", "index": 0, "answer": ANSWER, "question": QUESTION},
)


def _write(path: Path, *records: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [record if isinstance(record, str) else json.dumps(record, ensure_ascii=False) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def _gsm8k(**changes: str) -> dict[str, str]:
    return {"question": QUESTION, "answer": ANSWER, **changes}


def test_gsm8k_lines_become_verl_s_rows(tmp_path: Path) -> None:
    path = _write(tmp_path / "train.jsonl", _gsm8k(), "", _gsm8k(answer="#### -5"))
    rows = load_rows(path, split="train")
    assert rows[0] == GSM8K_ROW
    assert rows[1].reward_model["ground_truth"] == "-5"
    assert [row.extra_info["index"] for row in rows] == [0, 1]


def test_all_of_gsm8k_is_read_as_verl_does_and_written_in_seconds(shared: Path, tmp_path: Path) -> None:
    started = time.perf_counter()
    written = preprocess(str(shared / "data/gsm8k"), str(tmp_path))
    assert time.perf_counter() - started < 5
    assert written == {f"{tmp_path}/train.parquet": 7473, f"{tmp_path}/test.parquet": 1319}
    for split in ("train", "test"):
        source = (shared / f"data/gsm8k/{split}.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        rows = load_rows(f"{tmp_path}/{split}.parquet", split=split)
        for index, (line, row) in enumerate(zip(source, rows, strict=True)):
            question, answer = json.loads(line)["question"], json.loads(line)["answer"]
            gold = re.findall(r"#### (-?[0-9.,]+)", answer)[0].replace(",", "")
            assert row == PromptRow(
                "openai/gsm8k",
                [{"role": "user", "content": question + " " + INSTRUCTION}],
                "math",
                {"style": "rule", "ground_truth": gold},
                {"split": split, "index": index, "answer": answer, "question": question},
            )


def test_written_parquet_has_verl_s_schema_and_no_feature_description(tmp_path: Path) -> None:
    path = str(tmp_path / "out" / "train.parquet")
    write_verl_parquet([GSM8K_ROW], path)
    schema = pq.read_schema(path)
    assert schema.metadata is None
    assert schema.names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    message = schema.field("prompt").type.value_type
    assert message == pa.struct([("content", pa.string()), ("role", pa.string())])
    assert schema.field("reward_model").type == pa.struct([("ground_truth", pa.string()), ("style", pa.string())])
    assert schema.field("extra_info").type == pa.struct(
        [("answer", pa.string()), ("index", pa.int64()), ("question", pa.string()), ("split", pa.string())]
    )


def test_rows_survive_the_way_through_parquet(tmp_path: Path) -> None:
    rows = [
        GSM8K_ROW,
        PromptRow(
            "mine",
            [{"role": "system", "content": ""}, {"role": "user", "content": "\u2028"}],
            "x",
            {"style": "rule", "ground_truth": "1"},
        ),
        PromptRow(
            "mine",
            [{"role": "user", "content": "q"}],
            "x",
            {"style": "rule", "ground_truth": "1"},
            {"tags": ["a"], "meta": {"k": 1.5}},
        ),
    ]
    path = str(tmp_path / "train.parquet")
    write_verl_parquet(rows, path)
    assert load_rows(path, split="train") == rows
    write_verl_parquet(rows[1:2], path)
    assert load_rows(path, split="train") == rows[1:2]


def test_ids_of_mixed_type_are_written_as_text(tmp_path: Path, shared: Path) -> None:
    rows = [
        row
        for name in ("r3_gsm8k_verl", "r3_dapo_math")
        for row in load_rows(str(shared / f"fixtures/{name}.parquet"), split="train")
    ]
    assert [row.extra_info["index"] for row in rows] == [0, "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"]
    path = str(tmp_path / "both.parquet")
    write_verl_parquet(rows, path)
    again = load_rows(path, split="train")
    assert [row.extra_info["index"] for row in again] == ["0", "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"]
    assert [(row.data_source, row.reward_model) for row in again] == [
        (row.data_source, row.reward_model) for row in rows
    ]
    assert again[1].extra_info.keys() == {"index"}


def test_parquet_of_the_wild_is_made_canonical(tmp_path: Path) -> None:
    path = str(tmp_path / "wild.parquet")
    messages = [{"role": "user", "content": "q", "name": None}]
    record = {
        "data_source": "s",
        "prompt": messages,
        "reward_model": {"style": "rule", "ground_truth": 72},
        "note": None,
    }
    other = {**record, "prompt": [{"role": "user", "content": "r", "name": None}], "note": "n"}
    pq.write_table(pa.Table.from_pylist([record, other]), path)
    first, second = load_rows(path, split="train")
    assert first.prompt == [{"role": "user", "content": "q"}]
    assert first.reward_model == {"style": "rule", "ground_truth": "72"}
    assert "note" not in first.extra_info
    assert second.extra_info["note"] == "n"


@pytest.mark.parametrize(
    ("value", "text"),
    [(72, "72"), (72.0, "72"), (0.5, "0.5"), ("1,080", "1,080"), ("so\n#### 1,080", "1080"), ([1, 2], "[1, 2]")],
)
def test_ground_truths_become_text(tmp_path: Path, value: object, text: str) -> None:
    path = _write(tmp_path / "a.jsonl", {"prompt": "q", "ground_truth": value})
    assert load_rows(path, split="train")[0].reward_model == {"style": "rule", "ground_truth": text}


def test_prompt_lines_take_text_or_messages_and_three_kinds_of_ground_truth(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    path = _write(
        tmp_path / "mine.jsonl",
        {"prompt": "q1", "answer": "1", "topic": "sums"},
        {"prompt": chat, "ground_truth": 2, "data_source": "openai/gsm8k", "ability": "math"},
        {
            "prompt": "q3",
            "reward_model": {"ground_truth": "3", "style": "model"},
            "extra_info": {"index": 9, "x": None},
        },
    )
    first, second, third = load_rows(f"json:{path}", split="test", data_source="ours")
    assert (first.data_source, first.prompt) == ("ours", [{"role": "user", "content": "q1"}])
    assert first.extra_info == {"answer": "1", "topic": "sums", "split": "test", "index": 0}
    assert (second.data_source, second.prompt, second.ability) == ("openai/gsm8k", chat, "math")
    assert second.extra_info == {"split": "test", "index": 1}
    assert (third.reward_model, third.extra_info) == ({"style": "model", "ground_truth": "3"}, {"index": 9})
    assert load_rows(path, split="test")[0].data_source == "mine"


def test_another_prompt_key_may_be_named(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", {"input": "q", "answer": "1"})
    assert load_rows(path, split="train", prompt_key="input")[0].prompt[0]["content"] == "q"
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: no column 'prompt'; .* got input, answer"):
        load_rows(path, split="train")


def test_a_line_ends_only_at_a_newline(tmp_path: Path) -> None:
    question = "one\u2028two\u0085three"
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(_gsm8k(question=question), ensure_ascii=False).encode() + b"\r\n\r\n")
    (row,) = load_rows(str(path), split="train")
    assert row.extra_info["question"] == question


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": ', "expected a JSON object"),
        ("[" * 100_000, "expected a JSON object"),
        ("[]", "expected one JSON object a line, got list"),
        ('{"question": "q"}', "no column 'answer'.* got question"),
        ('{"text": "q"}', "no column 'prompt'.* got text"),
        ("{}", "got no columns"),
        ('{"question": "q", "answer": "so 72"}', "'#### <number>', got 'so 72'"),
        ('{"prompt": "q", "chosen": "a"}', "expected a ground truth .* got the columns prompt, chosen; add one"),
        ('{"prompt": [], "answer": "1"}', "expected the prompt to be a text or a list of messages"),
        ('{"prompt": [{"role": "user"}], "answer": "1"}', "expected messages of the texts role and content"),
        ('{"prompt": "q", "ground_truth": true}', "expected a ground truth, got True"),
        ('{"prompt": [{"role": "human", "content": "q"}], "answer": "1"}', "message 1 has the role 'human'.*use user"),
        ('{"prompt": [{"role": "usr", "content": "q"}], "answer": "1"}', "message 1 has the role 'usr'.*use user"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = _write(tmp_path / "train.jsonl", _gsm8k(), "", line)
    with pytest.raises(DataError, match=rf"train\.jsonl, line 3.*{message}"):
        load_rows(path, split="train")


def test_invalid_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(json.dumps(_gsm8k()).encode() + b'\n{"question": "\xff"}\n')
    with pytest.raises(DataError, match=r"train\.jsonl, line 2: expected UTF-8, got byte 0xff at 14"):
        load_rows(str(path), split="train")


def test_a_missing_parquet_column_is_named_with_file_and_row(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["q"], "answer": ["1"]}), path)
    with pytest.raises(DataError, match=r"a\.parquet, row 0: no column 'prompt'.* got text, answer"):
        load_rows(path, split="train")


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.csv", "missing.jsonl"])
def test_files_that_hold_nothing_readable_are_refused_by_name(tmp_path: Path, name: str) -> None:
    if not name.startswith("missing"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=re.escape(name)):
        load_rows(str(tmp_path / name), split="train")


def test_a_folder_gives_the_file_of_the_split(tmp_path: Path) -> None:
    _write(tmp_path / "train.jsonl", _gsm8k())
    _write(tmp_path / "test.jsonl", _gsm8k(question="other"))
    assert load_rows(str(tmp_path), split="test")[0].extra_info["question"] == "other"
    with pytest.raises(DataError, match=r"expected dev\.parquet or dev\.jsonl, got test\.jsonl, train\.jsonl"):
        load_rows(str(tmp_path), split="dev")
    pq.write_table(pa.Table.from_pylist([_gsm8k()]), str(tmp_path / "train.parquet"))
    with pytest.raises(DataError, match="expected one file for the split train"):
        load_rows(str(tmp_path), split="train")


def test_the_hub_s_shards_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    for shard in (1, 0):
        table = pa.Table.from_pylist([_gsm8k(question=f"q{shard}")])
        pq.write_table(table, str(tmp_path / f"main/train-0000{shard}-of-00002.parquet"))
    rows = load_rows(str(tmp_path), split="train")
    assert [row.extra_info["question"] for row in rows] == ["q0", "q1"]


def test_object_storage_is_read_and_written_through_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ratchet import store

    def open_on_disk(uri: str) -> store.ObjectStore:
        return local(str(tmp_path / uri.removeprefix("s3://")) if uri.startswith("s3://") else uri)

    local = store.open_store
    monkeypatch.setattr(store, "open_store", open_on_disk)
    _write(tmp_path / "bucket/gsm8k/train.jsonl", _gsm8k())
    assert load_rows("s3://bucket/gsm8k/train.jsonl", split="train") == [GSM8K_ROW]
    assert load_rows("s3://bucket/gsm8k", split="train") == [GSM8K_ROW]
    written = preprocess("s3://bucket/gsm8k", "s3://bucket/out/")
    assert written == {"s3://bucket/out/train.parquet": 1}
    assert load_rows("s3://bucket/out/train.parquet", split="train") == [GSM8K_ROW]


def test_a_hub_that_cannot_be_reached_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def unreachable(*arguments: object, **options: object) -> None:
        assert (arguments, options) == (("openai/gsm8k", "main"), {"split": "train"})
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=r"openai/gsm8k: no local file.*ConnectionError: offline.*JSONL or Parquet"):
        load_rows("openai/gsm8k", split="train")


def test_a_hub_data_set_becomes_verl_s_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [_gsm8k()])
    assert load_rows("openai/gsm8k", split="train") == [GSM8K_ROW]


def test_generated_problems_are_a_source() -> None:
    rows = load_rows("ratchet/word-problems?level=2&size=8&seed=3", split="test")
    assert len(rows) == 8
    assert rows[0].data_source == "ratchet/word-problems"
    assert rows[0].prompt[0]["content"].endswith(INSTRUCTION)
    assert len(load_rows("ratchet/word-problems", split="train")) == 512


@pytest.mark.parametrize("query", ["level=one", "size=-1", "hardness=3", "level=9", "size=0"])
def test_wrong_options_of_generated_problems_are_named(query: str) -> None:
    with pytest.raises(DataError, match=r"word.problems"):
        load_rows(f"ratchet/word-problems?{query}", split="train")


def test_repeated_prompts_are_counted_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_rows(_write(tmp_path / "a.jsonl", _gsm8k(), _gsm8k(), _gsm8k()), split="train")
    assert "2 of 3 rows repeat an earlier prompt" in caplog.text


@pytest.mark.parametrize(
    ("name", "split"),
    [("test.jsonl", "test"), ("gsm8k-test.parquet", "test"), ("latest.jsonl", "train"), ("prompts.jsonl", "train")],
)
def test_a_single_file_s_split_is_in_its_name(tmp_path: Path, name: str, split: str) -> None:
    assert split_of_file(name) == split
    if name.endswith(".jsonl"):
        source = _write(tmp_path / name, _gsm8k())
        assert preprocess(source, str(tmp_path / "out")) == {f"{tmp_path}/out/{split}.parquet": 1}


def _with_columns(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table({"prompt": ["q"], "answer": ["1"], **columns}), str(path))
    return str(path)


def test_columns_of_every_kind_become_json(tmp_path: Path) -> None:
    moment = datetime.datetime(2024, 1, 5, 7, 30, tzinfo=datetime.UTC)
    path = _with_columns(
        tmp_path / "a.parquet",
        day=[datetime.date(2024, 1, 5)],
        moment=pa.array([moment], pa.timestamp("us", "UTC")),
        clock=[datetime.time(7, 30)],
        wait=[datetime.timedelta(minutes=90)],
        price=[Decimal("1.50")],
        score=[float("nan")],
        bound=[float("inf")],
        weight=pa.array([0.5], pa.float32()),
        kind=pa.array(["x"]).dictionary_encode(),
        meta=[{"seen": [moment.date()], "none": None}],
    )
    (row,) = load_rows(path, split="train")
    assert json.loads(row_values(row)["extra_info"]) == {
        "answer": "1",
        "day": "2024-01-05",
        "moment": "2024-01-05T07:30:00+00:00",
        "clock": "07:30:00",
        "wait": "1:30:00",
        "price": "1.50",
        "bound": "inf",
        "weight": 0.5,
        "kind": "x",
        "meta": {"seen": ["2024-01-05"]},
        "split": "train",
        "index": 0,
    }
    written = str(tmp_path / "again.parquet")
    write_verl_parquet([row], written)
    assert load_rows(written, split="train") == [row]


def test_values_of_numpy_and_a_hub_data_set_become_json(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    record = {
        "prompt": "q",
        "reward_model": {"ground_truth": np.int64(72), "style": "rule"},
        "extra_info": {
            "index": np.int32(3),
            "vector": np.array([[1, 2], [3, 4]]),
            "when": np.datetime64("2024-01-05T07:30", "ns"),
            "never": np.datetime64("NaT"),
            "id": UUID(int=1),
            "share": np.float32(0.25),
            "flag": np.bool_(True),
        },
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [record])
    (row,) = load_rows("someone/something", split="train")
    assert row.reward_model["ground_truth"] == "72"
    assert json.loads(row_values(row)["extra_info"]) == {
        "index": 3,
        "vector": [[1, 2], [3, 4]],
        "when": "2024-01-05T07:30:00.000000000",
        "id": "00000000-0000-0000-0000-000000000001",
        "share": 0.25,
        "flag": True,
    }


@pytest.mark.parametrize(
    ("columns", "place"),
    [
        ({"picture": [b"\x89PNG"]}, "column picture"),
        ({"extra_info": [{"picture": {"bytes": b"\x89PNG"}}]}, r"column extra_info\.picture\.bytes"),
        ({"answer": [b"72"]}, "answer"),
    ],
)
def test_bytes_are_refused_with_file_and_column(tmp_path: Path, columns: dict[str, Any], place: str) -> None:
    path = _with_columns(tmp_path / "a.parquet", **columns)
    with pytest.raises(DataError, match=rf"a\.parquet, row 0, {place}: expected text.*got bytes; leave the column out"):
        load_rows(path, split="train")


def test_a_ground_truth_that_is_missing_as_pandas_writes_it_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": ["q"], "answer": [float("nan")]}), path)
    with pytest.raises(DataError, match=r"a\.parquet, row 0, answer: expected a ground truth, got None"):
        load_rows(path, split="train")


def test_a_parquet_file_with_a_damaged_page_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["q" * 1000], "answer": ["1"]}), str(path), compression="zstd")
    body = bytearray(path.read_bytes())
    body[4:80] = b"\xff" * 76
    path.write_bytes(body)
    with pytest.raises(DataError, match=r"a\.parquet, after row 0: cannot be read"):
        load_rows(str(path), split="train")


def test_the_home_folder_is_expanded_wherever_data_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    _write(tmp_path / "data/train.jsonl", _gsm8k())
    for source in ("~/data/train.jsonl", "~/data", "json:~/data/train.jsonl"):
        assert load_rows(source, split="train") == [GSM8K_ROW]
    assert preprocess("~/data", "~/out") == {f"{tmp_path}/out/train.parquet": 1}
    assert (tmp_path / "out/train.parquet").is_file()
    with pytest.raises(DataError, match=r"~nobody-of-that-name/a\.jsonl: no such file"):
        load_rows("~nobody-of-that-name/a.jsonl", split="train")
