"""Chosen and rejected as texts, as turns and as whole conversations."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ratchet.data.conversations import chosen_of, rejected_of
from ratchet.data.frames import to_training_set
from ratchet.data.sources import load_rows
from ratchet.errors import DataError
from tests.pages import code_blocks, run_blocks


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


SYSTEM = {"role": "system", "content": "s"}
Q, R = user("q"), user("r")


def _row(folder: Path, record: Any) -> tuple[Any, Any, Any]:
    path = folder / "mine.jsonl"
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    (row,) = load_rows(f"json:{path}", split="train", needs_ground_truth=False)
    return row.prompt, chosen_of(row.extra_info, row.where), rejected_of(row.extra_info, row.where)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, ([Q], "a", "b")),
        ({"prompt": "q", "response": "a"}, ([Q], "a", None)),
        ({"prompt": "q", "completion": "a", "answer": "1"}, ([Q], "a", None)),
        ({"prompt": [SYSTEM, Q], "chosen": [said("a")], "rejected": [said("b")]}, ([SYSTEM, Q], "a", "b")),
        # Whole conversations, with the prompt or without.
        ({"chosen": [SYSTEM, Q, said("a")], "rejected": [SYSTEM, Q, said("b")]}, ([SYSTEM, Q], "a", "b")),
        ({"prompt": "q", "chosen": [Q, said("a")], "rejected": [Q, said("b")]}, ([Q], "a", "b")),
        (
            {"prompt": "q ", "chosen": [SYSTEM, Q, said("a")], "rejected": [SYSTEM, Q, said("b")]},
            ([SYSTEM, Q], "a", "b"),
        ),
        # They share a turn of the assistant's: it belongs to the prompt.
        (
            {"chosen": [Q, said("x"), R, said("a")], "rejected": [Q, said("x"), R, said("b")]},
            ([Q, said("x"), R], "a", "b"),
        ),
        # They part at the user's turn: the completions begin with what the assistant said before.
        (
            {"chosen": [Q, said("x"), R, said("a")], "rejected": [Q, said("x"), Q, said("b")]},
            ([Q], [said("x"), R, said("a")], [said("x"), Q, said("b")]),
        ),
        ({"chosen": [Q, said("a")], "rejected": [Q, said("a"), R, said("b")]}, ([Q], "a", [said("a"), R, said("b")])),
        ({"chosen": [Q, said("a")], "rejected": [Q, said("a")]}, ([Q], "a", "a")),
        ({"chosen": [Q, said("x"), R, said("a")], "rejected": "b"}, ([Q, said("x"), R], "a", "b")),
        # One conversation alone: every turn of the assistant's is learned, unless the prompt says where to begin.
        ({"messages": [SYSTEM, Q, said("x"), R, said("a")]}, ([SYSTEM, Q], [said("x"), R, said("a")], None)),
        ({"prompt": [Q, said("x"), R], "chosen": [Q, said("x"), R, said("a")]}, ([Q, said("x"), R], "a", None)),
        ({"prompt": "q", "chosen": "a", "messages": [R, said("b")]}, ([Q], "a", None)),
    ],
)
def test_every_way_to_write_a_preference_is_a_prompt_and_completions(
    tmp_path: Path, record: Any, expected: Any
) -> None:
    assert _row(tmp_path, record) == expected


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"chosen": [Q, said("a")], "rejected": [R, said("b")]},
            "chosen, rejected: expected conversations of one prompt",
        ),
        ({"prompt": "z", "chosen": [Q, said("a")]}, "chosen: expected the conversations to go on from the prompt"),
        ({"prompt": "q", "chosen": [said("a"), R]}, "chosen: expected a completion that .*, got assistant, user"),
        ({"chosen": [Q]}, "chosen: expected conversations of one prompt"),
        (
            {"prompt": "q", "chosen": [{"role": "gpt", "content": "a"}]},
            r"chosen: message 1 has the role 'gpt'.*assistant",
        ),
        ({"prompt": "q", "chosen": [{"role": "assistant"}]}, "chosen: expected messages of the texts role and content"),
        ({"prompt": "q", "chosen": 3}, "chosen: expected a text or a list of messages, got 3"),
        ({"prompt": "q", "note": "n"}, "expected a column chosen, completion, response, answer .* got note"),
        ({"chosen": [said("a")]}, "no column 'prompt'"),
    ],
)
def test_what_is_no_preference_is_refused_by_row_and_column(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"mine\.jsonl, line 1.*{message}"):
        _row(tmp_path, record)


def test_a_heading_in_a_demonstration_is_no_answer(tmp_path: Path) -> None:
    text = "#### First\nMix.\n#### Then\nBake."
    assert _row(tmp_path, {"prompt": "q", "response": text})[1] == text
    with pytest.raises(DataError, match="line 1, response: expected an answer with '#### <number>'"):
        load_rows(str(tmp_path / "mine.jsonl"), split="train")


def test_turns_survive_the_way_through_parquet(tmp_path: Path) -> None:
    records = [
        {"chosen": [Q, said("x"), R, said("a")], "rejected": [Q, said("b")]},
        {"prompt": "q", "chosen": "a", "rejected": None},
    ]
    path = tmp_path / "pairs.parquet"
    assert to_training_set(records, path) == 2
    assert pq.read_table(path)["chosen"].to_pylist()[1] == [said("a")], "messages, where one row has several"
    first, second = load_rows(str(path), split="train", needs_ground_truth=False)
    assert (first.prompt, first.extra_info["chosen"]) == ([Q], [said("x"), R, said("a")])
    assert (first.extra_info["rejected"], second.extra_info["chosen"]) == ("b", "a")
    assert "rejected" not in second.extra_info


def test_the_page_on_data_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    run_blocks("docs/data.md", code_blocks("docs/data.md"), {"frame": [{"question": "6 * 7?", "answer": "#### 42"}]})
    assert load_rows("data/train.parquet", split="train")[0].reward_model["ground_truth"] == "42"
    (shown,) = code_blocks("docs/data.md", "json")
    found = []
    while shown.strip():
        record, end = json.JSONDecoder().raw_decode(shown.strip())
        shown = shown.strip()[end:]
        found.append(_row(tmp_path, record))
    asked = user("12 + 30?")
    system = {"role": "system", "content": "Be brief."}
    assert found == [([asked], "42", None), ([system, asked], "42", None), *[([asked], "42", "32")] * 2]
