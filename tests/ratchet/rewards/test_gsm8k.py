"""The GSM8K grader: what it reads, what it refuses to read, and that hedging never pays."""

import json
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.errors import DataError
from ratchet.rewards.gsm8k import Grade, extract, grade, ground_truth_value
from ratchet.rewards.numerals import canonical

NBSP, THIN, NARROW = "\u00a0", "\u2009", "\u202f"
MINUS, EN_DASH = "\u2212", "\u2013"


def read(completion: str) -> str | None:
    value = extract(completion)
    return None if value is None else canonical(value)


READ = {
    # numerals
    "72": "72",
    "1,234,567.89": "1234567.89",
    "0.10": "0.1",
    ".5": "0.5",
    "-.5": "-0.5",
    "+5": "5",
    "-0": "0",
    "1e3": "1000",
    "7.2x10^1": "72",
    r"$7.2 \times 10^{1}$": "72",
    "10\u00b3": "1000",
    f"1{NARROW}080": "1080",
    f"1{NBSP}080": "1080",
    f"1{THIN}080{THIN}500": "1080500",
    r"1{,}080": "1080",
    r"1,\!080": "1080",
    r"1\,080": "1080",
    "\u0667\u0662": "72",
    "\U0001d7d5\U0001d7d0": "72",
    "7\u200b2": "72",
    # scale words multiply
    "1.5 million": "1500000",
    "2 dozen": "24",
    "2 dozens of eggs": "24",
    "3 hundred": "300",
    "2 hundred thousand": "200000",
    "$1.5 Million": "1500000",
    "1/2 dozen": "6",
    # fractions
    "3/4": "0.75",
    "3 / 4": "0.75",
    "1/3": "1/3",
    "1 1/2": "1.5",
    "-1 1/2": "-1.5",
    "\u00bd": "0.5",
    "3\u00bd cups": "3.5",
    r"\frac{3}{4}": "0.75",
    r"$-\dfrac{3}{4}$": "-0.75",
    r"1\frac{1}{2}": "1.5",
    r"\frac34": "0.75",
    # signs and currencies
    "- 5": "-5",
    f"{MINUS}$1,000": "-1000",
    "$-3": "-3",
    "-\u20ac72": "-72",
    "($3)": "-3",
    "(72)": "72",
    "negative 5": "-5",
    "-(1/2)": "-0.5",
    "USD72": "72",
    "Rs.72": "72",
    "US$ 72": "72",
    "72 \u20ac": "72",
    r"\$72": "72",
    # units
    "72km": "72",
    "72 m\u00b2": "72",
    "72m2": "72",
    "72/hour": "72",
    "-5\u00b0C": "-5",
    "72nd": "72",
    "120-page": "120",
    r"72\text{ km/h}": "72",
    r"72\%": "72",
    # labels, markup, equations, explanations
    "x = 72": "72",
    "x=-3": "-3",
    "Answer: 72": "72",
    "The answer is $72.00.": "72",
    "Natalia sold 72 clips altogether in April and May": "72",
    r"\boxed{72}": "72",
    r"\[ \mathbf{72} \]": "72",
    "**-3**": "-3",
    "`72`": "72",
    "72<|im_end|>": "72",
    "48/2 = 24": "24",
    "48/2 = <<48/2=24>>24 clips": "24",
    "72 = 48 + 24": "72",
    r"10/3 \approx 3.33": "3.33",
    "3/4 = 0.75": "0.75",
    "1 hour = 60 minutes": "60",
    "about 72": "72",
    "~72": "72",
    "\u2248 72": "72",
    "72 (48 in April and 24 in May)": "72",
    "72 because 48 + 24 = 72": "72",
    "72. This is because 48 + 24 = 72.": "72",
    "72 ####": "72",
}

