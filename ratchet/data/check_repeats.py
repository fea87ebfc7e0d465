"""Rows that repeat each other, within a split and between training and validation.

The trap: copies seldom are exact. Rows are also compared without what a reader would not see: case, width and kind of
spaces, the instruction that GSM8K's preprocessing appends, the system prompt.
"""

import re
import unicodedata
from collections.abc import Callable, Hashable, Iterable, Sequence

from ratchet.data.check_rows import CheckedRow, Findings, Level, Objective, Split
from ratchet.data.conversations import Completion
from ratchet.data.prompt_rows import INSTRUCTION, SHORT_INSTRUCTION

Key = Callable[[CheckedRow], Hashable]

_SPACES = re.compile(r"\s+")
_INSTRUCTIONS = re.compile("|".join(map(re.escape, (INSTRUCTION, SHORT_INSTRUCTION))))


def normalised(text: str) -> str:
    """The text in NFKC, lower case and single spaces, without the instructions of this library's own data sets.

    Example: "How  many?" and "how many? Give only the final answer after "####"." are the same.
    """
    without = _INSTRUCTIONS.sub("", text)
    return _SPACES.sub(" ", unicodedata.normalize("NFKC", without)).strip().casefold()


def exact_prompt(checked: CheckedRow) -> Hashable:
    """What is asked, to the character."""
    return tuple((message["role"], message["content"]) for message in checked.row.prompt)


def similar_prompt(checked: CheckedRow) -> Hashable:
    """What is asked, as a reader sees it."""
    asked = [message for message in checked.row.prompt if message["role"] not in ("system", "developer")]
    return tuple((message["role"], normalised(message["content"])) for message in asked)


def _text(completion: Completion | None) -> Hashable:
    if completion is None or isinstance(completion, str):
        return completion
    return tuple((message["role"], message["content"]) for message in completion)


def check_repeats(rows: Sequence[CheckedRow], findings: Findings, *, objective: Objective, split: Split) -> None:
    """Note rows that repeat an earlier one of their split, and those that contradict it."""
    is_rl = objective == "rl"
    what = "prompt" if is_rl else "prompt and completions"

    def exact(each: CheckedRow) -> Hashable:
        return exact_prompt(each) if is_rl else (exact_prompt(each), _text(each.chosen), _text(each.rejected))

    copies = _note(rows, exact, findings, f"{split} rows repeat the {what} of an earlier one")
    rest = [each for each in rows if id(each) not in copies]
    if is_rl:
        said = f"{split} rows differ from an earlier one in case, spaces, instruction or system prompt alone"
        _note(rest, similar_prompt, findings, said)
        _check_contradictions(rows, findings, split)
        return
    said = f"{split} rows ask what an earlier one asks, with other completions"
    _note(rest, exact_prompt, findings, said, level="note")
    pairs = {(exact_prompt(each), _text(each.chosen), _text(each.rejected)) for each in rows if each.rejected}
    for each in rows:
        turned = (exact_prompt(each), _text(each.rejected), _text(each.chosen))
        if each.rejected and each.chosen != each.rejected and turned in pairs:
            said = f"{split} rows prefer what another one of the same prompt rejects"
            findings.add("warning", "preferences", said, each.row.where)


def _note(rows: Iterable[CheckedRow], key: Key, findings: Findings, said: str, *, level: Level = "warning") -> set[int]:
    """Note the rows whose key an earlier one has; the ids of their objects."""
    first: dict[Hashable, str] = {}
    copies = set()
    for each in rows:
        earlier = first.setdefault(key(each), each.row.where)
        if earlier != each.row.where:
            copies.add(id(each))
            findings.add(level, "duplicates", said, f"{each.row.where} ({earlier})")
    return copies


def _check_contradictions(rows: Iterable[CheckedRow], findings: Findings, split: Split) -> None:
    truths: dict[Hashable, tuple[str, str]] = {}
    for each in rows:
        truth = each.row.reward_model.get("ground_truth")
        if truth is None:
            continue
        earlier, where = truths.setdefault(exact_prompt(each), (truth, each.row.where))
        if earlier != truth:
            said = f"{split} rows ask what an earlier one asks, with another ground truth"
            findings.add("error", "duplicates", said, f"{each.row.where} ({where})")


def check_leakage(train: Sequence[CheckedRow], val: Sequence[CheckedRow], findings: Findings) -> None:
    """Note validation rows whose prompt is a training row's, to the character or as a reader sees it."""
    exact = {exact_prompt(each): each.row.where for each in train}
    similar = {similar_prompt(each): each.row.where for each in train}
    for each in val:
        if (where := exact.get(exact_prompt(each))) is not None:
            findings.add("error", "leakage", "val rows ask what a train row asks", f"{each.row.where} ({where})")
        elif (where := similar.get(similar_prompt(each))) is not None:
            said = "val rows ask what a train row asks, but for case, spaces, instruction or system prompt"
            findings.add("error", "leakage", said, f"{each.row.where} ({where})")
