"""Prompts as people write them: texts, conversations, prompt and response pairs."""

import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.data.sources import load_rows
from ratchet.errors import DataError


def _write(folder: Path, *records: Any) -> str:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return str(path)


def test_prompt_and_response_lines_are_read_with_the_response_as_reference(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        {"prompt": "How many clips?", "response": "48 + 24 = 72\n#### 72"},
        {"prompt": "And in May?", "response": "She sold 24."},
    )
    for spec in (path, f"json:{path}"):
        first, second = load_rows(spec, split="train", data_source="openai/gsm8k")
        assert first.prompt == [{"role": "user", "content": "How many clips?"}]
        assert first.reward_model == {"style": "rule", "ground_truth": "72"}
        assert first.extra_info["response"] == "48 + 24 = 72\n#### 72"
        assert second.reward_model["ground_truth"] == "She sold 24."


def test_a_response_that_states_no_answer_is_refused_by_the_rule_with_the_fix(tmp_path: Path) -> None:
    from ratchet.config import RunConfig
    from ratchet.rewards.graders import open_grader

    path = _write(tmp_path, {"prompt": "q", "response": "She sold 24."}, {"prompt": "r", "response": "Paris"})
    rows = load_rows(path, split="train", data_source="openai/gsm8k", needs_ground_truth=False)
    with pytest.raises(
        DataError, match=r"mine\.jsonl, line 2: .*got 'Paris'.*give the answer itself in a column answer"
    ):
        open_grader(RunConfig()).check_prompts(rows)


def test_preferences_without_ground_truth_are_refused_under_a_rule_and_taken_by_a_reward_model(tmp_path: Path) -> None:
    from ratchet.config import RunConfig
    from ratchet.rewards.graders import open_grader

    path = _write(tmp_path, {"prompt": "q", "chosen": "a", "rejected": "b"})
    rows = load_rows(path, split="train", data_source="openai/gsm8k", needs_ground_truth=False)
    fix = r"mine\.jsonl, line 1: no ground truth, .*Add a column answer or ground_truth; or grade without one"
    with pytest.raises(DataError, match=fix):
        open_grader(RunConfig()).check_prompts(rows)
    model = RunConfig.model_validate({"reward_model": {"type": "model", "path": "a/model"}})
    open_grader(model).check_prompts(rows)


def test_the_answer_comes_before_the_response(tmp_path: Path) -> None:
    path = _write(tmp_path, {"prompt": "q", "answer": "1", "response": "#### 2"})
    assert load_rows(path, split="train")[0].reward_model["ground_truth"] == "1"


def _chat(*roles: str) -> dict[str, Any]:
    return {"prompt": [{"role": role, "content": f"{role} says"} for role in roles], "answer": "1"}


@pytest.mark.parametrize(
    "roles", [("user",), ("system", "user"), ("user", "assistant", "user"), ("user", "assistant", "tool")]
)
def test_conversations_that_end_with_a_question_are_kept_as_they_are(tmp_path: Path, roles: tuple[str, ...]) -> None:
    (row,) = load_rows(_write(tmp_path, _chat(*roles)), split="train")
    assert row.prompt == _chat(*roles)["prompt"]


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (("user", "assistant"), "the last message is of the role assistant, so that nothing is asked"),
        (("system",), "the last message is of the role system"),
        (("user", "system", "user"), "message 2 is the system's; expected it to be the first"),
        (("system", "system", "user"), "message 2 is the system's"),
        (("human",), r"message 1 has the role 'human'; expected one of .* \(use user\)"),
        (("user", "gpt", "user"), r"message 2 has the role 'gpt'.*\(use assistant\)"),
        (("User",), r"message 1 has the role 'User'.*\(use user\)"),
    ],
)
def test_conversations_that_ask_nothing_or_have_odd_roles_are_refused(
    tmp_path: Path, roles: tuple[str, ...], message: str
) -> None:
    with pytest.raises(DataError, match=rf"mine\.jsonl, line 1, prompt: {message}"):
        load_rows(_write(tmp_path, _chat(*roles)), split="train")


def test_the_chat_template_is_applied_once(tmp_path: Path, tiny_model: Path) -> None:
    from ratchet.engines.model import chat_prompt_ids, load_tokenizer

    tokenizer = load_tokenizer(tiny_model)
    path = _write(tmp_path, {"prompt": "q", "answer": "1"}, _chat("system", "user", "assistant", "user"))
    rows = load_rows(path, split="train")
    for row in rows:
        text = tokenizer.decode(chat_prompt_ids(tokenizer, row.prompt))
        assert text == tokenizer.apply_chat_template(row.prompt, tokenize=False, add_generation_prompt=True)
        assert text.count("<|im_start|>") == len(row.prompt) + 1  # the last one is for the completion
    as_text = tokenizer.decode(chat_prompt_ids(tokenizer, rows[0].prompt))
    as_messages = tokenizer.decode(chat_prompt_ids(tokenizer, [{"role": "user", "content": "q"}]))
    assert as_text == as_messages