REFUSED = [
    "72 or 73",
    "72 and 73",
    "72, 73",
    "72,73",
    "72;73",
    "72|73",
    "72or73",
    "72-73",
    f"72{EN_DASH}73",
    "72 - 73",
    "72 to 75",
    "between 3 and 4",
    "either 72",
    "72 or seventy-three",
    "72 (or 73)",
    "72 (73)",
    "72 clips or 73 clips",
    "72. Or maybe 73.",
    "72. 73",
    "72 73",
    "72 = 73",
    "72~73",
    r"72 \approx 73",
    "72\nor 73",
    "$72,000-$75,000",
    r"72 \text{ or } 73",
    "\u00b15",
    "72 \u00b1 1",
    "not 72",
    "x > 72",
    "12,34",
    "1,0000",
    "0,123",
    "1.234,50",
    "1 080",
    "1 000",
    "3:30",
    "5 hours 30 minutes",
    "2024-01-05",
    "1/2/2024",
    "1/0",
    "48 + 24",
    "2(36)",
    "2^5",
    r"9\pi",
    "9\u03c0",
    r"\sqrt{2}",
    r"0.\overline{3}",
    "72k",
    "1e5km",
    "0x1F",
    "--5",
    "COVID-19",
    "seventy-two",
    "none",
    "$",
]


@pytest.mark.parametrize(("line", "value"), READ.items())
def test_an_answer_line_states_its_number(line: str, value: str) -> None:
    assert read(f"Some work with 5 and 6.\n#### {line}\nThat took 3 steps.") == value


@pytest.mark.parametrize("line", REFUSED)
def test_a_line_without_a_single_number_is_unparseable(line: str) -> None:
    assert grade(f"So it is 72.\n#### {line}", "72") == Grade(0.0, None, False)


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("####\n\n**72**", "72"),
        ("#### Final Answer:\n\\boxed{72}", "72"),
        ("####\nI used 2 steps.", None),
        ("72\n####", None),
        ("72\n#### I do not know\n72", None),
        ("#### 72 or #### 73", None),
        ("#### 18\n\nQuestion 2\n#### 20", "20"),
        ("\uff03\uff03\uff03\uff03 \uff17\uff12", "72"),
        ("#### 72\r\nbye", "72"),
        ("#### 72\r\nor 73", None),
        ("#### 72\u2028bye", "72"),
        ("#### 72\u2028or 73", None),
    ],
)
def test_the_last_marker_is_a_promise(completion: str, value: str | None) -> None:
    assert read(completion) == value


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        (r"\boxed{\boxed{72}}", "72"),
        (r"$\boxed{\frac{1}{3}}$", "1/3"),
        (r"\boxed{x = 72\text{ clips}}.", "72"),
        (r"\boxed{20}. Wait: \boxed{18}.", "18"),
        (r"\boxed{72} or \boxed{73}", None),
        (r"\boxed{72}, \boxed{73}", None),
        (r"\boxed{72} or 73", None),
        (r"72 or \boxed{73}", None),
        (r"-\boxed{72}", None),
        (r"\boxed{9}\pi", None),
        (r"The answer is 7. \boxed{72", None),
        (r"\boxed{}", None),
        ("**Answer:** 72\nI checked 3 times.", "72"),
        ("The answer is:\n\n$72", "72"),
        ("The answer is -3", "-3"),
        ("<answer>72</answer>", "72"),
        ("The answer is 72 or 73.", None),
        ("The answer is 72 or the answer is 73.", None),
        ("The answer is 72, not 73.", None),
        ("The answer isn't 72", None),
        ("The answer is obtained by adding 48 and 24.\nSo she sold 72 clips.", "72"),
        ("I don't know what the answer is.", None),
        ("She sold 48 in April and 24 in May for a total of 72 clips.", "72"),
        ("48 + 24 = 72", "72"),
        ("It took 72 minutes. That is version x1.", "72"),
        ("It was 72 or 73", None),
        ("between 3 and 4", None),
        ("1-2", None),
        ("He leaves at 3:30", None),
        ("Total: 1.450.000", None),
        ("\u7b54\u6848\u662f72", "72"),
    ],
)
def test_without_a_marker_the_box_then_the_phrase_then_the_last_number_counts(
    completion: str, value: str | None
) -> None:
    assert read(completion) == value


def test_every_case_of_the_open_table_is_graded_as_wanted(shared: Path) -> None:
    for case in json.loads((shared / "fixtures/r1_gsm8k_formats.json").read_text()):
        result = grade(case["completion"], case["gold"])
        wanted = Grade(case["want_reward"], case["want_parsed"], case["want_parsed"] is not None)
        assert (case["id"], result) == (case["id"], wanted)
        assert grade(case["completion"], case["gold"], "strict").reward == case["verl_strict"], case["id"]
        assert grade(case["completion"], case["gold"], "flexible").reward == case["verl_flexible"], case["id"]


