"""Reads the one number that a line of text states, or nothing where it states none or more than one.

A line pays only if everything on it agrees: "72 or 73", "1-2", "3:30" and "48 + 24" state no single number. An
equation states its right-hand side. What is refused costs a reward; what is guessed teaches a policy to hedge. Doubt
alone is no hedge: "72?" and "maybe 72" name one number and state it. "either 72" and "not 72" do not.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from ratchet.rewards.asides import (
    ALTERNATIVES,
    HEDGES,
    REASONS,
    doubts_in_words,
    leaves_answer,
    sounds_like_another_answer,
    without_references,
)
from ratchet.rewards.numerals import Token, tokenize
from ratchet.rewards.operands import CONNECTORS, Operand, is_expression, is_word, read_operands

_DOUBTS = frozenset({"maybe", "perhaps", "possibly", "alternatively", "could", "might"})
_EXPLANATIONS = REASONS | {"which", "where", "as", "by"}
_NEW_TASK = re.compile(r"\W*(?:question|problem|exercise|example|task|q|human|user|input|instruction)\b", re.IGNORECASE)

_ACCOUNTING = re.compile(r"\s*(?:\(\s*\$\s?([\d.,]+)\s*\)|\$\s?\(\s*([\d.,]+)\s*\))[\s.]*")


class _Unreadable(Exception):
    """No single number is stated; never leaves this module."""


def _has_number(tokens: Sequence[Token]) -> bool:
    return any(token.kind == "number" for token in tokens)


def _single(tokens: Sequence[Token]) -> Fraction:
    """The one value of a segment without '='; equal values may repeat."""
    operands = read_operands(tokens)
    values = {operand.value for operand in operands}
    value = values.pop() if len(values) == 1 else None
    if value is None or any(token.kind == "unreadable" for token in tokens):
        raise _Unreadable
    if any(is_expression(tokens, left, right) for left, right in pairwise(operands)):
        raise _Unreadable
    return value


def _split(tokens: Sequence[Token], is_border: Sequence[bool]) -> list[list[Token]]:
    parts: list[list[Token]] = [[]]
    for token, border in zip(tokens, is_border, strict=True):
        if border:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _equation(tokens: Sequence[Token]) -> Fraction:
    """Right-hand side of the last '='; "72 = 48 + 24" is its left-hand side; "72 = 73" is unreadable."""
    is_border = [token.is_operator("=") for token in tokens]
    *others, last = _split(tokens, is_border)
    numeric = [side for side in others if _has_number(side) and not any(token.kind == "word" for token in side)]
    stated = []
    for side in numeric:
        operands = read_operands(side)
        if len(operands) == 1 and not any(token.is_operator("/^:") for token in side):
            stated.append(operands[0].value)
    if len(read_operands(last)) > 1 and len(stated) == 1 and others and numeric[0] == others[0]:
        value = stated[0]
        if value is None or is_border.count(True) > 1 or any(token.kind == "separator" for token in last):
            raise _Unreadable
        return value
    value = _single(last)
    if any(other != value for other in stated):
        raise _Unreadable
    return value


def _without_brackets(tokens: Sequence[Token]) -> tuple[list[Token], list[list[Token]]]:
    """The tokens without the brackets that stand behind the answer, and what is in each of those brackets."""
    kept: list[Token] = []
    asides: list[list[Token]] = []
    # Of an equation, brackets before the last "=" are factors: "5(2) = 10"; but not of one that is in brackets itself.
    depth = answer = 0
    for index, token in enumerate(tokens):
        depth = max(depth + (token.kind == "open") - (token.kind == "close"), 0)
        if depth == 0 and token.is_operator("="):
            answer = index
    has_answer = False
    at = 0
    while at < len(tokens):
        has_answer = has_answer or (at >= answer and tokens[at].kind == "number")
        if tokens[at].kind != "open" or not has_answer:
            kept.append(tokens[at])
            at += 1
            continue
        close = next((index for index in range(at, len(tokens)) if tokens[index].kind == "close"), len(tokens))
        asides.append(list(tokens[at + 1 : close]))
        at = close + 1
    return kept, asides


def _end_of_clause(tokens: Sequence[Token]) -> int:
    """Index where the sentence that states the answer ends, or where its explanation begins."""
    has_answer = False
    for index, token in enumerate(tokens):
        has_answer = has_answer or token.kind == "number"
        if has_answer and (token.kind == "end" or is_word(token, _EXPLANATIONS)):
            return index
    return len(tokens)


def _is_doubtful(clause: Sequence[Token]) -> bool:
    """Whether the clause offers alternatives, or doubts or retracts one of several numbers."""
    if any(is_word(token, ALTERNATIVES) for token in clause) or doubts_in_words(clause):
        return True
    values = {operand.value for operand in read_operands(clause)}
    return len(values) > 1 and any(is_word(token, HEDGES) for token in clause)


def read_answer(text: str) -> Fraction | None:
    """The number that an answer line states, else None; `text` is folded, without markup, and one line.

    Units, currencies, labels and explanations are allowed around it. Values that are listed ("72, 73"), offered ("72
    or 73"), ranged ("1-2"), left uncomputed ("48 + 24") or told as a time or ratio ("3:30") are None, and so are words.
    """
    accounting = _ACCOUNTING.fullmatch(text)
    if accounting is not None:
        text = f"-{accounting[1] or accounting[2]}"
    tokens = tokenize(text)
    end = _end_of_clause(tokens)
    if _is_doubtful(tokens[:end]):
        return None
    clause, asides = _without_brackets(tokens[:end])
    clause = without_references(clause, is_answer_inside=True)
    try:
        parts = _split(clause, [token.kind == "separator" or is_word(token, frozenset({"and"})) for token in clause])
        values = {_equation(part) for part in parts if _has_number(part)}
    except _Unreadable:
        return None
    value = values.pop() if len(values) == 1 else None
    is_left = value is not None and all(leaves_answer(aside, value) for aside in (*asides, tokens[end:]))
    return value if is_left else None


def is_contradicted_by(text: str, value: Fraction, *, is_new_paragraph: bool = False) -> bool:
    """Whether what follows the answer `value` names another number without explaining it; `text` as in `read_answer`.

    The next question, which base models make up, says nothing about the answer. A new paragraph counts only where it
    turns back to the answer ("Wait, 73").
    """
    tokens = tokenize(text)
    if _NEW_TASK.match(text) or (is_new_paragraph and not sounds_like_another_answer(tokens)):
        return False
    return not leaves_answer(tokens, value)


def read_last_number(text: str) -> tuple[bool, Fraction | None]:
    """The last number of prose: (whether `text` holds one at all, its value or None where it is hedged).

    Numbers that lead up to it are allowed ("48 in April and 24 in May make 72"), direct neighbours are not ("72 or
    73", "between 3 and 4", "72, 73").
    """
    tokens = tokenize(text)
    sentences = _split(tokens, [token.kind == "end" for token in tokens])
    for index, sentence in reversed(list(enumerate(sentences))):
        operands = read_operands(sentence)
        if operands:
            if is_word(sentence[0], _DOUBTS) and any(read_operands(earlier) for earlier in sentences[:index]):
                return True, None  # "It is 72. Maybe 73."
            # Of an equation, only what stands behind its last '=' can be the result.
            equals = [index for index in range(operands[-1].first) if sentence[index].is_operator("=")]
            stretch = sentence[equals[-1] + 1 :] if equals else sentence
            return True, _last_of(stretch, read_operands(stretch))
    return False, None


def _last_of(tokens: Sequence[Token], operands: Sequence[Operand]) -> Fraction | None:
    last = operands[-1]
    around = tokens[max(last.first - 1, 0) : last.after + 1]
    if any(token.kind == "unreadable" for token in around):
        return None
    if any(is_word(token, ALTERNATIVES) for token in tokens[last.after :]):
        return None
    if any(is_word(token, frozenset({"either", "between"})) for token in tokens[: last.first]):
        return None
    if len(operands) > 1:
        between = tokens[operands[-2].after : last.first]
        is_listed = all(token.kind != "word" or is_word(token, CONNECTORS) for token in between)
        is_same = operands[-2].value == last.value
        if is_expression(tokens, operands[-2], last) or any(
            is_word(token, ALTERNATIVES | _DOUBTS) for token in between
        ):
            return None
        if is_listed and not is_same:
            return None
    return last.value
