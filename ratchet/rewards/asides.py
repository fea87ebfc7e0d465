"""Judges what stands behind an answer: whether it explains the number or offers another one.

The trap: hedges cannot be listed ("make that 73", "73 works too"), explanations can. So another number is harmless only
where it is recognised as part of an explanation, and everything else makes the answer ambiguous:

- an equation that ends in the answer, or that starts with it: "48 + 24 = 72", "(= 48 + 24)", "72 = 48 + 24"
- a sum, or numbers whose sum, difference, product or quotient is the answer: "(48 in April and 24 in May)"
- a reason behind "because", "since" or "given"
- prose whose last number is the answer again: "She sold 48 and then 24, so 72"
- what the answer refers to: "18 dollars in 2 days", "30 years old in 5 years", but not "72 dollars in 73 dollars"
- up to ten steps, times or decimal places: "That took 3 steps"

None of these holds in a sentence with a word of doubt or retraction.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import prod

from ratchet.rewards.numerals import Token
from ratchet.rewards.operands import CONNECTORS, Operand, is_expression, is_word, read_operands


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ALTERNATIVES = frozenset({"or", "either", "versus", "vs"})
_CHANGES = _words(
    "maybe perhaps possibly alternatively alternative actually wait sorry instead correction corrected wrong incorrect "
    "mistake mistaken oops scratch nope"
)
HEDGES = _CHANGES | _words("probably likely could might guess unsure otherwise no not never rather hmm hm")
"""Words of doubt and retraction. "may" is a month more often than a doubt."""
REASONS = frozenset({"because", "since", "given"})
_NUMBER_WORDS = _words(
    "zero two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million"
)
_COUNTED = _words("step steps time times way ways place places decimal decimals digit digits method methods")
_REFERENCES = frozenset({"in", "after", "within", "during", "per", "every"})
_REFERENCES_OF_UNITS = _REFERENCES | {"for"}
_SUBJECTS = _words("it that this which answer result total value number one should would must correct")
_COPULAS = frozenset({"is", "was", "be", "equals", "it's", "that's", "makes", "becomes"})


def doubts_in_words(tokens: Sequence[Token]) -> bool:
    """Whether doubt and a number that is written out meet: "maybe seventy-three"."""
    return any(is_word(token, HEDGES | ALTERNATIVES) for token in tokens) and any(
        is_word(token, _NUMBER_WORDS) for token in tokens
    )


def _unit_before(tokens: Sequence[Token], index: int) -> tuple[int, tuple[str, ...]]:
    """Index of the first word of the unit that ends before `index`, and its at most three words."""
    start = index
    while start > 0 and tokens[start - 1].kind == "word" and index - start < 3:
        start -= 1
    return start, tuple(token.text.lower() for token in tokens[start:index])


def without_references(tokens: Sequence[Token], *, is_answer_inside: bool) -> list[Token]:
    """Leaves out what the answer refers to: "in 2 days" of "18 dollars in 2 days".

    The number must have a noun. Where the answer is among the tokens it must have a unit, and another one, so that "72
    clips in 73 clips" and "72 for 73" stay whole.
    """
    kept = list(tokens)
    for operand in reversed(read_operands(tokens)):
        at, after = operand.first - 1, operand.after
        if at < 0 or after >= len(tokens) or tokens[after].kind != "word" or operand.value is None:
            continue
        if not is_word(tokens[at], _REFERENCES_OF_UNITS if is_answer_inside else _REFERENCES):
            continue
        start, unit = _unit_before(tokens, at)
        if any(word in _REFERENCES_OF_UNITS | HEDGES | ALTERNATIVES for word in unit):
            continue
        if unit and unit == tuple(token.text.lower() for token in tokens[after : after + len(unit)]):
            continue
        if is_answer_inside:
            has_currency = start > 1 and tokens[start - 2].kind == "currency"
            is_answer = start > 0 and tokens[start - 1].kind in ("number", "close", "currency")
            if not is_answer or not (unit or has_currency):
                continue
        del kept[at : after + 1]
    return kept


def _is_sum(tokens: Sequence[Token], operands: Sequence[Operand]) -> bool:
    """Whether nothing but arithmetic stands between the numbers."""
    return len(operands) > 1 and all(is_expression(tokens, left, right) for left, right in pairwise(operands))


def _equation_gives(tokens: Sequence[Token], value: Fraction) -> bool:
    sides: list[list[Token]] = [[]]
    for token in tokens:
        if token.is_operator("="):
            sides.append([])
        else:
            sides[-1].append(token)
    first, last = read_operands(sides[0]), read_operands(sides[-1])
    is_stated = (
        len(first) == 1
        and len(sides[0]) - first[0].after <= 1  # not of "dividing by 3 gives p = 72"
        and not any(token.is_operator("*/^:~") for token in sides[0])
    )
    if len(sides) > 1 and len(last) > 1:
        # "120/24 = 5 hours for 120 pages": the end only repeats what went into the equation.
        used = {token.value for side in sides[:-1] for token in side}
        if last[0].value == value and all(each.value in used for each in last[1:]) and not _is_sum(sides[-1], last):
            return True
    if len(last) == 1:
        # "73 = 72" offers both.
        return last[0].value == value and not (len(sides) == 2 and is_stated and first[0].value != value)
    return _is_sum(sides[-1], last) and (not first or (is_stated and first[0].value == value))


def _makes(operands: Sequence[Operand], value: Fraction) -> bool:
    """Whether the numbers give `value` by one operation: (48 in April and 24 in May) make 72."""
    values = [operand.value for operand in operands if operand.value is not None]
    if len(values) != len(operands) or not 1 < len(values) <= 16:
        return False
    left, right = values[0], values[1]
    pairs = {abs(left - right), left / right if right else None, right / left if left else None}
    return value in (sum(values), prod(values)) or (len(values) == 2 and value in pairs)


def _is_count(tokens: Sequence[Token], operand: Operand) -> bool:
    return (
        operand.value is not None
        and 0 < operand.value <= 10
        and operand.first > 0
        and operand.after < len(tokens)
        and is_word(tokens[operand.after], _COUNTED)
    )


def _is_statement(tokens: Sequence[Token], operand: Operand) -> bool:
    """Whether the number is said to be something: "it is 73", "the answer should be 73"; but not "it is 48 + 24"."""
    at = operand.first - 1
    while at >= 0 and (tokens[at].kind in ("currency", "open") or tokens[at].is_operator("*:")):
        at -= 1
    is_computed = operand.after < len(tokens) and tokens[operand.after].is_operator("+*/-")
    if at < 0 or is_computed or not is_word(tokens[at], _COPULAS):
        return False
    return "'" in tokens[at].text or any(is_word(token, _SUBJECTS) for token in tokens[max(at - 3, 0) : at])


def _is_harmless(tokens: Sequence[Token], value: Fraction) -> bool:
    tokens = without_references(tokens, is_answer_inside=False)
    tokens = without_references(tokens, is_answer_inside=True)
    operands = read_operands(tokens)
    others = [operand for operand in operands if operand.value != value and not _is_count(tokens, operand)]
    first = next((token for token in tokens if not token.is_operator("*:") and token.kind != "separator"), None)
    if not others:
        return not doubts_in_words(tokens) and (first is None or not is_word(first, frozenset({"or"})))
    if first is None or any(token.kind == "unreadable" or is_word(token, HEDGES | ALTERNATIVES) for token in tokens):
        return False
    if any(token.is_operator("=") for token in tokens):
        return _equation_gives(tokens, value)
    if is_word(first, CONNECTORS):
        return False
    if _makes(operands, value):
        return True
    if _is_sum(tokens, operands):
        return any(token.is_operator("+*") or is_word(token, frozenset({"x", "times"})) for token in tokens)
    last = operands[-1]
    if last.value == value:
        between = tokens[operands[-2].after : last.first] if len(operands) > 1 else []
        return any(token.kind == "word" and not is_word(token, CONNECTORS) for token in between)
    reasons = [index for index in range(others[0].first) if is_word(tokens[index], REASONS)]
    is_bare = bool(reasons) and reasons[-1] + 1 == others[0].first and len(others) == 1
    return bool(reasons) and not is_bare and not any(_is_statement(tokens, operand) for operand in others)


def _sentences(tokens: Sequence[Token]) -> list[list[Token]]:
    sentences: list[list[Token]] = [[]]
    for token in tokens:
        if token.kind == "end":
            sentences.append([])
        else:
            sentences[-1].append(token)
    return sentences


def leaves_answer(tokens: Sequence[Token], value: Fraction) -> bool:
    """Whether `value` is still the one answer after what these tokens add to it, sentence by sentence."""
    return all(_is_harmless(sentence, value) for sentence in _sentences(tokens))


def sounds_like_another_answer(tokens: Sequence[Token]) -> bool:
    """Whether a new paragraph turns back to the answer: "Wait, 73", "It is 73", "73", and not "Tom has 5 apples"."""
    first = _sentences(tokens)[0]
    lead = next((token for token in first if token.kind != "separator" and not token.is_operator("*:")), None)
    if lead is None or lead.kind in ("number", "currency") or lead.is_operator("-+="):
        return len(first) <= 4  # "73 clips in all", but not "5 squirrels collected 575 acorns"
    if is_word(lead, HEDGES | {"or", "and"}) or any(is_word(token, _CHANGES) for token in first[:4]):
        return True
    has_second_thought = is_word(lead, frozenset({"i"})) and any(
        is_word(token, frozenset({"mean", "meant", "think"})) for token in first[:3]
    )
    is_short = len(first) <= 10  # "It is 73", but not "There is a rectangle that is 4 inches wide"
    return has_second_thought or (is_short and any(_is_statement(first, operand) for operand in read_operands(first)))
