"""The program of the processes that compare answers in mathematics; `ratchet.rewards.math_rule` starts and asks them.

math-verify reads the answers and sympy compares them. The trap: a completion can hold what no computer ends with, such
as a tower of powers. math-verify's own limits of time are alarms, which only a process's main thread can set, and which
nothing hears inside one long operation on numbers: so this is a process of its own, which can be ended from outside.
"""

import logging
import re
from collections.abc import Iterator
from typing import Any

from math_verify import parse, verify
from math_verify.errors import TimeoutException
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig
from sympy.core.random import seed

from ratchet.errors import DataError, RatchetError
from ratchet.rewards import wire
from ratchet.rewards.data_proto import GradeRow
from ratchet.rewards.results import RewardResult
from ratchet.rewards.sandbox import COUNTER
from ratchet.rewards.worker import connection, limit_memory

MEMORY_GIB = 4.0

# What stands in a box is the answer, whatever else is in the text.
_BOXED = LatexExtractionConfig(boxed_match_priority=0)
_ANYWHERE = ExprExtractionConfig()
_BOX = re.compile(r"\\f?boxed\s*{")
_JOINS = re.compile(r"[\s$,;]*(?:\\text{\s*)?(?:or|and)?(?:\s*})?[\s$,;]*(?:[a-z]\s*=)?\s*", re.IGNORECASE)


def main() -> None:
    """Answer messages of rows until the other end closes."""
    logging.disable(logging.CRITICAL)  # of completions that cannot be read, which is no news
    with connection() as (end, counter):
        limit_memory(MEMORY_GIB)
        while True:
            message = wire.receive(end)
            rows, results = [GradeRow(**row) for row in message["rows"]], []
            try:
                for begun, row in enumerate(rows, start=1):
                    COUNTER.pack_into(counter, 0, begun)
                    results.append(_graded(row, message["timeout"]))
                answer = wire.results_message(results, rows)
            except RatchetError as error:
                answer = wire.error_message(error)
            wire.send(end, answer)


def _graded(row: GradeRow, timeout: int) -> RewardResult:
    # sympy tries some equalities at random numbers: the same row has to meet the same ones again.
    seed(0)
    expected = _expected(row, timeout)
    try:
        found = parse(_last_answer(row.completion), (_BOXED, _ANYWHERE), parsing_timeout=timeout, raise_on_error=True)
    except TimeoutException:
        return undecided(f"the answer could not be read within {timeout} s")
    except Exception:  # whatever a grammar and sympy raise of a text that nobody has written for them
        found = []
    if not found:
        return RewardResult(0.0, is_parseable=False)
    said = next((str(one) for one in found if isinstance(one, str)), None)
    is_late = False
    for mine, theirs in ((mine, theirs) for mine in expected for theirs in found):
        try:
            if verify(mine, theirs, timeout_seconds=timeout, raise_on_error=True):
                return RewardResult(1.0, extracted=said)
        except TimeoutException:
            is_late = True
        except Exception:  # of two things that cannot be compared
            continue
    if is_late:
        return undecided(f"the answer could not be compared within {timeout} s", said)
    return RewardResult(0.0, extracted=said)


def _last_answer(completion: str) -> str:
    r"""The last \boxed{}, with those before it that only "or", "and" or a comma joins; without a box, all of the text.

    math-verify itself takes boxes that stand close together for one answer, whatever is said between them: "\boxed{1}.
    That is wrong, it is \boxed{2}" would be two.
    """
    boxes = list(_boxes(completion))
    if len(boxes) < 2:
        return completion
    first, (start, end) = len(boxes) - 1, boxes[-1]
    while first and _JOINS.fullmatch(completion[boxes[first - 1][1] : start]):
        first -= 1
        start = boxes[first][0]
    return completion[start:end]


def _boxes(text: str) -> Iterator[tuple[int, int]]:
    """Yield where each box that is in no other begins and ends, braces within it balanced; one pass over the text."""
    begins = {match.end() - 1: match.start() for match in _BOX.finditer(text)}
    opened: list[int | None] = []
    num_boxes = 0
    for place, character in enumerate(text):
        if character == "{":
            opened.append(begins.get(place))
            num_boxes += place in begins
        elif character == "}" and opened:
            begin = opened.pop()
            num_boxes -= begin is not None
            if begin is not None and not num_boxes:
                yield begin, place + 1


def undecided(why: str, extracted: str | None = None) -> RewardResult:
    """The result of an answer that takes too long: no answer. To exclude it would spare a policy that learns it."""
    return RewardResult(0.0, extracted=extracted, is_parseable=False, error=why)


def _expected(row: GradeRow, timeout: int) -> list[Any]:
    text = str(row.ground_truth).strip().strip("$")
    text = text if r"\boxed" in text else rf"\boxed{{{text}}}"
    try:
        found = parse(text, (_BOXED,), parsing_timeout=timeout, raise_on_error=True)
    except (Exception, TimeoutException) as error:
        raise DataError(f"{row.place}: the ground truth {row.ground_truth!r:.80} cannot be read ({error})") from error
    if not found:
        raise DataError(f"{row.place}: the ground truth {row.ground_truth!r:.80} holds no answer")
    return list(found)
