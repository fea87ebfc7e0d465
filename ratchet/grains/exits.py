"""The exit codes of a pod's program: whether doing the same again can help.

KFP shows the launcher's own code only, so that the pod's log and its status file carry these, too.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import NoReturn

from ratchet.errors import (
    BudgetError,
    ConfigError,
    DataError,
    EngineError,
    NotCommittedError,
    NumericsError,
    OwnershipLostError,
    StoreError,
    StoreUnavailableError,
)


class ExitCode(IntEnum):
    """Below 64, doing the same again gives the same; from 70 on, it may help."""

    DONE = 0
    BAD_INPUT = 2
    """Config or data: correct them."""
    NOT_COMMITTED = 3
    """The fence: an earlier task failed; look at that one."""
    OWNERSHIP_LOST = 4
    """Another submission goes on with the run: nothing to do."""
    NUMERICS = 5
    """A number that is not finite: the same inputs give it again."""
    ENGINE = 6
    """A model that cannot be loaded, sampled or trained."""
    STORED = 7
    """Object storage refuses, or what lies there is damaged: look at it."""
    BUDGET = 8
    """The run holds as much as it may: give it more room, or retire something."""
    INTERNAL = 70
    """An error that nobody foresaw, an out-of-memory error among them."""
    STORAGE = 75
    """Object storage did not answer, although it was asked several times."""
    TERMINATED = 143
    """Somebody ended the pod; submit the run again."""


def exit_code(error: BaseException) -> ExitCode:
    """Return the code with which a program that `error` ended should exit."""
    kinds: list[tuple[type[BaseException] | tuple[type[BaseException], ...], ExitCode]] = [
        ((ConfigError, DataError), ExitCode.BAD_INPUT),
        (NotCommittedError, ExitCode.NOT_COMMITTED),
        (OwnershipLostError, ExitCode.OWNERSHIP_LOST),
        (NumericsError, ExitCode.NUMERICS),
        (EngineError, ExitCode.ENGINE),
        (BudgetError, ExitCode.BUDGET),
        (StoreUnavailableError, ExitCode.STORAGE),
        (StoreError, ExitCode.STORED),
    ]
    return next((code for kind, code in kinds if isinstance(error, kind)), ExitCode.INTERNAL)


@contextmanager
def at_sigterm(end: Callable[[], NoReturn]) -> Iterator[None]:
    """Let SIGTERM end the block by what `end` raises. Off the main thread, which alone hears of it, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: end())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
