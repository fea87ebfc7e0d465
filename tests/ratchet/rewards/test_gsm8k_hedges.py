"""What may follow an answer, and what takes its reward away."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from ratchet.rewards.gsm8k import Grade, extract, grade
from ratchet.rewards.numerals import canonical

NBSP, THIN, NARROW = "\u00a0", "\u2009", "\u202f"
MINUS, EN_DASH = "\u2212", "\u2013"


def read(completion: str) -> str | None:
    value = extract(completion)
    return None if value is None else canonical(value)


OFFERS = [
    "(maybe 73)",
    "(possibly 73)",
    "(could be 73)",
    "(no, 73)",
    "(wait, it is 73)",
    "(alternatively 73)",
    "(and 73)",
    "(73 if you count her)",
    "(73 is also possible)",
    "(she has 73)",
    "(Note: 73)",
    "(= 73)",
    "(73 = 48 + 25)",
    "(73 clips, 74 clips)",
    "(73-74)",
    "[73]",
    "maybe 73",
    "maybe seventy-three",
    ", no wait 73",
    "- no, 73",
    ". No, 73",
    ". Hmm, 73.",
    ". It is 73.",
    ". Let me check. It is 73.",
    "which is wrong; it is 73",
    "which is 73",
    "where 73",
    "as an alternative 73",
    "by mistake 73",
    "because it is 73",
    "because 73",
    "because 48 + 25 = 73",
    "since the total should be $73",
    "x73",
    "in place of 73 clips",
    "clips in 73 clips",
    "for 73",
    "\nmaybe 73",
    "\nNo, 73",
    ".\nActually 73",
    "\n73",
    "\n- 73",
    "\n### 73",
    "\nI mean 73.",
    "\nMake that 73 clips.",
    "\nShe has 73.",
    "\n48 + 25 = 73",
    "\r\nHmm, 73",
    "\n\\]\n73",
    "\n\n\nWait, it should be 73.",
    "\n\nHmm. 73.",
    "\n\nIt is 73.",
    "\n\nI think 73 is better.",
    "\n\n$73",
    "\n---\nSorry, the answer was wrong: 73",
]
SILENT = [
    "",
    "?",
    "(= 48 + 24)",
    "(48 + 24)",
    "(48 + 24 = 72)",
    "(she sold 48 + 24 = 72 clips.)",
    "(48 in April and 24 in May)",
    "(3 boxes of 24)",
    "(144 / 2)",
    "(rounded to 2 decimal places)",
    "(in 2 months)",
    "= 48 + 24",
    "because 48 + 24 = 72",
    "because she sold 48 and then half of that",
    "since 144 is halved and 144 / 2 = 72",
    ". This is 48 + 24.",
    ". It took 144 / 2 = 72 hours to make 144 clips.",
    "\n48 + 24 = 72",
    "\n- 72",
    "\nThat took 3 steps.",
    "\nThe answer is 72.",
    "\nShe sold 48 in April, then 24 in May, which makes 72 altogether.",
    "\nQuestion: Tom has 5 apples.",
    "\n\nTom has 5 apples and eats 3 or 4.",
    "\n\n3 lions and 2 rhinos escape from the zoo.",
    "\n\nDividing both sides by 3 gives p = 72",
    "\nNatalia sold as many as that.\nTom has 5 apples.",
]


@pytest.mark.parametrize("frame", ["#### 72 {}", "\\boxed{{72}} {}", "The answer is 72 {}", "<answer>72</answer> {}"])
@pytest.mark.parametrize("offer", OFFERS)
def test_an_answer_that_another_number_follows_unexplained_is_unparseable(frame: str, offer: str) -> None:
    assert grade(frame.format(offer).replace("72 .", "72."), "72") == Grade(0.0, None, False)


@pytest.mark.parametrize("frame", ["#### 72 {}", "\\boxed{{72}} {}", "The answer is 72 {}"])
@pytest.mark.parametrize("explanation", SILENT)
def test_an_answer_may_be_explained(frame: str, explanation: str) -> None:
    assert grade(frame.format(explanation).replace("72 .", "72."), "72").reward == 1.0


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("#### 18 dollars in 2 days", "18"),
        ("#### $18 in 2 days", "18"),
        ("#### 30 years old in 5 years", "30"),
        ("#### 72 cookies for 3 people", "72"),
        ("#### 18 in 2 days", None),
        ("#### 72 dollars in 73 dollars", None),
        ("#### 72 / 73?", "72/73"),
        ("#### maybe 72", "72"),
        ("#### 72 maybe #### 73", None),
        ("The answer is 72. Maybe the answer is 73.", None),
        ("It is 72. Maybe 73.", None),
        ("It is 72.\nPerhaps 73.", None),
        ("It is 72 or\n73", None),
        ("Maybe it is 72.", "72"),
        ("It is 72. No, 73.", "73"),
        ("5(2) = 10", "10"),
        ("#### 5(2) = 10", "10"),
    ],
)
def test_what_a_second_number_means_is_told_from_its_words(completion: str, value: str | None) -> None:
    assert read(completion) == value


def test_a_made_up_next_question_costs_nothing(shared: Path) -> None:
    lines = (shared / "data/gsm8k/test.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    rows = [json.loads(line) for line in lines]
    kept = [grade(f"{row['answer']}\n\n{after['question']}", row["answer"]).reward for row, after in pairwise(rows)]
    # What is lost begins like an answer: "And the number is 5".
    assert sum(kept) > 0.99 * len(kept)