def test_every_reference_answer_of_gsm8k_scores_one(shared: Path) -> None:
    count = 0
    for split in ("train", "test"):
        for line in (shared / f"data/gsm8k/{split}.jsonl").read_text(encoding="utf-8").split("\n")[:-1]:
            answer = json.loads(line)["answer"]
            gold = re.split("#### ", answer)[1]
            assert grade(answer, gold.replace(",", "")).reward == 1.0, answer
            assert grade(f"The answer is {gold}.", answer).reward == 1.0, answer
            count += 1
    assert count == 8792


# Measured on verl 0.9.1's gsm8k.compute_score.
STRICT_ONE = [
    ("#### 72", "72"),
    ("#### 72 dollars", "72"),
    ("#### 72,", "72"),
    ("##### 72", "72"),
    ("#### 50%", "50"),
    ("#### 1,234", "1234"),
    ("#### 10\n#### 72", "72"),
    ("#### 3:30", "3"),
    ("#### .", "."),
]
STRICT_ZERO = [
    ("####72", "72"),
    ("####  72", "72"),
    ("#### $72", "72"),
    ("#### **72**", "72"),
    (r"#### \boxed{72}", "72"),
    ("#### 72.", "72"),
    ("#### 72.0", "72"),
    ("#### 072", "72"),
    ("#### - 5", "-5"),
    (f"#### {MINUS}5", "-5"),
    ("#### 1e3", "1000"),
    ("#### .5", "0.5"),
    ("#### 72\nWait, #### 10", "72"),
    ("#### \uff17\uff12", "72"),
    ("#### 72" + " " * 300, "72"),
    ("The answer is 72", "72"),
    ("#### 1,234", "1,234"),
]


def test_strict_mode_is_verl_s() -> None:
    assert [grade(*case, "strict").reward for case in STRICT_ONE] == [1.0] * len(STRICT_ONE)
    assert [grade(*case, "strict").reward for case in STRICT_ZERO] == [0.0] * len(STRICT_ZERO)


def test_flexible_mode_is_verl_s() -> None:
    for completion in ("####72", "$72", "**72**", "so 72 it is", "#### 72 ."):
        assert grade(completion, "72", "flexible").reward == 1.0
    assert grade("1,234", "1234", "flexible") == Grade(0.0, "1,234", True)
    assert grade("72,", "72", "flexible") == Grade(0.0, "72,", True)
    assert grade("nothing", "72", "flexible") == Grade(0.0, None, False)
    assert grade(" . ", ".", "flexible").reward == 1.0


def test_wrong_and_unparseable_are_told_apart() -> None:
    assert grade("#### 20", "18") == Grade(0.0, "20", True)
    assert grade("#### none", "18") == Grade(0.0, None, False)


def test_comparison_is_exact() -> None:
    assert grade("#### 0.1", "1/10").reward == 1.0
    assert grade("#### 0.3333333333333333", "1/3").reward == 0.0
    assert grade("#### 9007199254740993", "9007199254740992").reward == 0.0


@pytest.mark.parametrize("truth", ["72", "72.0", " 72 ", "$72", 72, 72.0, "48+24 = 72\n#### 72"])
def test_ground_truths_are_coerced(truth: object) -> None:
    assert ground_truth_value(truth) == 72


@pytest.mark.parametrize("truth", [None, "", "many", "72 or 73", float("nan"), float("inf"), True, ["72"]])
def test_a_ground_truth_that_is_no_number_raises(truth: object) -> None:
    with pytest.raises(DataError, match="ground truth"):
        grade("#### 72", truth)  # type: ignore[arg-type]


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="default, strict, flexible"):
        grade("#### 72", "72", "lenient")  # type: ignore[arg-type]


