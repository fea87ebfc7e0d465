"""Grades a completion against GSM8K's ground truth: 1 for the same number, 0 for another one or for none.

The trap: `strict` and `flexible` repeat verl's scorer with its quirks (300-character window, "#### 72 or 73" pays), for
comparison with its runs; `default` is the one to train with. It compares exact rationals, and tells a wrong answer
from one that cannot be read.

Where the default mode looks, first that exists:

1. Behind the last `####`. The marker is a promise: when its line holds no single number (empty, hedged, a time), the
   completion is unparseable, and no earlier number is taken instead. A line that is empty or only a label ("####
   Final answer:") continues on the next line that is not blank. "#### 1 000" is unparseable: a plain space separates
   numbers, and only the spaces that typesetters use separate thousands. "#### 2 dozen" is 24. "#### 72?" is 72.
2. In the last `\\boxed{...}`; a box that is never closed was cut off and is unparseable.
3. Behind the last "answer is", "answer:" or `<answer>` that a number follows.
4. The last number of the text.

What follows the answer of 1 to 3 on its line, and the first line of words or numbers below it, may explain the answer
but not name another number: "#### 72 (maybe 73)" and "#### 72\\nNo, 73" are unparseable (`ratchet.rewards.asides` says
what counts as an explanation). Behind a blank line, only what turns back to the answer counts: "Wait, 73".
"""

import numbers
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal, get_args

from ratchet.errors import DataError
from ratchet.rewards.answer_grammar import is_contradicted_by, read_answer, read_last_number
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
_OFFERED_BEFORE = re.compile(
    r"\d[^\n]*?(?:\b(?:or|and|to|maybe|perhaps|possibly|alternatively)\b|/|(?<!-)-(?!-))[\s*$({]{0,8}$", re.IGNORECASE
)
_NEGATED_BEFORE = re.compile(r"\S *-[\s*$({]*$|^-[*$({]*$")
_OFFERED_AFTER = re.compile(
    r"[\s*$)%]*(?:\b(?:or|to|and)\b[\s*$(]*[\d.]|[-/,xX]?[\s*$]*\d|\0)|[^.!?\n]*\bor\b", re.IGNORECASE
)
_NOT_WORDS = re.compile(r"[\W_]*")
_PARAGRAPH = re.compile(r"\n[ \t]*\n|[-*_=]{3}")
_BULLET = re.compile(r"^\s*[-*+] ")
_CUE_OFFERED = re.compile(
    r"\b(or|maybe|perhaps|possibly|alternatively),? (?:the )?(?:final |right |correct )?$", re.IGNORECASE
)
_LINE_OFFERED = re.compile(r"\W{0,8}(?:(or)|maybe|perhaps|possibly|alternatively)\b", re.IGNORECASE)
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


def _stated_line(text: str, start: int) -> tuple[str, int] | None:
    """The prepared line that states an answer behind `start`, and where it begins.

    It is the rest of that line, or the next one behind a label.
    """
    line = without_markup(_line_from(text, start)).strip()
    if line and not _LABEL.fullmatch(line + " "):
        return line, start
    end = text.find("\n", start)
    following = _NEXT_LINE.match(text, end) if end >= 0 else None
    if following is None:
        return None
    line = without_markup(_line_from(text, following.end())).strip()
    return (line, following.end()) if _LEAD.match(line) else None


def _next_line_contradicts(text: str, start: int, value: Fraction) -> bool:
    """Whether the first line with words or numbers behind the line at `start` names another number as the answer."""
    end = text.find("\n", start)
    if end < 0:
        return False
    content = _NOT_WORDS.match(text, end)
    assert content is not None
    begin = text.rfind("\n", end, content.end()) + 1
    is_new_paragraph = _PARAGRAPH.search(text, end, begin) is not None
    line = _BULLET.sub("", without_markup(_line_from(text, begin)), count=1)
    return is_contradicted_by(line, value, is_new_paragraph=is_new_paragraph)


def _unless_contradicted(text: str, line: tuple[str, int] | None) -> Fraction | None:
    value = None if line is None else read_answer(line[0])
    return None if line is None or value is None or _next_line_contradicts(text, line[1], value) else value


def _after_marker(text: str, marker: re.Match[str]) -> Fraction | None:
    if _OFFERED_BEFORE.search(without_markup(_line_before(text, marker.start())[-80:])):
        return None
    return _unless_contradicted(text, _stated_line(text, marker.end()))


def _in_box(text: str, boxes: list[_Box]) -> Fraction | None:
    *earlier, box = boxes
    value = read_answer(without_markup(box.content.replace("\n", " ")).strip())
    before = without_markup(_line_before(text, box.start)[-80:])
    if _OFFERED_BEFORE.search(before) or _NEGATED_BEFORE.search(before):
        return None
    after = without_markup(_line_from(text, box.end))
    if value is None or _OFFERED_AFTER.match(after) or is_contradicted_by(after, value):
        return None
    if _next_line_contradicts(text, box.end, value):
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
        if line is None or not _LEAD.match(line[0]):
            continue
        offer = _CUE_OFFERED.search(_line_before(text, cue.start())[-40:])
        if offer is not None and (offer[1].lower() == "or" or _CUE.search(text, 0, cue.start())):
            return True, None
        return True, _unless_contradicted(text, (line[0], cue.end() + line[1]))
    return False, None


def _last_number(text: str) -> Fraction | None:
    tail = text[-LONGEST_LINE:]
    if len(tail) < len(text):
        tail = tail.split(maxsplit=1)[-1] if tail.strip() else ""  # the first word may have lost its beginning
    lines = tail.split("\n")
    for index, line in reversed(list(enumerate(lines))):
        is_found, value = read_last_number(without_markup(line))
        if is_found:
            offer = _LINE_OFFERED.match(line)
            before = "\n".join(lines[:index]) if offer is None or offer[1] is None else "0"
            is_offered = (offer is not None and _DIGIT.search(before)) or re.search(r"\bor\W*$", before[-40:])
            return None if is_offered else value
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
