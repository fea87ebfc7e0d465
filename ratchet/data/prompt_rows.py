"""Turns one record that a user brings into one row of verl's prompt schema.

The trap: Parquet fills keys that other rows have with None, and files disagree about the type of `extra_info.index`
and of the ground truth. Here None keys are left out and the ground truth is text; ids keep their type, dates and
decimals of other columns become text (`plain_values`).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ratchet.data.conversations import prompt_messages, without_prompt
from ratchet.data.plain_values import plain_value
from ratchet.errors import DataError

GSM8K: Final = "openai/gsm8k"
INSTRUCTION: Final = 'Let\'s think step by step and output the final answer after "####".'
SHORT_INSTRUCTION: Final = 'Give only the final answer after "####".'
"""What verl's preprocessing appends to every GSM8K question, after one space."""

_GROUND_TRUTH_KEYS = ("ground_truth", "answer", "response")
_REFERENCE = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"\s*[-+]?[$]?[0-9][0-9.,/]*%?\s*")
_GSM8K_FORMAT = (GSM8K, "gsm8k", "ratchet/word-problems")


@dataclass(frozen=True, slots=True)
class PromptRow:
    """What the policy is asked and how it is judged.

    Example: PromptRow("openai/gsm8k", [{"role": "user", "content": "Natalia sold ..."}], "math",
    {"style": "rule", "ground_truth": "72"}, {"index": 0, "split": "train"}).
    """

    data_source: str
    """Selects the reward function."""
    prompt: list[dict[str, str]]
    """Chat messages of "role" and "content"."""
    ability: str
    reward_model: dict[str, str]
    """"style" and "ground_truth"; without the latter where the record has none."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """Whatever else the record says, as JSON can say it; no value is None."""
    where: str = field(default="", compare=False)
    """File and line that it was read from, for messages."""


def reference_answer(answer: str, where: str) -> str:
    """The ground truth of a GSM8K reference answer: what follows its "#### ", without commas."""
    match = _REFERENCE.search(answer)
    if match is None:
        raise DataError(f"{where}: expected an answer with '#### <number>', got {answer[-80:]!r}")
    return match[1].replace(",", "")


def _answer_of(answer: str, where: str) -> str:
    """What a reference answer with its "####" says, or a number that stands alone."""
    return answer.strip() if _NUMBER.fullmatch(answer) else reference_answer(answer, where)


def gsm8k_row(
    question: str,
    answer: str,
    *,
    split: str,
    index: int,
    data_source: str = GSM8K,
    instruction: str = INSTRUCTION,
    where: str,
) -> PromptRow:
    """The row that verl's `examples/data_preprocess/gsm8k.py` writes for one GSM8K problem; `index` counts from 0."""
    return PromptRow(
        data_source=data_source,
        prompt=[{"role": "user", "content": f"{question} {instruction}"}],
        ability="math",
        reward_model={"style": "rule", "ground_truth": _answer_of(answer, where)},
        extra_info={"answer": answer, "index": index, "question": question, "split": split},
        where=where,
    )


def _ground_truth_text(value: Any, where: str, *, is_prose: bool = False) -> str:
    """A ground truth as text; prose may have a "####" that is a heading."""
    value = plain_value(value, where)
    if isinstance(value, str):
        states_answer = _REFERENCE.search(value) is not None if is_prose else "####" in value
        return reference_answer(value, where) if states_answer else value
    if value is None or isinstance(value, bool):
        raise DataError(f"{where}: expected a ground truth, got {value!r}")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # 72.0: pandas makes floats of a column of integers that has a gap
    return json.dumps(value, sort_keys=True, ensure_ascii=False) if isinstance(value, list | dict) else str(value)


def _reward_model(record: Mapping[str, Any], where: str, needs_ground_truth: bool) -> dict[str, str]:
    stated = record.get("reward_model")
    style = "rule"
    if isinstance(stated, Mapping):
        style = str(stated.get("style") or style)
        if stated.get("ground_truth") is not None:
            text = _ground_truth_text(stated["ground_truth"], f"{where}, reward_model")
            return {"style": style, "ground_truth": text}
    for key in _GROUND_TRUTH_KEYS:
        if record.get(key) is not None:
            text = _ground_truth_text(record[key], f"{where}, {key}", is_prose=not needs_ground_truth)
            return {"style": style, "ground_truth": text}
    if not needs_ground_truth:
        return {"style": style}
    raise DataError(
        f"{where}: expected a ground truth in the column answer, ground_truth or reward_model, got the columns "
        f"{', '.join(record)}; add one of them, or grade without one, by reward_model.type=model, api or custom "
        "(preference or demonstration data without ground truth is for offline objectives)"
    )


def _prompt_row(
    record: Mapping[str, Any],
    prompt_key: str,
    *,
    split: str,
    index: int,
    data_source: str,
    where: str,
    needs_ground_truth: bool,
) -> PromptRow:
    reward_model = _reward_model(record, where, needs_ground_truth)
    source = record.get("data_source") or data_source
    extra = plain_value(record.get("extra_info") or {}, f"{where}, column extra_info")
    if not isinstance(extra, dict):
        raise DataError(f"{where}: expected extra_info to be an object, got {type(extra).__name__}")
    known = {prompt_key, "data_source", "ability", "reward_model", "ground_truth", "extra_info"}
    columns = {key: plain_value(value, f"{where}, column {key}") for key, value in record.items() if key not in known}
    others = {key: value for key, value in columns.items() if value is not None and value != {}}
    if "reward_model" not in record and "extra_info" not in record:
        others = {**others, "split": split, "index": index}
    return PromptRow(
        data_source=str(source),
        prompt=prompt_messages(record[prompt_key], f"{where}, {prompt_key}"),
        ability=str(record.get("ability") or "general"),
        reward_model=reward_model,
        extra_info={**others, **extra},
        where=where,
    )


def row_from_record(
    record: Mapping[str, Any],
    *,
    split: str,
    index: int,
    data_source: str | None,
    fallback_source: str,
    prompt_key: str,
    where: str,
    needs_ground_truth: bool = True,
) -> PromptRow:
    """One row from a JSON object, a Parquet record or a line of CSV; `where` begins every DataError.

    Records with `prompt_key` keep their own data_source, else take `data_source`, else `fallback_source`. Records with
    question and answer are GSM8K's, unless `data_source` says otherwise and no answer has a "####": then the question
    is the prompt as it stands. Whole conversations are taken apart (`conversations.without_prompt`). Anything else is
    refused, naming the columns that are there.
    """
    record = without_prompt(record, prompt_key, where)
    options: dict[str, Any] = {"split": split, "index": index, "where": where}
    if record.get(prompt_key) is not None:
        source = data_source or fallback_source
        return _prompt_row(record, prompt_key, data_source=source, needs_ground_truth=needs_ground_truth, **options)
    question, answer = record.get("question"), record.get("answer")
    if isinstance(question, str) and answer is not None:
        answer = _ground_truth_text(answer, f"{where}, answer") if not isinstance(answer, str) else answer
        source = data_source or str(record.get("data_source") or GSM8K)
        if source in _GSM8K_FORMAT or "####" in answer:
            return gsm8k_row(question, answer, data_source=source, **options)
        plain = {**record, "answer": answer}
        return _prompt_row(plain, "question", data_source=source, needs_ground_truth=True, **options)
    present = [key for key, value in record.items() if value is not None]
    missing = "answer" if question is not None else prompt_key
    raise DataError(
        f"{where}: no column {missing!r}; expected {prompt_key} with a ground truth, or question and answer as texts, "
        f"got {', '.join(present) or 'no columns'}"
    )