ABSURD = {
    "digits": "#### " + "9" * 100_000,
    "exponent": "#### 1e999999999",
    "letters": "a" * 1_000_000,
    "blanks": "#### " + " " * 1_000_000 + "72",
    "markers": "#### " * 200_000,
    "hashes": "#" * 1_000_000,
    "cues": "the answer is 7 " * 60_000,
    "open boxes": r"\boxed{" * 140_000,
    "nested boxes": r"\boxed{" * 70_000 + "}" * 70_000,
    "commas": "#### " + "1," * 500_000,
    "dashes": "#### " + "-" * 1_000_000 + "5",
    "equals": "= " * 500_000 + "5",
    "brackets": "(" * 1_000_000 + "5",
    "angles": "<" * 1_000_000,
    "fractions": "#### " + r"\frac{1}" * 120_000,
    "caret": "#### ^" + " " * 1_000_000,
    "combining": "\u0315\u0300" * 500_000,
    "ligatures": "\ufdfa" * 1_000_000,
    "numbers": "1 " * 500_000,
    "scales": "#### 1" + " trillion" * 100_000,
    "brackets behind": "#### 72 " + "(" * 1_000_000,
    "references": "#### 72 clips" + " in 2 days" * 100_000,
    "blank lines": "#### 72" + "\n " * 500_000 + "73",
}


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_completions_are_read_in_linear_time(name: str) -> None:
    started = time.process_time()
    grade(ABSURD[name], "72")
    # Linear passes take well below a second; one quadratic pattern takes minutes.
    assert time.process_time() - started < 5


INTEGERS = st.integers(-(10**12), 10**12)


def spellings(number: int) -> list[str]:
    digits, sign = str(abs(number)), "-" if number < 0 else ""
    grouped = f"{abs(number):,}"
    latex = grouped.replace(",", "{,}")
    plain = [f"{sign}{digits}", f"{sign}{grouped}", f"{sign}{digits}.00", f"{sign}${grouped}", f"{sign}0{digits}"]
    typeset = [f"{sign}{grouped.replace(',', space)}" for space in (NBSP, THIN, NARROW)]
    unicode = [f"{MINUS if sign else ''}{digits}", "".join(chr(ord(c) + 0xFEE0) for c in f"{sign}{digits}")]
    return [*plain, *typeset, *unicode, rf"${sign}{latex}$", rf"\boxed{{{sign}{grouped}}}", f"**{sign}{digits}**"]


FRAMES = [
    "#### {}",
    "####{}",
    "#### {} clips",
    "#### {}.",
    "#### Answer: {}",
    "#### x = {}",
    "#### {}%",
    "The final answer is {}.",
    "**Answer:** {}\n",
    "work\n#### {}\n" + "and more words " * 40,
]


@settings(deadline=None)
@given(INTEGERS, st.sampled_from(FRAMES))
def test_every_spelling_of_an_integer_is_that_integer(number: int, frame: str) -> None:
    for spelling in spellings(number):
        assert read(frame.format(spelling)) == str(number), spelling


@settings(deadline=None)
@given(
    INTEGERS,
    INTEGERS,
    st.sampled_from(
        [" or ", " and ", ", ", " to ", "; ", " | ", " or maybe ", ", perhaps ", "~", "\nor ", " (maybe ", "\nmaybe "]
    ),
)
def test_a_hedged_pair_never_pays(left: int, right: int, glue: str) -> None:
    if left == right:
        right += 1
    for frame in ("#### {}", "The answer is {}", "It is {}", r"\boxed{{{}}}", "#### either {} clips"):
        for truth in (left, right):
            assert grade(frame.format(f"{left}{glue}{right}"), str(truth)).reward == 0.0


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 10**6), st.sampled_from(["-", EN_DASH, " - ", " to ", "-$"]))
def test_a_range_never_pays(low: int, width: int, glue: str) -> None:
    for truth in (low, low + width):
        assert grade(f"#### {low}{glue}{low + width}", str(truth)) == Grade(0.0, None, False)


@settings(deadline=None)
@given(st.fractions(max_denominator=10**6))
def test_canonical_text_reads_back_as_the_same_rational(value: Fraction) -> None:
    assert extract(f"#### {canonical(value)}") == value


@settings(deadline=None)
@given(st.text(max_size=200))
def test_no_text_raises(text: str) -> None:
    for frame in ("{}", "#### {}", "\\boxed{{{}}}", "the answer is {}"):
        result = grade(frame.format(text.replace("{", "").replace("}", "")), "72")
        assert result.is_parseable == (result.extracted is not None)


@settings(deadline=None)
@given(st.text(alphabet="0123456789.,-+/*^=() $%#x\\{}or", max_size=40))
def test_no_heap_of_symbols_raises(text: str) -> None:
    extract(text)
    extract(f"#### {text}")
    extract(f"\\boxed{{{text}}}")
