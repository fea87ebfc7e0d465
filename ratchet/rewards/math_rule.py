r"""The rule of mathematics beyond numbers: answers in LaTeX or plain text, compared as what they mean.

1/2, 0.5 and \frac{1}{2} are one answer, (x+1)^2 and x^2+2x+1 as well; the last \boxed{} of a completion is its answer,
or what follows "the answer is". The work is done by processes that stay up and are ended when an answer takes too long
(`ratchet.rewards.math_worker`), so that threads and forks may grade.
"""

import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from ratchet.errors import DataError, EngineError
from ratchet.rewards import wire
from ratchet.rewards.data_proto import GradeRow
from ratchet.rewards.results import RewardResult
from ratchet.rewards.sandbox import Process, environment

TIMEOUT_S = 3
"""Seconds for reading an answer, and for each comparison."""
_FOR_A_ROW = 6
"""Times the timeout that a row may take in all before its process is ended: its own alarms come first."""
_START_S = 120.0
"""For an interpreter and sympy, on a machine that is busy."""
_MOST_WORKERS = 8
_ROWS_OF_A_WORKER = 16
"""Fewer are not worth another process."""

_SOURCES = ("HuggingFaceH4/MATH-500", "DigitalLearningGmbH/MATH-lighteval", "lighteval/MATH", "math_dapo")
_FRAME = re.compile(r"\\(?:f?boxed|text(?:bf|rm|it)?|mathrm|mbox|left|right)\b|[{}$\s]")
"""What stands around an answer and is none."""
MATH_DATA_SOURCES = (*_SOURCES, "aime")
"""What is known by name; every aime* of any owner is, too."""


def is_math(data_source: str) -> bool:
    """Whether this rule grades a data source without being asked to."""
    return data_source in _SOURCES or data_source.rpartition("/")[2].lower().startswith("aime")


def reference_answer(ground_truth: str) -> str:
    """The completion that a ground truth stands for."""
    return ground_truth if r"\boxed" in ground_truth else rf"\boxed{{{ground_truth.strip().strip('$')}}}"


def check_ground_truth(ground_truth: Any) -> None:
    """DataError for a ground truth that no completion could match."""
    if not isinstance(ground_truth, str) or not _FRAME.sub("", ground_truth):
        raise DataError(f"expected an answer in LaTeX or a number as ground truth, got {ground_truth!r:.80}")


class MathRule:
    """Grades by processes that are started when rows come; safe to use from several threads, and after a fork."""

    def __init__(self, timeout: int = TIMEOUT_S) -> None:
        """`timeout`: seconds for reading an answer, and for each comparison."""
        most = min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
        self._workers = [_Worker(timeout) for _ in range(most)]

    def score(self, rows: Sequence[GradeRow]) -> list[RewardResult]:
        """1 for an answer that means the ground truth, else 0; `extracted` is the answer as it was read.

        An answer that takes too long is none: 0, not parseable, with the reason in `error`. DataError names a row whose
        ground truth cannot be read.
        """
        count = min(len(self._workers), -(-len(rows) // _ROWS_OF_A_WORKER))
        if count < 2:
            return self._workers[0].score(rows)
        found: list[RewardResult | None] = [None] * len(rows)
        with ThreadPoolExecutor(count) as threads:
            # Dealt like cards: long answers tend to stand together.
            shares = threads.map(lambda start: self._workers[start].score(rows[start::count]), range(count))
            for start, share in enumerate(shares):
                found[start::count] = share
        return [result for result in found if result is not None]

    def close(self) -> None:
        """End the processes; a later `score` starts others."""
        for worker in self._workers:
            worker.close()


class _Worker:
    def __init__(self, timeout: int) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._owner = os.getpid()

    def score(self, rows: Sequence[GradeRow]) -> list[RewardResult]:
        with self._lock:
            found: dict[int, RewardResult] = {}
            left = list(range(len(rows)))
            while left:
                asked = [rows[index] for index in left]
                begun, answer = self._asked(asked)
                if isinstance(answer, dict):
                    wire.raise_error(answer)
                    found |= zip(left, wire.results_of(answer, asked, "math"), strict=True)
                    break
                # What it had not answered yet is asked again, without the row that it was at.
                found[left.pop(begun - 1)] = answer
            return [found[index] for index in range(len(rows))]

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.stop()

    def _asked(self, rows: Sequence[GradeRow]) -> tuple[int, dict[str, Any] | RewardResult]:
        """Its answer; or, where it had to be ended, the number of the row that it was at, and that row's result."""
        process = self._opened()
        message = {
            "timeout": self._timeout,
            "rows": [
                {"where": row.where, "data_source": "", "completion": row.completion, "ground_truth": row.ground_truth}
                for row in rows
            ],
        }
        try:
            return 0, process.asked(message, _FOR_A_ROW * self._timeout)
        except (TimeoutError, EOFError, OSError, ValueError) as error:
            why = "takes too long" if isinstance(error, TimeoutError) else "takes too much memory"
            return max(1, process.begun), RewardResult(0.0, is_parseable=False, error=f"to compare the answer {why}")
        finally:
            if not process.is_idle:
                self.close()

    def _opened(self) -> Process:
        if self._owner != os.getpid():
            # A fork must not share a conversation, nor end a process that is another's.
            if self._process is not None:
                self._process.stop.detach()
            self._process, self._owner = None, os.getpid()
        if self._process is None or self._process.is_gone:
            self.close()
            self._process = Process(environment(()) | {"PYTHONHASHSEED": "0"}, "math_worker")
            try:
                self._process.asked({"rows": []}, _START_S)
            except (TimeoutError, EOFError, OSError, ValueError) as error:
                said = self._process.how_it_ended() if isinstance(error, EOFError) else repr(error)
                self.close()
                raise EngineError(
                    f"the process that compares answers in mathematics does not start ({said})"
                ) from error
        return self._process


@cache
def shared_math_rule() -> MathRule:
    """The one of this process: whoever grades shares its workers."""
    return MathRule()
