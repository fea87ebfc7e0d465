"""Reads signed values out of tokens: fractions, mixed numbers, powers of ten, scale words; not what they add up to.

Scale words multiply: "2 dozen" is 24, "1.5 million" 1,500,000, "2 hundred thousand" 200,000, plurals the same.

The trap: a digit may belong to a name or unit (x1, m2), and a hyphen may be a minus, a range or a dash. An operand that
cannot be told is kept with the value None, so that the grammar above can refuse the line instead of misreading it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ratchet.rewards.numerals import Token

_NEGATIONS = frozenset({"not", "never", "isn't", "aren't", "wasn't"})
CONNECTORS = frozenset({"or", "and", "to"})
_SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MAX_SCALES = 3
_GLUED_SCALES = frozenset({"k", "K", "M", "B", "bn", "mn", "mil"})
_NOT_UNITS = frozenset({"e", "x", "b", "o"})
_SIGN_WORDS = frozenset({"minus", "negative"})
_OPERATOR_WORDS = frozenset({"x", "X", "times", "plus", "minus"})
_ARITHMETIC = "+-*/^~"


@dataclass(frozen=True, slots=True)
class Operand:
    """A number in its tokens. Example: of "is -3", Operand(Fraction(-3), first=1, after=3)."""

    value: Fraction | None
    """None where a number stands that cannot be read as one."""
    first: int
    """Index of the first token, the sign included."""
    after: int
    """Index behind the last token."""


def is_word(token: Token, words: frozenset[str]) -> bool:
    """Whether `token` is one of these lower-case words, however it is capitalised."""
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
    unscaled = at
    while value is not None and at < len(tokens) and tokens[at].kind == "word":
        scale = _SCALES.get(tokens[at].text.lower().removesuffix("s"))
        if scale is None:
            break
        value, at = value * scale if at - unscaled < _MAX_SCALES else None, at + 1
    if at < len(tokens) and tokens[at].text in _GLUED_SCALES and _is_glued(tokens[at - 1], tokens[at]):
        return None, at + 1  # 72k: thousand or a unit
    if at > unscaled:
        return value, at
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
    if is_word(token, _SIGN_WORDS):
        return (1, index) if is_binary else (-1, at)
    if is_word(token, _NEGATIONS | {"between"}):
        return None, index
    if not token.is_operator("+-") or is_binary:
        return 1, index
    if before is not None and before.is_operator("+-/^"):
        return None, index
    if before is not None and before.kind == "word" and before.text.lower() not in CONNECTORS:
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
        and before.text.lower() not in CONNECTORS
        and not (before.text in ("x", "X") and index > 1 and tokens[index - 2].kind == "number")  # 72 x73
        and before.text[-1].isascii()  # scripts without spaces put words right before numbers
    )


def read_operands(tokens: Sequence[Token]) -> list[Operand]:
    """Every number of `tokens`, in order; numbers that belong to names and units are left out."""
    operands: list[Operand] = []
    at = 0
    while at < len(tokens):
        if tokens[at].kind != "number":
            at += 1
            continue
        if _is_part_of_word(tokens, at):
            is_unit = tokens[at].text in ("2", "3") and not is_word(tokens[at - 1], _NOT_UNITS)
            if (
                at >= 2
                and tokens[at - 2].kind == "number"
                and _is_glued(tokens[at - 2], tokens[at - 1])
                and not is_unit
            ):
                operands.append(Operand(None, at, at + 1))  # 1e5km, 0x1F, 2h30; but 72m2
            at += 1
            continue
        sign, first = _sign(tokens, at)
        value, after = _magnitude(tokens, at)
        operands.append(Operand(None if value is None or sign is None else sign * value, first, after))
        at = after
    return operands


def is_expression(tokens: Sequence[Token], left: Operand, right: Operand) -> bool:
    """Whether only arithmetic, or a time's or ratio's colon, stands between two operands."""
    between = tokens[left.after : right.first]
    if right.first < len(tokens) and tokens[right.first].is_operator("-+"):
        between = tokens[left.after : right.first + 1]
    if len(between) == 1 and between[0].is_operator(":"):
        return _is_glued(between[0], tokens[right.first])
    arithmetic = [token for token in between if token.is_operator(_ARITHMETIC) or token.text in _OPERATOR_WORDS]
    brackets = [token for token in between if token.kind in ("currency", "open", "close")]
    return bool(arithmetic) and len(arithmetic) + len(brackets) == len(between)
