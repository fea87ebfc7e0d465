"""Grades with a user's code in a process of its own, which gets no secrets and has limits of time and memory.

The trap: code that hangs or dies can say nothing, so the worker notes which row it grades in memory that both
processes see. This guards a run against mistakes, not against malice: the worker has the run's user, files and network.
"""

import json
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ratchet.config.rewards import CustomRewardConfig
from ratchet.errors import ConfigError, DataError
from ratchet.rewards import wire
from ratchet.rewards.data_proto import GradeRow, place_of
from ratchet.rewards.results import RewardResult

COUNTER = struct.Struct("<q")
"""Rows of this message that were begun, as the worker notes them."""

_SECTION = "custom_reward_function"
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from ratchet.rewards.{} import main; main()"
_LOAD_S = 120.0
"""For loading the code, or the timeout where that is longer: an interpreter and its imports take their time."""
_LEAVE_S = 5.0
_LONGEST_POLL_S = 0.25
_PASSED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "XDG_CACHE_HOME"),
        *("PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH"),
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
        *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
        *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "TRANSFORMERS_OFFLINE", "TORCH_HOME"),
        *("NLTK_DATA", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    }
)
"""Environment variables that are places, locale and limits. What holds a login (proxies, tokens) is not among them."""


class Worker:
    """The process that holds a run's user code; it stays up between batches, and is started anew after a failure."""

    def __init__(
        self, config: CustomRewardConfig, code: Sequence[Mapping[str, str]], *, custom: bool, excludes: bool = False
    ) -> None:
        """Start it and have it load `code`, and with `custom` the reward that the config names.

        `excludes` has it mark rows whose reward raises EngineError. ConfigError where anything cannot be loaded.
        """
        self._config = config
        self._environment = environment(config.env)
        wanted = {"path": config.path, "name": config.name, "kwargs": config.reward_kwargs} if custom else None
        self._hello = {
            "code": [dict(entry) for entry in code],
            "custom": wanted,
            "excludes": excludes,
            "memory_gib": config.memory_gib,
        }
        self._lock = threading.Lock()
        self._process: Process | None = None
        self.name: str = config.name
        self.data_sources: frozenset[str] = frozenset()
        """Those whose rules the code has registered."""
        self._is_batch = False
        self._begin()

    def score(self, rows: Sequence[GradeRow], *, by: str) -> list[RewardResult]:
        """One result per row by the `custom` reward or by each row's `rule`, joined by number.

        DataError and NumericsError name the rows: what the code raised or returned, that it ended or did not end.
        """
        is_batch = self._is_batch and by == "custom"
        name = self.name if by == "custom" else "rule"
        try:
            messages = [wire.row_message(row, with_tokens=is_batch) for row in rows]
            body = {"by": by, "rows": messages}
            json.dumps([message["extra_info"] for message in messages])
        except (TypeError, ValueError) as error:
            raise DataError(f"{place_of(rows)}: extra_info cannot be written as JSON ({error})") from error
        with self._lock:
            if self._process is not None and self._process.is_gone:
                self._stop()
            if self._process is None:
                self._begin()

            def where(begun: int) -> str:
                return place_of(rows) if is_batch or begun < 1 else rows[min(begun, len(rows)) - 1].place

            unit = f"one {'call' if is_batch else 'row'}, {_SECTION}.timeout"
            answer = self._asked(body, where, f"the reward {name}", self._config.timeout, unit)
        wire.raise_error(answer)
        return wire.results_of(answer, rows, name)

    def close(self) -> None:
        """End the process, also while it grades; a later `score` starts another."""
        self._stop()

    def _begin(self) -> None:
        self._process = Process(self._environment, "worker")
        try:
            place = f"{_SECTION}.path {self._config.path}"
            timeout = max(_LOAD_S, self._config.timeout)
            answer = self._asked(self._hello, lambda _: place, "its code", timeout, "loading")
            wire.raise_error(answer)
        except DataError as error:
            self._stop()
            raise ConfigError(str(error)) from error
        except BaseException:
            self._stop()
            raise
        self.name, self._is_batch = answer["name"] or self.name, answer["kind"] == "batch"
        self.data_sources = frozenset(answer["data_sources"])

    def _asked(
        self, message: Mapping[str, Any], where: Callable[[int], str], what: str, timeout: float, unit: str
    ) -> dict[str, Any]:
        process = self._process
        assert process is not None
        try:
            return process.asked(message, timeout)
        except TimeoutError as error:
            raise DataError(
                f"{where(process.begun)}: {what} has not ended within {timeout:g} s ({unit}); its process was stopped"
            ) from error
        except ValueError as error:
            raise DataError(f"{where(process.begun)}: {what} broke the process that grades ({error})") from error
        except (EOFError, OSError) as error:
            said = process.how_it_ended()
            memory = f"; it may use {self._config.memory_gib:g} GiB ({_SECTION}.memory_gib)"
            raise DataError(
                f"{where(process.begun)}: {what} ended the process that grades ({said})"
                f"{memory if 'signal' in said else ''}"
            ) from error
        finally:
            # What was cut short would answer the next question with the answer to this one.
            if not process.is_idle:
                self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.stop()


