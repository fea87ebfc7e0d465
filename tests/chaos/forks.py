"""Work in forks of a process that has imported everything and runs no thread of its own."""

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")

LIMIT_SECONDS = 120.0
"""How long a fork may take before it counts as hung."""


class Died(Exception):
    """A fork ended without an answer."""


class Fork(Generic[Value]):
    """Work in a fork of this process, with its output in a file beside its answer."""

    def __init__(self, work: Callable[[], Value], place: Path) -> None:
        self._answer, self._log = place.with_suffix(".pickle"), place.with_suffix(".log")
        self._status: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._work(work)

    def result(self, seconds: float = LIMIT_SECONDS) -> Value:
        """Return what the work did, or raise what it raised; Died where it ended without either."""
        status = self.wait(seconds)
        try:
            is_done, value = pickle.loads(self._answer.read_bytes())
        except FileNotFoundError:
            raise Died(f"ended with status {status}: {self.log()[-2000:]}") from None
        finally:
            self.forget()
        if is_done:
            return value  # type: ignore[no-any-return]
        raise value

    def wait(self, seconds: float = LIMIT_SECONDS) -> int:
        """Return the exit code, negative for a signal; after `seconds` the fork is killed and Died raised."""
        deadline = time.monotonic() + seconds
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                self.wait()
                raise Died(f"hung for {seconds:.0f} s: {self.log()[-2000:]}")
            time.sleep(0.002)
        return status

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the fork runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def is_stopped(self) -> bool:
        """Whether SIGSTOP has stopped the fork."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0] == "T"

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def log(self) -> str:
        """Return what the fork has written to its standard output and error."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def end(self) -> None:
        """Kill the fork if it still runs, and delete its files."""
        if self.poll() is None:
            self.signal(signal.SIGKILL)
            self.wait()
        self.forget()

    def forget(self) -> None:
        """Delete the fork's files."""
        for path in (self._answer, self._log):
            path.unlink(missing_ok=True)

    def _work(self, work: Callable[[], Value]) -> None:
        """Do the work and end this process, whatever happens: it is a copy of one that has other things to do."""
        code = 1
        try:
            output = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(output, stream)
            answer = _answer(work)
            temporary = self._answer.with_suffix(".part")
            temporary.write_bytes(answer)
            temporary.rename(self._answer)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _answer(work: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps((True, work()))
    except SystemExit:
        raise
    except BaseException as error:
        traceback.print_exc()
        try:
            return pickle.dumps((False, error))
        except Exception:
            return pickle.dumps((False, Died(repr(error))))
