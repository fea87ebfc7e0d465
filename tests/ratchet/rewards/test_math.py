"""The rule of mathematics, with the real package and real worker processes."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ratchet.config import RunConfig
from ratchet.errors import DataError
from ratchet.rewards import math_rule
from ratchet.rewards.data_proto import GradeRow
from ratchet.rewards.graders import open_grader
from ratchet.rewards.math_rule import MathRule, check_ground_truth, is_math, reference_answer
from ratchet.rewards.results import RewardResult

TOWER = r"\boxed{9^{9^{9^{9}}}}"


@pytest.fixture(scope="module")
def rule() -> Iterator[MathRule]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_rule, "_MOST_WORKERS", 1)
        found = MathRule(timeout=1)
    yield found
    found.close()


def _rows(*pairs: tuple[str, str]) -> list[GradeRow]:
    return [
        GradeRow(where=f"rollout {at}", data_source="aime", completion=completion, ground_truth=truth)
        for at, (completion, truth) in enumerate(pairs)
    ]


# The answers are of MATH's kinds: what is equal was worked out by hand.
EQUAL = [
    (r"So it is \boxed{0.5}.", r"\frac{1}{2}"),
    (r"\boxed{\dfrac{2}{4}}", "1/2"),
    (r"$x = 7$, hence \boxed{x=7}", "7"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2"),
    (r"\boxed{\left(3,\frac{\pi}{2}\right)}", r"\left( 3, \frac{\pi}{2} \right)"),
    (r"\boxed{-2, 1}", "1,-2"),
    (r"\boxed{[-2,7]}", r"x \in [-2,7]"),
    (r"\boxed{32,348}", r"\$32,\!348"),
    (r"\boxed{1+\sqrt2}", r"$\sqrt{2}+1$"),
    (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
    (r"\boxed{Evelyn}", r"\text{Evelyn}"),
    ("The answer is 042.", "42"),
    ("Answer: $34$", "34"),
    (r"We get \boxed{1}. But wait, that is wrong, so the answer is \boxed{2}", "2"),
    (r"first \boxed{1} then \boxed{2}", "2"),
    (r"$x=\boxed{1}$ or $x=\boxed{-2}$", "1,-2"),
    (r"\boxed{\boxed{5}}", "5"),
    (r"First \boxed{41} was my guess.", r"A whole solution, which ends in \boxed{41}"),
]
DIFFERENT = [
    (r"\boxed{0.51}", r"\frac{1}{2}"),
    (r"\boxed{(2,1)}", "(1,2)"),
    (r"\boxed{1} or \boxed{2}", "2"),
    (r"42? 42! \boxed{41}", "42"),
    (r"\boxed{x^2+1}", "(x+1)^2"),
    (r"\boxed{[-2,7)}", r"x \in [-2,7]"),
]


def test_an_answer_is_right_that_means_the_ground_truth(rule: MathRule) -> None:
    rows = _rows(*EQUAL, *DIFFERENT)
    found = rule.score(rows)
    wrong = [
        row
        for row, result, right in zip(rows, found, [1.0] * len(EQUAL) + [0.0] * len(DIFFERENT), strict=True)
        if result.reward != right
    ]
    assert not wrong
    assert all(result.is_parseable for result in found)
    assert found[2] == RewardResult(1.0, extracted="x=7")


def test_what_holds_no_answer_is_not_parseable(rule: MathRule) -> None:
    texts = ["I do not know.", "", r"\boxed{42", r"\boxed{" * 300, "(" * 3000, "$" * 999]
    assert rule.score(_rows(*[(text, "42") for text in texts])) == [RewardResult(0.0, is_parseable=False)] * len(texts)


def test_what_takes_too_long_is_no_answer_with_the_reason_and_others_are_graded(rule: MathRule) -> None:
    started = time.perf_counter()
    right, late, wrong = rule.score(_rows((r"\boxed{3}", "3"), (TOWER, "3"), (r"\boxed{4}", "3")))
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert (late.reward, late.is_parseable) == (0.0, False)
    assert late.error == "the answer could not be compared within 1 s"
    assert time.perf_counter() - started < 10


def _children() -> set[int]:
    """The processes that this one's threads have started."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


