"""Reads the one number that a line of text states, or nothing where it states none or more than one.

A line pays only if everything on it agrees: "72 or 73", "1-2", "3:30" and "48 + 24" state no single number. An
equation states its right-hand side. What is refused costs a reward; what is guessed teaches a policy to hedge.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from ratchet.rewards.numerals import Token, tokenize
from ratchet.rewards.operands import CONNECTORS, Operand, is_expression, is_word, read_operands

_ALTERNATIVES = frozenset({"or", "either", "versus", "vs"})
_DOUBTS = frozenset({"maybe", "perhaps", "possibly", "alternatively", "could", "might"})
_RETRACTIONS = frozenset({"actually", "wait", "no", "not", "sorry", "instead", "rather", "correction"})
_EXPLANATIONS = frozenset({"because", "since", "which", "where", "given", "as", "by"})

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


def _without_explained(tokens: Sequence[Token]) -> list[Token]:
    """Leaves out brackets after the answer that explain it: "72 (48 in April and 24 in May)", but not "72 (73)"."""
    kept: list[Token] = []
    at = 0
    has_answer = False
    while at < len(tokens):
        has_answer = has_answer or tokens[at].kind == "number"
        if tokens[at].kind != "open" or not has_answer:
            kept.append(tokens[at])
            at += 1
            continue
        close = next((index for index in range(at, len(tokens)) if tokens[index].kind == "close"), len(tokens))
        inner = tokens[at + 1 : close]
        count = sum(token.kind == "number" for token in inner)
        starts_with_word = bool(inner) and inner[0].kind == "word"
        has_glue = any(token.kind == "word" or token.is_operator("+*/=") for token in inner)
        if not (count and has_glue and (count > 1 or starts_with_word)):
            kept.extend(inner)
        at = close + 1
    return kept


def _end_of_clause(tokens: Sequence[Token]) -> int:
    """Index where the sentence that states the answer ends, or where its explanation begins."""
    has_answer = False
    for index, token in enumerate(tokens):
        has_answer = has_answer or token.kind == "number"
        if has_answer and (token.kind == "end" or is_word(token, _EXPLANATIONS)):
            return index
    return len(tokens)


def _check_rest(tokens: Sequence[Token]) -> None:
    """Text behind the answer may explain it; it may not offer or retract numbers."""
    if not _has_number(tokens):
        return
    first = next((token for token in tokens if token.kind != "end" and not token.is_operator("*")), None)
    if first is not None and (first.kind in ("number", "currency") or first.is_operator("-+")):
        raise _Unreadable
    if any(is_word(token, _ALTERNATIVES | _DOUBTS | _RETRACTIONS) for token in tokens):
        raise _Unreadable


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
    try:
        _check_rest(tokens[end:])
        if any(is_word(token, _ALTERNATIVES) for token in tokens[:end]):
            return None
        clause = _without_explained(tokens[:end])
        parts = _split(clause, [token.kind == "separator" or is_word(token, frozenset({"and"})) for token in clause])
        values = {_equation(part) for part in parts if _has_number(part)}
    except _Unreadable:
        return None
    return values.pop() if len(values) == 1 else None


def read_last_number(text: str) -> tuple[bool, Fraction | None]:
    """The last number of prose: (whether `text` holds one at all, its value or None where it is hedged).

    Numbers that lead up to it are allowed ("48 in April and 24 in May make 72"), direct neighbours are not ("72 or
    73", "between 3 and 4", "72, 73").
    """
    tokens = tokenize(text)
    sentences = _split(tokens, [token.kind == "end" for token in tokens])
    for sentence in reversed(sentences):
        operands = read_operands(sentence)
        if operands:
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
    if any(is_word(token, _ALTERNATIVES) for token in tokens[last.after :]):
        return None
    if any(is_word(token, frozenset({"either", "between"})) for token in tokens[: last.first]):
        return None
    if len(operands) > 1:
        between = tokens[operands[-2].after : last.first]
        is_listed = all(token.kind != "word" or is_word(token, CONNECTORS) for token in between)
        is_same = operands[-2].value == last.value
        if is_expression(tokens, operands[-2], last) or any(
            is_word(token, _ALTERNATIVES | _DOUBTS) for token in between
        ):
            return None
        if is_listed and not is_same:
            return None
    return last.value
