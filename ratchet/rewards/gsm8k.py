"""Grades a completion against GSM8K's ground truth: 1 for the same number, 0 for another one or for none.

The trap: `strict` and `flexible` repeat verl's scorer with its quirks (300-character window, "#### 72 or 73" pays), for
comparison with its runs; `default` is the one to train with. It compares exact rationals, and tells a wrong answer
from one that cannot be read.

Where the default mode looks, first that exists:

1. Behind the last `####`. The marker is a promise: when its line holds no single number (empty, hedged, a time), the
   completion is unparseable, and no earlier number is taken instead. A line that is empty or only a label ("####
   Final answer:") continues on the next line that is not blank.
2. In the last `\\boxed{...}`; a box that is never closed was cut off and is unparseable.
3. Behind the last "answer is", "answer:" or `<answer>` that a number follows.
4. The last number of the text.
"""

import numbers
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal, get_args

from ratchet.errors import DataError
from ratchet.rewards.answer_grammar import read_answer, read_last_number
from ratchet.rewards.numerals import GROUP_SPACE, UNREADABLE, canonical, fold, without_markup

Gsm8kMode = Literal["default", "strict", "flexible"]

LONGEST_LINE = 4000
"""Characters of an answer line, or of the end of unmarked prose, that are read; the rest is ignored."""

_VERL_WINDOW = 300

