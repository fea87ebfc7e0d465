"""The program that a pod runs: work on a run with its log, its status file, its retries and its exit code.

Trap: less than a second passes between SIGTERM and the end of a container on a cluster. What is not committed by then
is done again; the handler only says that the pod was ended.
"""

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from ratchet.environment import set_defaults, set_log_level
from ratchet.errors import RatchetError, StoreUnavailableError
from ratchet.grains.exits import ExitCode, at_sigterm, exit_code
from ratchet.grains.tasks import RunTask
from ratchet.redaction import hidden
from ratchet.store import layout
from ratchet.store.objects import ObjectStore, open_store
from ratchet.store.status import State, TaskStatus, write_status

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

ATTEMPTS = 4
"""Beginnings of a task whose object storage does not answer; stages that are committed by then are not run again."""
LONGEST_PAUSE = 120.0
"""Seconds; the pauses before are 10, 20, 40."""
HEARTBEAT = 30.0
"""Seconds between two statuses of a task that runs."""

ADVICE = {
    ExitCode.BAD_INPUT: "correct the config or the data, and submit again with the same run id",
    ExitCode.NOT_COMMITTED: "an earlier task failed: look at that one; then submit again with the same run id",
    ExitCode.OWNERSHIP_LOST: "nothing to do here: the newer submission goes on with the run",
    ExitCode.NUMERICS: "nothing was committed; change the config (a lower learning rate) and start a new run",
    ExitCode.ENGINE: "the message says what the model or the engine lacks; then submit again with the same run id",
    ExitCode.STORED: "put object storage in order, and submit again with the same run id",
    ExitCode.BUDGET: "make room as the message says, and submit again with the same run id",
    ExitCode.INTERNAL: "the pod's log has the traceback; submitting again with the same run id resumes the run",
    ExitCode.STORAGE: "wait until object storage answers, and submit again with the same run id",
    ExitCode.TERMINATED: "submit again with the same run id to go on",
}
"""What to do next after each exit."""


def run(component: str, work: Callable[..., Value], task: RunTask, /, **arguments: Any) -> Value:
    """Return `work(task, **arguments)`, the work of a component; a failure ends the process with its exit code."""
    set_defaults()
    set_log_level()
    with _reported(component, task) as reporter:
        for attempt in Retrying(
            retry=retry_if_exception_type(StoreUnavailableError),
            # A wrong address shall be known at once; a pipeline that preflight refused has cost nothing.
            stop=stop_after_attempt(1 if component == "preflight" else ATTEMPTS),
            wait=wait_exponential(multiplier=10, max=LONGEST_PAUSE),
            before_sleep=lambda state: _say(state, reporter),
            reraise=True,
        ):
            with attempt:
                return work(task, **arguments)
    raise AssertionError("unreachable")


def say(note: str) -> None:
    """Put a sentence into the status of the task that runs in this process, for those who look at the run."""
    logger.info("%s", note)
    if _current:
        _current[-1].say(note)


@dataclass
class _Reporter:
    """Writes the status file of one task, from this thread, the heartbeat's and the signal handler's."""

    store: ObjectStore | None
    status: TaskStatus
    is_terminated: bool = False
    """Whether a signal has ended the process."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def start(self) -> None:
        self._change()
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def say(self, note: str) -> None:
        with self._lock:
            self.status = replace(self.status, note=hidden(note))

    def again(self, attempt: int) -> None:
        self._change(attempt=attempt, note="")

    def end(self, state: State, code: ExitCode, error: BaseException | None = None) -> None:
        self._change(
            is_last=True,
            state=state,
            exit_code=int(code),
            error=type(error).__name__ if error is not None else "",
            message=hidden(str(error)) if error is not None else "",
            advice=ADVICE.get(code, ""),
        )

    def _change(self, *, is_last: bool = False, **values: Any) -> None:
        with self._lock:
            # After the end no heartbeat may bring the task back to life.
            if self._stop.is_set():
                return
            if is_last:
                self._stop.set()
            self.status = replace(self.status, updated=time.time(), **values)
            if self.store is not None:
                write_status(self.store, self.status)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT):
            self._change()


_current: list[_Reporter] = []


@contextmanager
def _reported(name: str, task: RunTask) -> Iterator[_Reporter]:
    now = time.time()
    status = TaskStatus(
        submission_id=task.submission_id,
        task=name,
        step=getattr(task, "step", getattr(task, "start", None)),
        state="running",
        host=os.environ.get("RATCHET_POD_NAME") or socket.gethostname(),
        started=now,
        updated=now,
    )
    reporter = _Reporter(_store(task), status)
    with at_sigterm(partial(_end_by_signal, reporter)):
        _current.append(reporter)
        reporter.start()
        try:
            yield reporter
        except (KeyboardInterrupt, SystemExit) as error:
            # A signal's handler has said more, where it was one.
            reporter.end("terminated", ExitCode.TERMINATED, error)
            raise
        except Exception as error:
            if reporter.is_terminated:
                # Some take the signal for a fault of what they were at: a user's function, the files of a state.
                raise SystemExit(int(ExitCode.TERMINATED)) from error
            code = exit_code(error)
            reporter.end("failed", code, error)
            if not isinstance(error, RatchetError):
                sys.stderr.write(hidden(traceback.format_exc()))
            logger.error("%s: %s (exit code %d, %s): %s", name, hidden(str(error)), code, code.name, ADVICE[code])
            raise SystemExit(int(code)) from error
        else:
            reporter.end("succeeded", ExitCode.DONE)
        finally:
            _current.remove(reporter)


def _end_by_signal(reporter: _Reporter) -> NoReturn:
    reporter.is_terminated = True
    # In a thread of its own: this one may have been interrupted inside the client that the put needs.
    last = threading.Thread(target=reporter.end, args=("terminated", ExitCode.TERMINATED), daemon=True)
    last.start()
    last.join(0.5)
    raise SystemExit(int(ExitCode.TERMINATED))


def _say(state: RetryCallState, reporter: _Reporter) -> None:
    error = state.outcome.exception() if state.outcome is not None else None
    pause = state.next_action.sleep if state.next_action is not None else 0.0
    logger.warning("%s; beginning again in %.0f s", error, pause)
    reporter.again(state.attempt_number + 1)


def _store(task: RunTask) -> ObjectStore | None:
    """Return where the status goes, or None where no run can be: the work itself will say why."""
    try:
        return open_store(task.root.rstrip("/")).child(layout.check_run_id(task.name))
    except (RatchetError, OSError) as error:
        logger.warning("no status can be written: %s", error)
        return None
