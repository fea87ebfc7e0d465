"""The program of the process that grades with a user's code; `ratchet.rewards.sandbox` starts it and asks it."""

import fcntl
import mmap
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ratchet.config.user_code import load_all, load_object
from ratchet.errors import DataError, RatchetError
from ratchet.rewards import wire
from ratchet.rewards.custom import CustomReward
from ratchet.rewards.data_proto import GradeRow
from ratchet.rewards.parts import Part, RulePart
from ratchet.rewards.registry import registered_data_sources
from ratchet.rewards.results import RewardResult
from ratchet.rewards.sandbox import COUNTER


def main() -> None:
    """Load a user's code, and grade by it."""
    with connection() as (end, counter):
        hello = wire.receive(end)
        limit_memory(hello["memory_gib"])
        limit = f"custom_reward_function.memory_gib is {hello['memory_gib']:g}"
        code = _Code(counter)
        wire.send(end, _answer(code.load, hello, limit))
        while True:
            wire.send(end, _answer(code.grade, wire.receive(end), limit))


@contextmanager
def connection() -> Iterator[tuple[socket.socket, mmap.mmap]]:
    """Yield what connects to the process that started this one, until that closes it: its socket, and the counter of
    rows. The arguments of the command line are the descriptors of socket, lifeline and counter."""
    end_fd, lifeline, counter_fd = map(int, sys.argv[2:])
    _die_with(lifeline)
    for fd in (end_fd, counter_fd):
        os.set_inheritable(fd, False)
    counter = mmap.mmap(counter_fd, COUNTER.size)
    os.close(counter_fd)
    with socket.socket(fileno=end_fd) as end, suppress(EOFError, OSError):
        yield end, counter


def limit_memory(gib: float) -> None:
    """Have what this process allocates beyond `gib` raise MemoryError, and leave no core behind."""
    most = int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Not RLIMIT_AS: libraries reserve far more addresses than they ever use.
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _die_with(lifeline: int) -> None:
    """Have the kernel end this process with the other one, even where it hangs in C: SIGIO, whose default is to end."""
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _answer(work: Callable[[dict[str, Any]], dict[str, Any]], message: dict[str, Any], limit: str) -> dict[str, Any]:
    try:
        return work(message)
    except MemoryError:
        return wire.error_message(DataError(f"no memory is left to grade; {limit}"))
    except RatchetError as error:
        is_memory = isinstance(error.__cause__, MemoryError)
        return wire.error_message(type(error)(f"{error}; {limit}") if is_memory else error)


class _Code:
    """A user's code, once it is loaded."""

    def __init__(self, counter: mmap.mmap) -> None:
        self._counter = counter
        self._rules = RulePart("default")
        self._custom: CustomReward | None = None

    def load(self, hello: dict[str, Any]) -> dict[str, Any]:
        """Execute the files and find the reward; says what it is called and what was registered."""
        load_all(hello)
        self._rules = RulePart("default", excludes=hello["excludes"])
        wanted = hello["custom"]
        if wanted is None:
            return {"name": None, "kind": None, "data_sources": registered_data_sources()}
        found = load_object(hello["code"], wanted["path"], wanted["name"])
        custom = CustomReward(found, wanted["kwargs"], excludes=hello["excludes"], checks_order=True)
        self._custom = custom
        return {"name": custom.name, "kind": custom.kind, "data_sources": registered_data_sources()}

    def grade(self, message: dict[str, Any]) -> dict[str, Any]:
        """Grade the rows of a message."""
        rows = [wire.row_of(one) for one in message["rows"]]
        if message["by"] == "rule":
            return wire.results_message(self._one_by_one(self._rules, rows), rows)
        assert self._custom is not None
        if self._custom.kind == "hook":
            return wire.results_message(self._one_by_one(self._custom, rows), rows)
        return wire.results_message(self._custom.score(rows), rows)

    def _one_by_one(self, part: Part, rows: Sequence[GradeRow]) -> list[RewardResult]:
        results = []
        for begun, row in enumerate(rows, start=1):
            COUNTER.pack_into(self._counter, 0, begun)
            results += part.score([row])
        return results