class Process:
    """One worker process and what connects it to this one."""

    def __init__(self, environment: Mapping[str, str], program: str) -> None:
        """`program` is the module of this package whose `main` it runs."""
        ours, theirs = socket.socketpair()
        held, lifeline = os.pipe()
        with tempfile.TemporaryFile() as shared:
            shared.truncate(COUNTER.size)
            self._counter = mmap.mmap(shared.fileno(), COUNTER.size)
            fds = (theirs.fileno(), held, shared.fileno())
            try:
                process = subprocess.Popen(
                    [sys.executable, "-u", "-c", _START.format(program), json.dumps(sys.path), *map(str, fds)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what user code prints belongs to no command's output
                    pass_fds=fds,
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                os.close(lifeline)
                raise
            finally:
                theirs.close()
                os.close(held)
        self._socket, self._process = ours, process
        self._idle = threading.Event()
        self._idle.set()
        self.stop = weakref.finalize(self, _end, process, ours, lifeline, self._idle)
        """Ends it, once; so does the end of this object or of this process."""

    @property
    def begun(self) -> int:
        """Rows of the last message that it has begun."""
        return int(COUNTER.unpack_from(self._counter)[0])

    @property
    def is_idle(self) -> bool:
        """Whether it has answered everything that it was asked."""
        return self._idle.is_set()

    @property
    def is_gone(self) -> bool:
        return self._process.poll() is not None

    def asked(self, message: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Its answer. TimeoutError where `timeout` seconds pass without another row begun, EOFError where it ends."""
        self._idle.clear()
        COUNTER.pack_into(self._counter, 0, 0)
        self._socket.settimeout(timeout)
        wire.send(self._socket, message)
        begun, since = 0, time.monotonic()
        answers = select.poll()
        answers.register(self._socket, select.POLLIN)
        while not answers.poll(1000 * min(_LONGEST_POLL_S, timeout / 4)):
            if self.begun != begun:
                begun, since = self.begun, time.monotonic()
            elif time.monotonic() - since > timeout:
                raise TimeoutError
        answer = wire.receive(self._socket)
        self._idle.set()
        return answer

    def how_it_ended(self) -> str:
        """In words, once its socket has closed."""
        try:
            status = self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"


def _end(process: "subprocess.Popen[bytes]", end: socket.socket, lifeline: int, idle: threading.Event) -> None:
    # The end of the conversation lets an idle worker leave; the lifeline's end ends it wherever it is.
    end.close()
    if idle.is_set():
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVE_S)
    os.close(lifeline)
    # Whatever it has started goes with it.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment(names: Sequence[str]) -> dict[str, str]:
    """What the worker gets of this process's environment; ConfigError for a name that is not set."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ConfigError(f"{_SECTION}.env: the environment variable {missing[0]} is not set")
    return {
        name: value for name, value in os.environ.items() if name in _PASSED or name.startswith("LC_") or name in names
    }


class SandboxedReward:
    """The reward that custom_reward_function names, graded by a worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def score(self, rows: Sequence[GradeRow]) -> list[RewardResult]:
        """One result per row, in order."""
        return self._worker.score(rows, by="custom")

    def close(self) -> None:
        """Stop the worker."""
        self._worker.close()
