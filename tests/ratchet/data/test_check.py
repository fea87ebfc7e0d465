"""`ratchet data check`: what is wrong with training data, by row."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from ratchet.cli import app
from ratchet.data.check import check_data, histogram
from ratchet.data.check_repeats import normalised
from ratchet.data.sources import preprocess
from ratchet.engines.model import chat_prompt_ids, load_tokenizer


@pytest.fixture
def recipes(shared: Path) -> tuple[str, str]:
    """Rows as verl's recipes write them, of GSM8K and of DAPO's mathematics."""
    gsm8k, dapo = (str(shared / f"fixtures/r3_{name}.parquet") for name in ("gsm8k_verl", "dapo_math"))
    return gsm8k, dapo


def _file(folder: Path, *records: Any, name: str = "mine.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def _said(report: Any) -> dict[tuple[str, str], list[str]]:
    """The messages by (level, check)."""
    found: dict[tuple[str, str], list[str]] = {}
    for finding in report.findings:
        found.setdefault((finding.level, finding.check), []).append(f"{finding.message} | {'; '.join(finding.places)}")
    return found


def _check(*arguments: str) -> tuple[int, Any]:
    """(exit code, report) of the command."""
    result = CliRunner().invoke(app, ["data", "check", *arguments, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


def test_files_of_verls_recipes_disagree_about_the_type_of_an_index(recipes: tuple[str, str]) -> None:
    gsm8k, dapo = recipes
    code, report = _check(gsm8k, "--val", dapo)
    assert code == 1, "both fixtures ask 'q'"
    findings = {(each["level"], each["check"]): each for each in report["findings"]}
    types = findings["warning", "types"]["message"]
    assert types == "column extra_info.index is of several types (train: number in 1; val: text in 1)"
    leak = findings["error", "leakage"]
    assert leak["places"] == [f"{dapo}, row 0 ({gsm8k}, row 0)"]
    assert [split["data_sources"] for split in report["splits"]] == [{"openai/gsm8k": 1}, {"math_dapo": 1}]
    assert report["splits"][0]["columns"] == ["data_source", "prompt", "ability", "reward_model", "extra_info"]


def test_a_recipes_rows_alone_are_in_order(recipes: tuple[str, str]) -> None:
    code, report = _check(recipes[0])
    assert (code, report["findings"], report["splits"][0]["num_rows"]) == (0, [], 1)


def test_data_that_this_library_makes_is_in_order(tmp_path: Path) -> None:
    preprocess("ratchet/word-problems?level=2&size=64", str(tmp_path))
    report = check_data([f"{tmp_path}/train.parquet"], [f"{tmp_path}/test.parquet"])
    assert report.findings == ()
    assert [split.num_rows for split in report.splits] == [64, 64]


def test_rows_that_repeat_and_contradict_each_other_are_counted_and_named(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        {"prompt": "How many?", "answer": "1"},
        {"prompt": "How many?", "answer": "1"},
        {"prompt": "how  many? ", "answer": "1"},
        {"prompt": "How many?", "answer": "2"},
        {"prompt": "Who?", "answer": "3"},
    )
    found = _said(check_data([path]))
    assert found["warning", "duplicates"] == [
        f"train rows repeat the prompt of an earlier one | "
        f"{path}, line 2 ({path}, line 1); {path}, line 4 ({path}, line 1)",
        f"train rows differ from an earlier one in case, spaces, instruction or system prompt alone | "
        f"{path}, line 3 ({path}, line 1)",
    ]
    assert found["error", "duplicates"] == [
        f"train rows ask what an earlier one asks, with another ground truth | {path}, line 4 ({path}, line 1)"
    ]


def test_leakage_is_found_under_another_instruction_case_width_or_system_prompt(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "WHO\u00a0is it\uff1f"}]
    train = _file(tmp_path, {"question": "How many?", "answer": "#### 1"}, {"prompt": "Who is it?", "answer": "2"})
    val = _file(
        tmp_path,
        {"prompt": "how many?", "answer": "1"},
        {"prompt": chat, "answer": "2"},
        {"prompt": "Who is it!", "answer": "2"},
        {"prompt": "Who is it?", "answer": "2"},
        name="val.jsonl",
    )
    report = check_data([train], [val])
    leaks = {finding.message: finding for finding in report.findings if finding.check == "leakage"}
    exact, similar = (leaks[message] for message in sorted(leaks, key=len))
    assert exact.places == [f"{val}, line 4 ({train}, line 2)"]
    assert similar.places == [f"{val}, line 1 ({train}, line 1)", f"{val}, line 2 ({train}, line 2)"]
    assert report.has_errors


def test_signs_and_digits_are_what_tells_problems_apart() -> None:
    assert normalised("2 + 3?") != normalised("2 - 3?")
    assert normalised("x²") == normalised("x2"), "as NFKC has it"


def test_columns_types_and_gaps_are_counted_in_raw_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": 1, "note": "n"}, {"prompt": "b", "answer": "2"}, {"prompt": "c", "answer": None}]
    val = _file(tmp_path, {"prompt": "d", "answer": "4"}, name="val.jsonl")
    found = _said(check_data([_file(tmp_path, *rows)], [val]))
    assert found["warning", "types"] == [
        "column answer is of several types (train: number in 1, text in 1; val: text in 1) | "
    ]
    assert "column note is in train and not in val | " in found["warning", "columns"]
    assert "column answer is empty or missing in 1 of 3 train rows | " in found["note", "columns"]
    (missing,) = found["error", "ground_truth"]
    assert missing == f"no ground truth, which other rows have | {tmp_path}/mine.jsonl, line 3"


def test_every_bad_row_is_named_and_the_good_ones_are_counted(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        {"prompt": [{"role": "human", "content": "q"}], "answer": "1"},
        {"prompt": [{"role": "human", "content": "r"}], "answer": "1"},
        {"text": "q"},
        {"prompt": [{"role": "user", "content": "s"}, {"role": "user", "content": " "}], "answer": "1"},
        {"prompt": [{"role": "system", "content": ""}, {"role": "user", "content": "t"}], "answer": ""},
    )
    report = check_data([path])
    assert (report.splits[0].num_rows, report.splits[0].num_refused) == (2, 3)
    found = _said(report)
    (roles,) = found["error", "messages"]
    assert "message 1 has the role 'human'" in roles
    assert roles.endswith(f"| {path}, line 1; {path}, line 2")
    assert found["error", "columns"][0].endswith(f"got text | {path}, line 3")
    assert found["error", "empty"] == [f"a message of the user's has no text | {path}, line 4"]
    assert found["warning", "empty"] == [f"a message of the system's has no text | {path}, line 5"]
    assert found["error", "ground_truth"] == [f"the ground truth is empty | {path}, line 5"]
    (twice,) = found["warning", "roles"]
    assert twice.startswith("two messages of the user's follow each other")


def test_preferences_are_judged_by_their_completions(tmp_path: Path) -> None:
    q, a = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    path = _file(
        tmp_path,
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "b", "rejected": "a"},
        {"chosen": [q, a], "rejected": [q, {"role": "assistant", "content": "b"}]},
        {"prompt": "r", "chosen": "a", "rejected": "a"},
        {"prompt": "s", "chosen": "", "rejected": " "},
        {"prompt": "t", "chosen": "a"},
    )
    report = check_data([path])
    assert report.objective == "dpo"
    found = _said(report)
    assert found["warning", "preferences"] == [
        f"chosen and rejected are the same | {path}, line 4",
        f"train rows prefer what another one of the same prompt rejects | "
        f"{path}, line 1; {path}, line 2; {path}, line 3",
    ]
    assert found["warning", "duplicates"] == [
        f"train rows repeat the prompt and completions of an earlier one | {path}, line 3 ({path}, line 1)"
    ]
    assert found["error", "empty"] == [f"chosen has no text | {path}, line 5"]
    assert found["error", "columns"] == [f"nothing to compare with for dpo: expected rejected | {path}, line 6"]
    lengths = {each.what: (each.minimum, each.maximum) for each in report.splits[0].histograms}
    assert lengths == {"prompt": (1, 1), "chosen": (0, 1), "rejected": (1, 1)}


def test_the_same_file_may_be_for_another_objective(tmp_path: Path) -> None:
    path = _file(tmp_path, {"prompt": "q", "response": "a"}, {"prompt": "q", "response": "b"})
    code, report = _check(path, "--objective", "sft")
    assert (code, [each["level"] for each in report["findings"]]) == (0, ["note"])
    assert [each["what"] for each in report["splits"][0]["histograms"]] == ["prompt", "chosen"]
    code, report = _check(path, "--data-source", "openai/gsm8k")
    assert code == 1
    found = {(each["level"], each["check"]): each for each in report["findings"]}
    assert "with another ground truth" in found["error", "duplicates"]["message"]
    unreadable = found["error", "ground_truth"]
    assert unreadable["message"].startswith("the rule of openai/gsm8k cannot read the ground truth: ")
    assert unreadable["num_rows"] == 2, "one finding, whatever the rows say"


def test_a_source_without_a_rule_is_a_warning_and_an_answer_may_be_a_list(tmp_path: Path) -> None:
    path = _file(tmp_path, {"prompt": "q", "answer": ["Paris", "paris"], "data_source": "trivia"})
    code, report = _check(path)
    assert (code, [(each["level"], each["check"]) for each in report["findings"]]) == (0, [("warning", "ground_truth")])
    assert "no reward function for data_source 'trivia'" in report["findings"][0]["message"]


def test_what_cannot_be_read_on_is_one_error_after_what_was_read(tmp_path: Path) -> None:
    path = Path(_file(tmp_path, {"prompt": "q", "answer": "1"}))
    path.write_text(path.read_text() + "{broken\n")
    found = _said(check_data([str(path), f"{tmp_path}/none.jsonl"]))
    broken, absent = found["error", "source"]
    assert broken.startswith(f"{path}, line 2: expected a JSON object, got '{{broken'")
    assert absent.startswith(f"{tmp_path}/none.jsonl: no such file or folder")


def test_lengths_are_counted_by_powers_of_two() -> None:
    found = histogram("prompt", "tokens", [3, 5, 6, 0, 1, 17])
    assert found.bins == ((0, 1, 1), (1, 2, 1), (2, 4, 1), (4, 8, 2), (8, 16, 0), (16, 32, 1))
    assert (found.minimum, found.median, found.p95, found.maximum) == (0, 3, 17, 17)
    hundred = histogram("prompt", "tokens", range(1, 101))
    assert (hundred.median, hundred.p95) == (50, 95)


def test_tokens_are_those_of_the_models_template(tmp_path: Path, tiny_model: Path) -> None:
    path = _file(tmp_path, {"prompt": "12 loaves?", "chosen": "42"})
    code, report = _check(path, "--tokenizer", str(tiny_model))
    assert code == 0
    tokenizer = load_tokenizer(tiny_model)
    prompt, chosen = report["splits"][0]["histograms"]
    assert prompt["maximum"] == len(chat_prompt_ids(tokenizer, [{"role": "user", "content": "12 loaves?"}]))
    assert (chosen["unit"], chosen["maximum"]) == ("tokens", len(tokenizer("42")["input_ids"]) + 1)


def test_a_message_that_the_template_refuses_is_an_error(tmp_path: Path, tiny_model: Path) -> None:
    tokenizer: Any = load_tokenizer(tiny_model)
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tokenizer.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}q"
    tokenizer.save_pretrained(folder)
    talks = [[{"role": "system", "content": "s"}, {"role": "user", "content": text}] for text in "ab"]
    path = _file(tmp_path, *({"prompt": talk, "answer": "1"} for talk in talks))
    code, report = _check(path, "--tokenizer", str(folder))
    (refused,) = [each for each in report["findings"] if each["check"] == "chat_template"]
    assert (code, refused["level"], refused["num_rows"]) == (1, "error", 2)
    assert refused["message"].endswith("no system")


def test_people_read_lines_with_places_and_a_count(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"prompt": ["q"] * 6, "answer": ["1"] * 6}), path)
    result = CliRunner().invoke(app, ["data", "check", str(path)])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "train: 6 rows, for the objective rl"
    assert f"          {path}, row 1 ({path}, row 0)" in lines
    assert "          ..." in lines, "three places are enough"
    assert any("repeat the prompt of an earlier one (5 rows)" in line for line in lines)
    assert lines[-1].startswith("0 errors, ")


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_says_what_it_does(arguments: list[str]) -> None:
    assert "check" in CliRunner().invoke(app, ["data", *arguments]).output
