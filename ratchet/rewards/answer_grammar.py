"""Reads the one number that a line of text states, or nothing where it states none or more than one.

A line pays only if everything on it agrees: "72 or 73", "1-2", "3:30" and "48 + 24" state no single number. An
equation states its right-hand side. What is refused costs a reward; what is guessed teaches a policy to hedge.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from ratchet.rewards.numerals import Token, tokenize

_ALTERNATIVES = frozenset({"or", "either", "versus", "vs"})
_RETRACTIONS = frozenset(
    {"maybe", "perhaps", "possibly", "alternatively", "could", "might", "may", "actually"}
    | {"wait", "no", "not", "sorry", "instead", "rather", "correction"}
)
_NEGATIONS = frozenset({"not", "never", "isn't", "aren't", "wasn't"})
_CONNECTORS = frozenset({"or", "and", "to"})
_EXPLANATIONS = frozenset({"because", "since", "which", "where", "given", "as", "by"})
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_GLUED_SCALES = frozenset({"k", "K", "M", "B", "bn", "mn", "mil"})
_NOT_UNITS = frozenset({"e", "x", "b", "o"})
_SIGN_WORDS = frozenset({"minus", "negative"})
_OPERATOR_WORDS = frozenset({"x", "X", "times", "plus", "minus"})
_ARITHMETIC = "+-*/^"

_ACCOUNTING = re.compile(r"\s*(?:\(\s*\$\s?([\d.,]+)\s*\)|\$\s?\(\s*([\d.,]+)\s*\))[\s.]*")


class _Unreadable(Exception):
    """No single number is stated; never leaves this module."""


@dataclass(frozen=True, slots=True)
class _Operand:
    value: Fraction | None
    """None where a number stands that cannot be read as one."""
    first: int
    """Index of the first token, the sign included."""
    after: int
    """Index behind the last token."""


def _is_word(token: Token, words: frozenset[str]) -> bool:
    return token.kind == "word" and token.text.lower() in words


def _is_glued(left: Token, right: Token) -> bool:
    return left.end == right.start


def _quotient(numerator: Fraction, denominator: Fraction | None) -> Fraction | None:
    return numerator / denominator if denominator else None


def _power_of_ten(tokens: Sequence[Token], index: int) -> tuple[Fraction, int] | None:
    """10 ^ k at `index`, and the index behind it."""
    if index + 2 >= len(tokens) or tokens[index].text != "10" or not tokens[index + 1].is_operator("^"):
        return None
    sign, at = 1, index + 2
    if tokens[at].is_operator("+-") and at + 1 < len(tokens):
        sign, at = (-1 if tokens[at].text == "-" else 1), at + 1
    exponent = tokens[at].value
    if exponent is None or exponent.denominator != 1 or exponent > 100:
        return None
    return Fraction(10) ** (sign * int(exponent)), at + 1


def _magnitude(tokens: Sequence[Token], index: int) -> tuple[Fraction | None, int]:
    """Unsigned value whose first numeral is at `index`: fraction, mixed number, power of ten, scale word."""
    value, at = tokens[index].value, index + 1
    if value is None:
        return None, at
    shape = "".join("n" if token.kind == "number" else token.text for token in tokens[at : at + 3])
    power = _power_of_ten(tokens, index)
    if power is not None:
        value, at = power
    elif shape.startswith(("*n", "xn", "Xn")):
        power = _power_of_ten(tokens, at + 1)
        if power is not None:
            value, at = value * power[0], power[1]
    elif shape.startswith("/n"):
        value, at = _quotient(value, tokens[at + 1].value), at + 2
    elif shape == "n/n":
        part = _quotient(tokens[at].value or Fraction(0), tokens[at + 2].value)
        if part is not None and 0 < part < 1 and value.denominator == 1:
            value, at = value + part, at + 3
    if value is not None and at < len(tokens) and tokens[at].kind == "word":
        word = tokens[at].text
        if word.lower() in _SCALES:
            return value * _SCALES[word.lower()], at + 1
        if word in _GLUED_SCALES and _is_glued(tokens[at - 1], tokens[at]):
            return None, at + 1  # 72k: thousand or a unit
    if at + 1 < len(tokens) and tokens[at].is_operator("/") and tokens[at + 1].kind == "number":
        return None, at  # 1/2/2024
    return value, at


def _sign(tokens: Sequence[Token], index: int) -> tuple[int | None, int]:
    """Sign of the number at `index` and the index where it starts; None where it cannot be told or is negated."""
    at = index - 1
    while at >= 0 and (tokens[at].kind in ("currency", "open") or tokens[at].is_operator("*")):
        at -= 1
    if at < 0:
        return 1, index
    token = tokens[at]
    earlier = at - 1
    while earlier >= 0 and tokens[earlier].is_operator("*"):
        earlier -= 1
    before = tokens[earlier] if earlier >= 0 else None
    is_binary = before is not None and before.kind in ("number", "close")
    if _is_word(token, _SIGN_WORDS):
        return (1, index) if is_binary else (-1, at)
    if _is_word(token, _NEGATIONS | {"between"}):
        return None, index
    if not token.is_operator("+-") or is_binary:
        return 1, index
    if before is not None and before.is_operator("+-/^"):
        return None, index
    if before is not None and before.kind == "word" and before.text.lower() not in _CONNECTORS:
        # "is -3" is negative; "covid-19" and "total - 72" could be either.
        is_prefix = not _is_glued(before, token) and _is_glued(token, tokens[at + 1])
        if not is_prefix:
            return None, index
    return (-1 if token.text == "-" else 1), at


def _is_part_of_word(tokens: Sequence[Token], index: int) -> bool:
    """Whether the number at `index` belongs to a name or unit: x1, m2, m^2."""
    at = index - 1
    if at >= 1 and tokens[at].is_operator("+-") and tokens[at - 1].is_operator("^"):
        at -= 1
    if at >= 1 and tokens[at].is_operator("^") and tokens[at - 1].kind in ("word", "close"):
        return True
    before = tokens[index - 1] if index else None
    return (
        before is not None
        and before.kind == "word"
        and _is_glued(before, tokens[index])
        and before.text.lower() not in _CONNECTORS
        and before.text[-1].isascii()  # scripts without spaces put words right before numbers
    )


def _operands(tokens: Sequence[Token]) -> list[_Operand]:
    operands: list[_Operand] = []
    at = 0
    while at < len(tokens):
        if tokens[at].kind != "number":
            at += 1
            continue
        if _is_part_of_word(tokens, at):
            is_unit = tokens[at].text in ("2", "3") and not _is_word(tokens[at - 1], _NOT_UNITS)
            if (
                at >= 2
                and tokens[at - 2].kind == "number"
                and _is_glued(tokens[at - 2], tokens[at - 1])
                and not is_unit
            ):
                operands.append(_Operand(None, at, at + 1))  # 1e5km, 0x1F, 2h30; but 72m2
            at += 1
            continue
        sign, first = _sign(tokens, at)
        value, after = _magnitude(tokens, at)
        operands.append(_Operand(None if value is None or sign is None else sign * value, first, after))
        at = after
    return operands


def _is_expression(tokens: Sequence[Token], left: _Operand, right: _Operand) -> bool:
    """Whether only arithmetic, or a time's or ratio's colon, stands between two operands."""
    between = tokens[left.after : right.first]
    if right.first < len(tokens) and tokens[right.first].is_operator("-+"):
        between = tokens[left.after : right.first + 1]
    if len(between) == 1 and between[0].is_operator(":"):
        return _is_glued(between[0], tokens[right.first])
    arithmetic = [token for token in between if token.is_operator(_ARITHMETIC) or token.text in _OPERATOR_WORDS]
    brackets = [token for token in between if token.kind in ("currency", "open", "close")]
    return bool(arithmetic) and len(arithmetic) + len(brackets) == len(between)


def _has_number(tokens: Sequence[Token]) -> bool:
    return any(token.kind == "number" for token in tokens)


def _single(tokens: Sequence[Token]) -> Fraction:
    """The one value of a segment without '='; equal values may repeat."""
    operands = _operands(tokens)
    values = {operand.value for operand in operands}
    value = values.pop() if len(values) == 1 else None
    if value is None or any(token.kind == "unreadable" for token in tokens):
        raise _Unreadable
    if any(_is_expression(tokens, left, right) for left, right in pairwise(operands)):
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
    is_border = [token.is_operator("=~") for token in tokens]
    is_exact = not any(token.is_operator("~") for token in tokens)
    *others, last = _split(tokens, is_border)
    numeric = [side for side in others if _has_number(side) and not any(token.kind == "word" for token in side)]
    stated = []
    for side in numeric:
        operands = _operands(side)
        if len(operands) == 1 and not any(token.is_operator("/^:") for token in side):
            stated.append(operands[0].value)
    if len(_operands(last)) > 1 and len(stated) == 1 and others and numeric[0] == others[0]:
        value = stated[0]
        if value is None or is_border.count(True) > 1 or any(token.kind == "separator" for token in last):
            raise _Unreadable
        return value
    value = _single(last)
    if is_exact and any(other != value for other in stated):
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
        if has_answer and (token.kind == "end" or _is_word(token, _EXPLANATIONS)):
            return index
    return len(tokens)


def _check_rest(tokens: Sequence[Token]) -> None:
    """Text behind the answer may explain it; it may not offer or retract numbers."""
    if not _has_number(tokens):
        return
    first = next((token for token in tokens if token.kind != "end" and not token.is_operator("*")), None)
    if first is not None and (first.kind in ("number", "currency") or first.is_operator("-+")):
        raise _Unreadable
    if any(_is_word(token, _ALTERNATIVES | _RETRACTIONS) for token in tokens):
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
        if any(_is_word(token, _ALTERNATIVES) for token in tokens[:end]):
            return None
        clause = _without_explained(tokens[:end])
        parts = _split(clause, [token.kind == "separator" or _is_word(token, frozenset({"and"})) for token in clause])
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
        operands = _operands(sentence)
        if operands:
            # Of an equation, only what stands behind its last '=' can be the result.
            equals = [index for index in range(operands[-1].first) if sentence[index].is_operator("=~")]
            stretch = sentence[equals[-1] + 1 :] if equals else sentence
            return True, _last_of(stretch, _operands(stretch))
    return False, None


def _last_of(tokens: Sequence[Token], operands: Sequence[_Operand]) -> Fraction | None:
    last = operands[-1]
    around = tokens[max(last.first - 1, 0) : last.after + 1]
    if any(token.kind == "unreadable" for token in around):
        return None
    if any(_is_word(token, _ALTERNATIVES) for token in tokens[last.after :]):
        return None
    if any(_is_word(token, frozenset({"either", "between"})) for token in tokens[: last.first]):
        return None
    if len(operands) > 1:
        between = tokens[operands[-2].after : last.first]
        is_listed = all(token.kind != "word" or _is_word(token, _CONNECTORS) for token in between)
        is_same = operands[-2].value == last.value
        if _is_expression(tokens, operands[-2], last) or any(_is_word(token, _ALTERNATIVES) for token in between):
            return None
        if is_listed and not is_same:
            return None
    return last.value
