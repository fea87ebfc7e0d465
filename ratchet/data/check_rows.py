"""What is wrong with single rows of training data: columns, types, roles, texts, ground truths.

The trap: a loader stops at the first bad row. Here every row is looked at, and what many rows have in common is said
once, with how many they are and where the first ones stand.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ratchet.data.conversations import (
    CHOSEN_KEYS,
    REJECTED,
    Completion,
    chosen_of,
    is_conversation,
    prompt_messages,
    rejected_of,
    without_prompt,
)
from ratchet.data.prompt_rows import PromptRow, row_from_record
from ratchet.data.sources import Record
from ratchet.errors import DataError

Level = Literal["error", "warning", "note"]
Split = Literal["train", "val"]
Objective = Literal["rl", "sft", "dpo", "reward_model"]
NUM_PLACES: Final = 3
"""How many rows a finding names."""

Judge = Callable[[PromptRow], tuple[Level, str] | None]
"""Says what is wrong with a row for the rule that would grade it."""


@dataclass(slots=True)
class Finding:
    """One thing that is wrong, and how many rows it is wrong with."""

    level: Level
    """An error is what training refuses or what makes its numbers untrue; a note asks for nothing."""
    check: str
    message: str
    places: list[str] = field(default_factory=list)
    """File and line of the first rows that have it."""
    num_rows: int = 0


class Findings:
    """Findings by what they say, in the order in which they were first made."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Finding] = {}

    def add(self, level: Level, check: str, message: str, place: str = "", *, key: str | None = None) -> None:
        """Note that the row at `place` has this; findings of one check and `key` are one, and say the first message."""
        found = self._found.setdefault((check, message if key is None else key), Finding(level, check, message))
        found.num_rows += 1 if place else 0
        if place and len(found.places) < NUM_PLACES:
            found.places.append(place)

    def refused(self, check: str, error: DataError | str, where: str, *, level: Level = "error") -> None:
        """Note what was said about the row at `where`, once for all rows whose own words alone differ."""
        message = str(error).removeprefix(where).lstrip(", :")
        # Messages quote what came after "got", and chat templates the messages before what they say.
        self.add(level, check, message, where, key=message.partition(", got ")[0].rpartition("}]: ")[2])

    def sorted(self) -> list[Finding]:
        """Errors first."""
        levels = ("error", "warning", "note")
        return sorted(self._found.values(), key=lambda finding: levels.index(finding.level))


@dataclass(slots=True)
class CheckedRow:
    """A row that could be read."""

    row: PromptRow
    chosen: Completion | None
    rejected: Completion | None


class Columns:
    """Which types the values of each column have, in each split."""

    def __init__(self) -> None:
        self._types: dict[str, dict[Split, Counter[str]]] = {}
        self._num_rows: Counter[Split] = Counter()

    def add(self, values: Mapping[str, Any], split: Split) -> None:
        self._num_rows[split] += 1
        for name, value in _flat(values):
            kind = _type_of(value)
            if kind is not None:
                self._types.setdefault(name, {}).setdefault(split, Counter())[kind] += 1

    def report(self, findings: Findings) -> None:
        """Note columns of several types, and those that only one split has, or only some rows of it."""
        for name, splits in self._types.items():
            if len({kind for types in splits.values() for kind in types}) > 1:
                said = "; ".join(
                    f"{split}: {', '.join(f'{kind} in {count}' for kind, count in types.most_common())}"
                    for split, types in splits.items()
                )
                findings.add("warning", "types", f"column {name} is of several types ({said})")
            if lacking := [split for split in self._num_rows if split not in splits]:
                said = f"column {name} is in {', '.join(splits)} and not in {', '.join(lacking)}"
                findings.add("note" if "." in name else "warning", "columns", said)
            for split, types in splits.items():
                gaps = self._num_rows[split] - types.total()
                if gaps and "." not in name:
                    of_all = f"{gaps} of {self._num_rows[split]} {split} rows"
                    findings.add("note", "columns", f"column {name} is empty or missing in {of_all}")

    def names(self, split: Split) -> list[str]:
        """The columns of a split that have a value."""
        return [name for name, splits in self._types.items() if split in splits and "." not in name]