@pytest.mark.slow
def test_a_worker_that_nothing_interrupts_is_ended_and_the_rest_is_graded_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(math_rule, "_FOR_A_ROW", 3)
    rule = MathRule(timeout=1)
    before = _children()
    assert rule.score(_rows((r"\boxed{3}", "3")))[0].reward == 1.0
    (worker,) = _children() - before
    # It stops in the middle of a row, as in an operation that hears no alarm.
    threading.Timer(0.2, os.kill, (worker, signal.SIGSTOP)).start()
    stuck, fine = rule.score(_rows((TOWER, "3"), (r"\boxed{3}", "3")))
    assert (stuck.reward, stuck.is_parseable, stuck.error) == (0.0, False, "to compare the answer takes too long")
    assert fine.reward == 1.0
    assert worker not in _children()
    rule.close()
    assert _children() <= before


@pytest.mark.slow
def test_rows_are_shared_by_workers_and_come_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    rule, before = MathRule(), _children()
    pairs = [(rf"\boxed{{{at}}}", str(at - at % 2)) for at in range(32)]
    assert [result.reward for result in rule.score(_rows(*pairs))] == [1.0, 0.0] * 16
    assert len(_children() - before) == 2
    rule.close()


def test_threads_may_grade_at_once(rule: MathRule) -> None:
    found: dict[int, list[float]] = {}

    def grade(number: int) -> None:
        rows = _rows(*[(rf"\boxed{{{number}}}", str(at)) for at in range(4)])
        found[number] = [result.reward for result in rule.score(rows)]

    threads = [threading.Thread(target=grade, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [float(at == number) for at in range(4)] for number in range(4)}


def test_a_fork_grades_by_a_worker_of_its_own(rule: MathRule) -> None:
    assert rule.score(_rows((r"\boxed{3}", "3")))[0].reward == 1.0
    before = _children()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(rule.score(_rows((r"\boxed{5}", "5")))[0].reward).encode())
            rule.close()
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 10) == b"1.0"
    os.close(read)
    os.waitpid(child, 0)
    assert _children() == before, "the worker of this process is still there"
    assert rule.score(_rows((r"\boxed{3}", "3")))[0].reward == 1.0


@pytest.mark.parametrize("truth", ["", "  ", "$$", r"\boxed{}", r"\text{ }"])
def test_a_ground_truth_that_holds_no_answer_is_refused_before_and_while_grading(rule: MathRule, truth: str) -> None:
    with pytest.raises(DataError, match="expected an answer in LaTeX or a number as ground truth, got"):
        check_ground_truth(truth)
    with pytest.raises(DataError, match=r"rollout 0: the ground truth .* holds no answer"):
        rule.score(_rows((r"\boxed{3}", truth)))
    assert rule.score(_rows((r"\boxed{3}", "3")))[0].reward == 1.0, "the worker is none the worse for it"


def test_a_reference_answer_is_graded_as_right(rule: MathRule) -> None:
    truths = [truth for _, truth in EQUAL]
    found = rule.score(_rows(*[(reference_answer(truth), truth) for truth in truths]))
    assert [result.reward for result in found] == [1.0] * len(truths)


def test_aime_is_known_by_its_name() -> None:
    assert all(is_math(source) for source in ("aime", "aime24", "HuggingFaceH4/aime_2024", "Maxwell-Jia/AIME_2024"))
    assert not any(is_math(source) for source in ("openai/gsm8k", "mine/claimed", "maimed", ""))


def test_a_run_s_reward_grades_rows_of_mathematics_together_and_others_by_their_rules() -> None:
    rows = [
        GradeRow(where="rollout 0", data_source="lighteval/MATH", completion=r"\boxed{\frac24}", ground_truth="0.5"),
        GradeRow(where="rollout 1", data_source="openai/gsm8k", completion="#### 72", ground_truth="72"),
        GradeRow(where="rollout 2", data_source="math_dapo", completion="Answer: 35", ground_truth="34"),
    ]
    with closing(open_grader(RunConfig())) as grader:
        assert [result.reward for result in grader.grade(rows)] == [1.0, 1.0, 0.0]
        nothing = replace(rows[0], ground_truth=None)
        with pytest.raises(DataError, match="rollout 0: no ground truth"):
            grader.grade([nothing])
    named = RunConfig.model_validate({"reward_model": {"rule": "math"}})
    with closing(open_grader(named)) as grader:
        mine = [replace(row, data_source="mine", completion=r"\boxed{72.0}") for row in rows[1:2]]
        assert [result.reward for result in grader.grade(mine)] == [1.0]
