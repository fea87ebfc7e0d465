"""Turns text into tokens with exact numbers, so that a grammar above can tell one answer from two.

The trap: plain NFKC is wrong for grading. It turns "3" + U+00BD (three and a half) into "31/2" and "m" + U+00B2 into
"m2", so characters are folded one by one here: fractions become " 1/2", superscripts become "^2". Every pass is linear,
and numbers of absurd size are refused before they are computed.
"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

MAX_DIGITS: Final = 100
"""Longest numeral, and largest decimal exponent, that is still read as a number."""

GROUP_SPACE: Final = "\u2009"
"""Stands for every space that typesetters put between thousands (no-break, thin, figure)."""

UNREADABLE: Final = "\0"
"""Stands for what changes a number in a way that is not understood here: a root, pi, an inequality."""

_FOLDED: Final[dict[str, str]] = {
    **dict.fromkeys("\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029", "\n"),
    **dict.fromkeys("\u00a0\u2007\u2009\u202f", GROUP_SPACE),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"),
    **dict.fromkeys("\u2014\u2015\u3001", ";"),
    **dict.fromkeys("\u00d7\u22c5\u00b7\u2217\u2062", "*"),
    **dict.fromkeys("\u00f7\u2215\u2044", "/"),
    **dict.fromkeys("\u2192\u21d2\u27f9\u2243\u2245\u2248", "="),
    **dict.fromkeys("\u00b1\u2213\u221a\u221e\u03c0\u2264\u2265\u2260", UNREADABLE),
    "\u066c": ",",
    "\u066b": ".",
    "\u3002": ". ",
    "\u2018": "'",
    "\u2019": "'",
}
_COMPATIBLE: Final = frozenset({"<wide>", "<narrow>", "<small>", "<font>", "<compat>", "<noBreak>", "<vertical>"})
_ASCII_LINE_ENDS: Final = {ord(character): "\n" for character in "\r\x0b\x0c\x1c\x1d\x1e"}


def _fold_character(character: str) -> str:
    if character in _FOLDED:
        return _FOLDED[character]
    if ord(character) < 128:
        return character
    category = unicodedata.category(character)
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if category in ("Sc", "Cf", "Zs"):
        return {"Sc": "$", "Cf": "", "Zs": " "}[category]
    tag, _, _ = unicodedata.decomposition(character).partition(" ")
    if tag == "<fraction>":
        return " " + unicodedata.normalize("NFKC", character).replace("\u2044", "/")
    if tag == "<super>":
        return "^" + unicodedata.normalize("NFKC", character)
    return unicodedata.normalize("NFKC", character) if tag in _COMPATIBLE else character


def fold(text: str) -> str:
    """`text` with digits, signs, spaces, currencies and line ends of all scripts in one spelling, in linear time."""
    text = text.replace("\r\n", "\n")  # one line end, not a blank line
    if text.isascii():
        return text.translate(_ASCII_LINE_ENDS)
    return text.translate({ord(character): _fold_character(character) for character in set(text)})


# No pattern here lets two repeats of the same character meet: that is what makes a regex quadratic.
_ARGUMENT = r"(?:\{ ?(-? ?\$?\d[\d,]*(?:\.\d+)?) ?\}|(\d))"
_FRACTION = re.compile(rf"\\[dtc]?frac ?{_ARGUMENT} ?{_ARGUMENT}")
# In order: later rules rely on what earlier ones have removed. A LaTeX command that no rule knows changes the value in
# a way that is not understood here (\pi, \sqrt, \overline), so it makes its surroundings unreadable.
_MARKUP: Final[list[tuple[re.Pattern[str], str]]] = [
    (re.compile(r"<<[^<>]*>>"), " "),  # GSM8K's calculator annotations: the result follows them
    (re.compile(r"</?\|?[A-Za-z][^<>\n]{0,40}>"), " "),  # HTML, and end-of-text tokens that were decoded
    (re.compile(r"(?<![-=])[-=]+>"), "="),
    (re.compile(r"\\([$%#&_])"), r"\1"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\!"), ""),
    (re.compile(r"(?<=\d)\\,(?=\d)"), GROUP_SPACE),
    (re.compile(r"\^ ?\{? ?\\circ\b ?\}?|\\degree\b"), " "),
    (re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])"), "*"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\\(?:approx|simeq|R?rightarrow|to|implies)(?![A-Za-z])"), "="),
    (re.compile(r"\\sim(?![A-Za-z])"), "~"),
    (re.compile(r"\\(?:text|math|operator)[a-z]*(?![A-Za-z])"), " "),
    (re.compile(r"\\(?:f?boxed|mbox|hbox|left|right|[bB]igg?[lr]?|q?quad|displaystyle|bf|rm)(?![A-Za-z])"), " "),
    (re.compile(r"\\[A-Za-z]+"), UNREADABLE),
    (re.compile(r"[\\{}]"), " "),
]


def _plain_fraction(match: re.Match[str]) -> str:
    # The space before it keeps `1\frac{1}{2}` a mixed number.
    numerator, denominator = match[1] or match[2], match[3] or match[4]
    return f" {numerator}/{denominator} "


def without_markup(text: str) -> str:
    """Folded text without LaTeX, HTML and calculator annotations; a command whose meaning is unknown leaves a NUL."""
    text = _FRACTION.sub(_plain_fraction, text.replace("\\$", "$"))
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return text


_TOKEN: Final = re.compile(
    r"""(?P<number>(?:[1-9]\d{0,2}(?:\u2009\d{3})+(?!\d)(?:\.\d+)?|(?:\d+|(?<![\w.)\]])\.\d+)(?:[.,]\d+)*)
                   (?:[eE][+-]?\d+(?!\w))?)
      | (?P<word>[^\W\d_]+(?:'[^\W\d_]+)?)
      | (?P<operator>[-+*/^=:~])
      | (?P<open>\() | (?P<close>\))
      | (?P<separator>[,;&|])
      | (?P<end>[.!?](?=["')\]*_$]{0,4}(?:\s|$)))
      | (?P<currency>\$)
      | (?P<unreadable>[<>\0])""",
    re.VERBOSE,
)
_NUMERAL: Final = re.compile(
    r"(?P<whole>\d+|[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d{0,2}(?:\u2009\d{3})+)?"
    r"(?:\.(?P<decimals>\d+))?(?:[eE](?P<exponent>[+-]?\d+))?"
)
_CURRENCY_CODES: Final = frozenset({"USD", "US", "EUR", "GBP", "JPY", "INR", "CAD", "AUD", "CHF", "CNY", "RS"})


@dataclass(frozen=True, slots=True)
class Token:
    """One lexeme; `kind` is a group name of the lexer. Example: Token("number", "1,080", Fraction(1080), 5, 10)."""

    kind: str
    text: str
    value: Fraction | None
    """Of a number; None where the numeral cannot be read (1.450.000, 12,34, or longer than MAX_DIGITS)."""
    start: int
    end: int

    def is_operator(self, characters: str) -> bool:
        return self.kind == "operator" and self.text in characters


def read_numeral(text: str) -> Fraction | None:
    """Exact value of one unsigned numeral with optional thousands separators, decimals and exponent, else None.

    A comma separates thousands only where every group after it has three digits; a numeral that only another locale
    could mean (1.450.000, 1,5) is None rather than a guess.
    """
    match = _NUMERAL.fullmatch(text)
    if match is None:
        return None
    whole = (match["whole"] or "").replace(",", "").replace(GROUP_SPACE, "")
    decimals, exponent = match["decimals"] or "", match["exponent"] or "0"
    if not 0 < len(whole) + len(decimals) <= MAX_DIGITS or len(exponent) > 4 or abs(int(exponent)) > MAX_DIGITS:
        return None
    return Fraction(int(whole + decimals)) * Fraction(10) ** (int(exponent) - len(decimals))


def tokenize(text: str) -> list[Token]:
    """Tokens of text that `fold` and `without_markup` have prepared; characters that carry no meaning are left out."""
    tokens = []
    for match in _TOKEN.finditer(text):
        kind, lexeme = str(match.lastgroup), match[0]
        if kind == "word" and lexeme.upper() in _CURRENCY_CODES:
            # "US" and "Rs" are also words; as a currency they are ignored either way.
            kind = "currency"
        value = read_numeral(lexeme) if kind == "number" else None
        tokens.append(Token(kind, lexeme, value, match.start(), match.end()))
    return tokens


def canonical(value: Fraction) -> str:
    """One spelling for each rational: "72", "-3", "0.75", and "1/3" where the decimals do not end."""
    numerator, denominator = value.numerator, value.denominator
    twos = (denominator & -denominator).bit_length() - 1
    rest, fives = denominator >> twos, 0
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    if rest != 1:
        return f"{numerator}/{denominator}"
    places = max(twos, fives)
    if places == 0:
        return str(numerator)
    digits = str(abs(numerator) * 10**places // denominator).rjust(places + 1, "0")
    return f"{'-' if numerator < 0 else ''}{digits[:-places]}.{digits[-places:]}"