_BLANK = re.compile(rf"[ \t{GROUP_SPACE}]+")
_UNBRACED = re.compile(r"\S{1,200}")
_NEXT_LINE = re.compile(r"\s*(?:[-*+] )?")
_DIGIT = re.compile(r"\d")
_MARKER = re.compile(r"#{4,}")
_CUE = re.compile(
    r"<answer>|\banswer[*_\"']{0,4} ?"
    r"(?:(?:is|was|equals|would be|will be|should be|must be|comes to)\b|[:=])[*_:]{0,4}",
    re.IGNORECASE,
)
_LABEL = re.compile(
    r"[\s*_:=\"'$(-]*(?:(?:the|final|numeric|numerical|answer|result|total|solution|is)[\s*_:=\"'$(-]+)*", re.IGNORECASE
)
_LEAD = re.compile(
    r"(?:(?:the|final|answer|result|total|solution|is|so|thus|therefore|then|hence|equals?|to|about|approximately|"
    r"roughly|exactly|just|simply|only|now|clearly|either|between|maybe|probably|not|minus|negative|an|USD?|EUR|GBP|Rs|"
    r"[a-z])(?![^\W\d_])|[^\w\n])*\d",
    re.IGNORECASE,
)
_OFFERED_BEFORE = re.compile(r"\d[^\n]*?(?:\b(?:or|and|to)\b|/|(?<!-)-(?!-))[\s*$({]{0,8}$", re.IGNORECASE)
_NEGATED_BEFORE = re.compile(r"\S *-[\s*$({]*$|^-[*$({]*$")
_OFFERED_AFTER = re.compile(
    r"[\s*$)%]*(?:\b(?:or|to|and)\b[\s*$(]*[\d.]|[-/,]?[\s*$]*\d|\0)|[^.!?\n]*\bor\b", re.IGNORECASE
)
_OFFERED_NEXT = re.compile(r"\n\s{0,8}(?:[-*] )?or\b[^\n]{0,40}?\d", re.IGNORECASE)
_BOX_EVENT = re.compile(r"\\f?boxed *(\{)?|\\.|[{}]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Grade:
    """What a completion earned. Example: Grade(reward=0.0, extracted="20", is_parseable=True) is a wrong answer."""

    reward: float
    extracted: str | None
    """The answer as it was read: canonical ("72", "-3", "0.75", "1/3") in default mode, verl's string in the others."""
    is_parseable: bool


@dataclass(frozen=True, slots=True)
class _Box:
    start: int
    end: int
    content: str


def _tail_boxes(text: str) -> tuple[list[_Box], bool]:
    """Outermost boxes in order, and whether the last one was cut off; one pass, whatever the nesting."""
    boxes: list[_Box] = []
    stack: list[tuple[int, int] | None] = []
    for event in _BOX_EVENT.finditer(text):
        lexeme = event[0]
        if "boxed" in lexeme and event[1] is None:
            word = _UNBRACED.match(text, event.end())
            if word is not None:
                boxes.append(_Box(event.start(), word.end(), word[0]))
        elif lexeme.endswith("{") and not lexeme.startswith("\\{"):
            stack.append((event.start(), event.end()) if "boxed" in lexeme else None)
        elif lexeme == "}" and stack:
            opened = stack.pop()
            if opened is not None:
                while boxes and boxes[-1].start > opened[0]:
                    boxes.pop()
                content = text[opened[1] : min(event.start(), opened[1] + LONGEST_LINE)]
                boxes.append(_Box(opened[0], event.end(), content))
    last = boxes[-1].start if boxes else -1
    return boxes, any(opened is not None and opened[0] > last for opened in stack)


def _line_from(text: str, start: int) -> str:
    """The rest of the line at `start`, cut between words where it is longer than LONGEST_LINE."""
    blank = _BLANK.match(text, start)
    start = blank.end() if blank is not None else start
    end = text.find("\n", start)
    end = len(text) if end < 0 else end
    if end - start <= LONGEST_LINE:
        return text[start:end]
    line, space, _ = text[start : start + LONGEST_LINE].rpartition(" ")
    return line if space else UNREADABLE


def _line_before(text: str, end: int) -> str:
    start = max(text.rfind("\n", 0, end) + 1, end - LONGEST_LINE)
    return text[start:end]


def _stated_line(text: str, start: int) -> str | None:
    """The prepared line that states an answer behind `start`: the rest of that line, or the next one behind a label."""
    line = without_markup(_line_from(text, start)).strip()
    if line and not _LABEL.fullmatch(line + " "):
        return line
    end = text.find("\n", start)
    following = _NEXT_LINE.match(text, end) if end >= 0 else None
    if following is None:
        return None
    line = without_markup(_line_from(text, following.end())).strip()
    return line if _LEAD.match(line) else None


def _is_offered_next(text: str, start: int) -> bool:
    """Whether the line behind the one at `start` goes on with "or 73"."""
    end = text.find("\n", start)
    return end >= 0 and _OFFERED_NEXT.match(text, end) is not None


def _after_marker(text: str, marker: re.Match[str]) -> Fraction | None:
    if _OFFERED_BEFORE.search(without_markup(_line_before(text, marker.start())[-80:])):
        return None
    line = _stated_line(text, marker.end())
    return None if line is None or _is_offered_next(text, marker.end()) else read_answer(line)


def _in_box(text: str, boxes: list[_Box]) -> Fraction | None:
    *earlier, box = boxes
    value = read_answer(without_markup(box.content.replace("\n", " ")).strip())
    before = without_markup(_line_before(text, box.start)[-80:])
    if _OFFERED_BEFORE.search(before) or _NEGATED_BEFORE.search(before):
        return None
    if _OFFERED_AFTER.match(without_markup(_line_from(text, box.end))):
        return None
    if earlier:
        between = text[earlier[-1].end : box.start]
        is_same_sentence = len(between) <= LONGEST_LINE and not re.search(r"[.!?\n]", between)
        if is_same_sentence and read_answer(without_markup(earlier[-1].content)) != value:
            return None
    return value


def _after_cue(text: str) -> tuple[bool, Fraction | None]:
    """(whether a cue with a number was found, its value)."""
    end = len(text)
    for cue in reversed(list(_CUE.finditer(text))):
        window = text[cue.end() : min(end, cue.end() + 2 * LONGEST_LINE)]
        end = cue.start()
        line = _stated_line(window, 0) if _DIGIT.search(window) else None
        if line is None or not _LEAD.match(line):
            continue
        is_offered = re.search(r"\bor (?:the )?(?:final )?$", _line_before(text, cue.start())[-40:], re.IGNORECASE)
        return True, None if is_offered or _is_offered_next(text, cue.end()) else read_answer(line)
    return False, None


def _last_number(text: str) -> Fraction | None:
    tail = text[-LONGEST_LINE:]
    if len(tail) < len(text):
        tail = tail.split(maxsplit=1)[-1] if tail.strip() else ""  # the first word may have lost its beginning
    for line in reversed(tail.split("\n")):
        is_found, value = read_last_number(without_markup(line))
        if is_found:
            return None if re.match(r"\W{0,8}or\b", line, re.IGNORECASE) else value
    return None


def extract(completion: str) -> Fraction | None:
    """The exact number that a completion gives as its answer, or None where it gives none that can be relied on.

    Time is linear in the length. Percent signs, units and currencies are dropped ("72%" is 72), times and ratios
    ("3:30") are None.
    """
    text = fold(completion)
    markers = list(_MARKER.finditer(text))
    if len(markers) > 1 and _closes_heading(text, markers[-1]):
        markers.pop()
    if markers:
        return _after_marker(text, markers[-1])
    boxes, is_cut_off = _tail_boxes(text) if "boxed" in text else ([], False)
    if boxes or is_cut_off:
        return None if is_cut_off else _in_box(text, boxes)
    is_found, value = _after_cue(text)
    return value if is_found else _last_number(text)


def _closes_heading(text: str, marker: re.Match[str]) -> bool:
    """Whether these are the hashes that may end a Markdown heading: "#### 72 ####"."""
    before = _line_before(text, marker.start())
    return "####" in before and not _line_from(text, marker.end()).strip()


def _ground_truth_text(ground_truth: object) -> str:
    is_number = isinstance(ground_truth, numbers.Real) and not isinstance(ground_truth, bool)
    if not isinstance(ground_truth, str) and not is_number:
        raise DataError(f"ground truth: expected a number or its text, got {ground_truth!r}")
    return str(ground_truth)


def ground_truth_value(ground_truth: object) -> Fraction:
    """The exact number of a ground truth: "72", "1,080", 72, "3/4", or a whole reference answer with its "####".

    Raises DataError where it holds no single number: such a row could never be answered right.
    """
    return _value_of_ground_truth(_ground_truth_text(ground_truth))


@lru_cache(maxsize=4096)  # every completion of a group is graded against the same text
def _value_of_ground_truth(text: str) -> Fraction:
    value = extract(text) if "####" in text or "\\boxed" in text else read_answer(without_markup(fold(text)).strip())
    if value is None:
        raise DataError(f"ground truth: expected a single number, got {text[:200]!r}")
    return value


def _verl_extract(completion: str, mode: Literal["strict", "flexible"]) -> str | None:
    """The string that verl's extract_solution returns, quirks included: a lone "." counts where nothing else does."""
    tail = completion[-_VERL_WINDOW:]
    if mode == "strict":
        marked = re.findall(r"#### (-?[0-9.,]+)", tail)
        return marked[-1].replace(",", "") if marked else None
    found: list[str] = re.findall(r"-?[0-9.,]+", tail)
    usable = [lexeme for lexeme in found if lexeme != "."]
    return usable[-1] if usable else next(iter(found), None)


def grade(completion: str, ground_truth: str, mode: Gsm8kMode = "default") -> Grade:
    """Reward 1.0 where the completion's answer equals the ground truth, else 0.0; never anything between.

    `default` compares numbers and raises DataError for a ground truth that is none. `strict` and `flexible` compare
    strings as verl 0.9.1's `gsm8k.compute_score` does (there, the ground truth "1,080" is never matched).
    """
    if mode == "default":
        expected = ground_truth_value(ground_truth)
        value = extract(completion)
        return Grade(float(value == expected), None if value is None else canonical(value), value is not None)
    if mode not in get_args(Gsm8kMode):
        raise ValueError(f"mode: expected one of {', '.join(get_args(Gsm8kMode))}, got {mode!r}")
    extracted = _verl_extract(completion, mode)
    return Grade(float(extracted == _ground_truth_text(ground_truth)), extracted, extracted is not None)