def read_row(
    record: Record, findings: Findings, *, split: Split, prompt_key: str, data_source: str | None
) -> CheckedRow | None:
    """The record as a row, or None where it is refused; what is wrong with it is noted."""
    where, check = record.where, "messages"
    try:
        values = without_prompt(record.values, prompt_key, where)
        if values.get(prompt_key) is not None:
            prompt_messages(values[prompt_key], f"{where}, {prompt_key}")
        check = "columns"
        row = row_from_record(
            values,
            split=split,
            index=record.number,
            data_source=data_source,
            fallback_source=record.fallback_source,
            prompt_key=prompt_key,
            where=where,
            needs_ground_truth=False,
        )
        check = "messages"
        chosen = chosen_of(row.extra_info, where) if _has_chosen(row) else None
        checked = CheckedRow(row, chosen, rejected_of(row.extra_info, where))
    except DataError as error:
        findings.refused(check, error, where)
        return None
    _check_prompt(row, findings)
    return checked


def _has_chosen(row: PromptRow) -> bool:
    """Whether the row says what to learn; an answer that is a number or a list of values is a ground truth alone."""
    key = next((key for key in CHOSEN_KEYS if row.extra_info.get(key) is not None), None)
    if key is None or key in ("chosen", "completion"):
        return key is not None
    return isinstance(row.extra_info[key], str) or is_conversation(row.extra_info[key])


def _check_prompt(row: PromptRow, findings: Findings) -> None:
    for message, following in zip(row.prompt, [*row.prompt[1:], None], strict=True):
        role = message["role"]
        if not message["content"].strip():
            level: Level = "error" if role == "user" else "warning"
            findings.add(level, "empty", f"a message of the {role}'s has no text", row.where)
        if following is not None and role == following["role"] != "tool":
            said = f"two messages of the {role}'s follow each other, which many chat templates refuse"
            findings.add("warning", "roles", said, row.where)


def objective_of(rows: list[CheckedRow]) -> Objective:
    """What rows like these are for, as far as their columns say."""
    if any(each.rejected is not None for each in rows):
        return "dpo"
    has_chosen = any({"chosen", "completion"} & each.row.extra_info.keys() for each in rows)
    return "sft" if has_chosen else "rl"


def check_objective(rows: list[CheckedRow], findings: Findings, *, objective: Objective, judge: Judge | None) -> None:
    """Note the rows that lack what the objective learns from."""
    if objective == "rl":
        _check_ground_truths(rows, findings, judge)
        return
    for each in rows:
        where = each.row.where
        _check_completions(each, findings)
        if each.chosen is None:
            said = f"nothing to learn for the objective {objective}: expected a column {', '.join(CHOSEN_KEYS)}"
            findings.add("error", "columns", said, where)
        if objective == "sft":
            continue
        if each.rejected is None:
            findings.add("error", "columns", f"nothing to compare with for {objective}: expected rejected", where)
        elif each.chosen == each.rejected:
            findings.add("warning", "preferences", "chosen and rejected are the same", where)


def _check_completions(checked: CheckedRow, findings: Findings) -> None:
    for name, value in (("chosen", checked.chosen), (REJECTED, checked.rejected)):
        texts = [value] if isinstance(value, str) else [turn["content"] for turn in value or ()]
        if any(not text.strip() for text in texts):
            findings.add("error" if name == "chosen" else "warning", "empty", f"{name} has no text", checked.row.where)


def _check_ground_truths(rows: list[CheckedRow], findings: Findings, judge: Judge | None) -> None:
    lacking = [each.row for each in rows if "ground_truth" not in each.row.reward_model]
    if len(lacking) == len(rows):
        findings.add("warning", "ground_truth", "no row has a ground truth, which every rule compares with")
    for row in lacking if len(lacking) < len(rows) else ():
        findings.add("error", "ground_truth", "no ground truth, which other rows have", row.where)
    for each in rows:
        ground_truth = each.row.reward_model.get("ground_truth")
        if ground_truth is None:
            continue
        if not ground_truth.strip():
            findings.add("error", "ground_truth", "the ground truth is empty", each.row.where)
        elif judge is not None and (said := judge(each.row)) is not None:
            findings.refused("ground_truth", said[1], each.row.where, level=said[0])


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", entry) for key, entry in value.items())


def _type_of(value: Any) -> str | None:
    """What JSON calls the type; None for a missing value."""
    if value is None or value != value:
        return None
    if isinstance(value, bool):
        return "boolean"
    for types, name in ((str, "text"), (int | float, "number"), (Mapping, "object"), (list | tuple, "list")):
        if isinstance(value, types):
            return name
    return type(value).__name__
