"""Python programs as forks of a process that has imported everything: `Warm`, and `python -m tests.warm`, its process.

A new Python imports torch, transformers, kfp and MLflow, for longer than a tiny model trains. A fork has them. Of a
compiled pipeline on kfp.local every task is such a fork, too: for kfp.local, starting Python is what a task mostly is.

Trap: whatever a new process alone would show is not seen here, as a module that only another program imports, or a
variable that is read at import. Other tests start real ones: `test_e2e_rehearsal.py` through kfp.local as it is.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[1]


class Warm:
    """The process, from the side of the tests: start programs in it, each a session and a process group of its own."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair()
        self._pending = b""
        self._ended: dict[int, int] = {}
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.warm", str(other.fileno())],
                cwd=REPOSITORY,
                # Digests depend on the number of threads, which torch takes from here once and for all.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )

    def start(self, log: Path, environment: Mapping[str, str], module: str, *arguments: str) -> "Program":
        """Start `python -m module arguments...` in the repository; all that it says is added to `log`.

        `python -c` is the module "-c".
        """
        job = {"log": str(log), "environment": dict(environment), "argv": [module, *arguments]}
        self._socket.sendall(json.dumps(job).encode() + b"\n")
        while (told := self._read(None)) is not None:
            if "started" in told:
                return Program(self, told["started"])
        raise AssertionError("the warm process has ended")

    def run(self, log: Path, environment: Mapping[str, str], module: str, *arguments: str) -> int:
        """Run it to its end; return its exit code, negative for a signal."""
        return self.start(log, environment, module, *arguments).wait()

    def status(self, pid: int, seconds: float | None) -> int | None:
        """Return the exit code of a program, None where it has not ended within `seconds`."""
        while pid not in self._ended and self._read(seconds) is not None:
            pass
        return self._ended.get(pid)

    def close(self) -> None:
        """End the process, and with it whatever still runs in it."""
        self._socket.close()
        self._process.wait(60)

    def _read(self, seconds: float | None) -> dict[str, int] | None:
        """Return the next message, None where none comes within `seconds`; the end of a program is noted."""
        while b"\n" not in self._pending:
            if not select.select([self._socket], [], [], seconds)[0]:
                return None
            found = self._socket.recv(4096)
            assert found, "the warm process has ended"
            self._pending += found
        line, _, self._pending = self._pending.partition(b"\n")
        told: dict[str, int] = json.loads(line)
        if "ended" in told:
            self._ended[told["ended"]] = told["code"]
        return told


class Program:
    """One that was started, as subprocess.Popen has it."""

    def __init__(self, warm: Warm, pid: int) -> None:
        self._warm, self.pid = warm, pid

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        return self._warm.status(self.pid, 0)

    def wait(self, seconds: float | None = None) -> int:
        """Return its exit code, negative for a signal."""
        code = self._warm.status(self.pid, seconds)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), seconds or 0)
        return code


# -- the process -------------------------------------------------------------------------------------------------------


IMPORTED = (
    *("torch", "transformers.models.llama.modeling_llama", "mlflow", "pyarrow.dataset", "kfp.dsl.executor_main"),
    *("pipelines.local", "ratchet.cli.app", "ratchet.cli.local", "ratchet.grains.entry", "ratchet.grains.loop"),
    *("ratchet.engines.open_sampler", "ratchet.engines.sampler_hf", "ratchet.engines.policy_trainer"),
    *("ratchet.engines.export", "ratchet.engines.trainer_state", "ratchet.store.s3_client"),
)


def _import_everything() -> None:
    # No import leaves garbage to speak of, and what is frozen is never looked at again: neither here nor in forks,
    # where looking at it would copy its memory.
    gc.disable()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    from kfp.local import subprocess_task_handler

    subprocess_task_handler.run_local_subprocess = _run_task


def _fork(work: Callable[[], Any]) -> int:
    """Do the work in a fork; return its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    _end_with(work)


def _end_with(work: Callable[[], Any]) -> NoReturn:
    """Do the work and end this process as Python would; nothing of what it is a fork of may be unwound."""
    status = 1
    try:
        work()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_task(full_command: list[str], env_vars: dict[str, str] | None = None) -> int:
    """Run a lightweight component's command, `sh -ec SCRIPT CODE ARGUMENTS...`, without the shell and a new Python."""
    from kfp.dsl import executor_main

    code, arguments = full_command[3], full_command[4:]

    def work() -> None:
        os.environ |= {"_KFP_RUNTIME": "true", **(env_vars or {})}
        program = Path(tempfile.mkdtemp()) / "ephemeral_component.py"
        program.write_text(code, encoding="utf-8")
        sys.argv = ["executor_main", "--component_module_path", str(program), *arguments]
        executor_main.executor_main()

    return os.waitstatus_to_exitcode(os.waitpid(_fork(work), 0)[1])


def _run_program(job: dict[str, Any], channel: socket.socket) -> None:
    channel.close()
    os.setsid()
    os.chdir(REPOSITORY)
    output = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ |= job["environment"]
    sys.argv = job["argv"]
    if sys.argv[0] == "-c":
        exec(sys.argv[1], {"__name__": "__main__"})
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _serve(channel: socket.socket) -> None:
    """Start what is asked for and tell of every end, until the tests hang up."""
    names = [Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in os.listdir("/proc/self/task")]
    # jemalloc, pyarrow's, knows of forks.
    assert len([name for name in names if name != "jemalloc_bg_thd"]) == 1, f"threads {names}: a fork may hang"
    programs: set[int] = set()
    pending = b""

    def tell(**what: int) -> None:
        channel.sendall(json.dumps(what).encode() + b"\n")

    while True:
        if select.select([channel], [], [], 0.02 if programs else None)[0]:
            found = channel.recv(65536)
            if not found:
                break
            *lines, pending = (pending + found).split(b"\n")
            for line in lines:
                job = json.loads(line)
                pid = _fork(lambda job=job: _run_program(job, channel))  # type: ignore[misc]
                programs.add(pid)
                tell(started=pid)
        for pid in sorted(programs):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                programs.remove(pid)
                tell(ended=pid, code=os.waitstatus_to_exitcode(status))
    for pid in programs:
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    _import_everything()
    _serve(socket.socket(fileno=int(sys.argv[1])))
