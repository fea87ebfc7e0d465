"""The program that a pod runs: its exit code, its status file, its retries, its end by a signal."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tenacity

from ratchet.errors import (
    BudgetError,
    ConfigError,
    DataError,
    EngineError,
    NotCommittedError,
    NumericsError,
    OwnershipLostError,
    RatchetError,
    RetiredError,
    StoreError,
    StoreUnavailableError,
)
from ratchet.grains import distributed, program
from ratchet.grains.exits import ExitCode, exit_code
from ratchet.grains.status.tasks import read_statuses
from ratchet.grains.tasks import RunTask, StageTask
from ratchet.store.objects import open_store
from ratchet.store.status import TaskStatus

REPOSITORY = Path(__file__).resolve().parents[3]


def _task(root: Path) -> StageTask:
    return StageTask(root=str(root), run_id="run", submission_id="job", step=3)


def _status(root: Path) -> TaskStatus:
    (status,), _ = read_statuses(open_store(str(root / "run")), "job")
    return status


def _raise(error: BaseException) -> Any:
    def work(task: RunTask) -> None:
        raise error

    return work


def test_work_that_succeeds_returns_and_says_so(tmp_path: Path) -> None:
    def work(task: StageTask, *, more: int) -> int:
        assert _status(tmp_path).state == "running"
        program.say("nothing to weigh")
        return task.step + more

    assert program.run("advantage", work, _task(tmp_path), more=4) == 7
    status = _status(tmp_path)
    assert (status.task, status.step, status.state, status.exit_code) == ("advantage", 3, "succeeded", 0)
    assert status.note == "nothing to weigh"
    assert status.started <= status.updated


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no such key"), ExitCode.BAD_INPUT),
        (NotCommittedError("step 2 is not committed"), ExitCode.NOT_COMMITTED),
        (OwnershipLostError("epoch 2 has it"), ExitCode.OWNERSHIP_LOST),
        (NumericsError("loss is nan"), ExitCode.NUMERICS),
        (EngineError("no weights"), ExitCode.ENGINE),
        (StoreError("damaged"), ExitCode.STORED),
        (BudgetError("10 GiB of 9"), ExitCode.BUDGET),
        (RetiredError("policy of step 2 was deleted on purpose"), ExitCode.STORED),
        (RuntimeError("CUDA out of memory"), ExitCode.INTERNAL),
    ],
)
def test_a_failure_ends_the_process_with_its_code_and_leaves_its_cause(
    tmp_path: Path, error: Exception, code: ExitCode
) -> None:
    with pytest.raises(SystemExit) as ended:
        program.run("rollout", _raise(error), _task(tmp_path))
    assert ended.value.code == code
    status = _status(tmp_path)
    assert (status.state, status.exit_code, status.message) == ("failed", code, str(error))
    assert status.error == type(error).__name__
    assert status.advice
    assert exit_code(error) == code


def test_every_error_of_ours_has_a_code_of_its_kind() -> None:
    def kinds(kind: type[RatchetError]) -> list[type[RatchetError]]:
        return [kind, *(one for child in kind.__subclasses__() for one in kinds(child))]

    codes = {kind: exit_code(kind("x")) for kind in kinds(RatchetError)}
    # Doing the same again helps for storage that does not answer, and perhaps for what nobody foresaw.
    assert [kind for kind, code in codes.items() if code >= ExitCode.STORAGE] == [StoreUnavailableError]


def test_storage_that_does_not_answer_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(tenacity.nap.time, "sleep", pauses.append)
    seen = []

    def work(task: RunTask) -> str:
        seen.append(_status(tmp_path).attempt)
        if len(seen) < 3:
            raise StoreUnavailableError("503")
        return "done"

    assert program.run("rollout", work, _task(tmp_path)) == "done"
    assert seen == [1, 2, 3]
    assert pauses == [10, 20]

    with pytest.raises(SystemExit) as ended:
        program.run("rollout", _raise(StoreUnavailableError("503")), _task(tmp_path))
    assert ended.value.code == ExitCode.STORAGE
    assert pauses == [10, 20, 10, 20, 40]


def test_what_cannot_help_is_not_tried_again(tmp_path: Path) -> None:
    calls = []

    def work(task: RunTask) -> None:
        calls.append(task)
        raise NotCommittedError("the fence")

    with pytest.raises(SystemExit):
        program.run("rollout", work, _task(tmp_path))
    assert len(calls) == 1


def test_a_place_that_can_hold_no_status_stops_no_work(tmp_path: Path) -> None:
    task = RunTask(root=str(tmp_path), run_id="../beside", submission_id="job")
    assert program.run("plan", lambda task: "done", task) == "done"
    assert not list(tmp_path.iterdir())


def test_a_pod_that_is_ended_says_so_within_a_second(tmp_path: Path) -> None:
    text = f"""
import time
from ratchet.grains import distributed, program
from ratchet.grains.tasks import StageTask
def work(task):
    print("working", flush=True)
    time.sleep(60)
program.run("rollout", work, StageTask(root={str(tmp_path)!r}, run_id="run", submission_id="job", step=3))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", text], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait() == ExitCode.TERMINATED
    process.stdout.close()
    assert time.monotonic() - started < 2
    assert (_status(tmp_path).state, _status(tmp_path).exit_code) == ("terminated", 143)


def test_a_signal_that_is_taken_for_another_fault_is_a_signal(tmp_path: Path) -> None:
    def work(task: RunTask) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit as error:
            raise DataError("the reward raised SystemExit") from error

    with pytest.raises(SystemExit) as ended:
        program.run("rollout", work, _task(tmp_path))
    assert ended.value.code == ExitCode.TERMINATED
    assert (_status(tmp_path).state, _status(tmp_path).exit_code) == ("terminated", 143)


def test_a_task_that_runs_gives_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "HEARTBEAT", 0.02)

    def work(task: RunTask) -> None:
        first = _status(tmp_path).updated
        deadline = time.monotonic() + 5
        while _status(tmp_path).updated == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    program.run("rollout", work, _task(tmp_path))
    last = _status(tmp_path)
    time.sleep(0.1)
    assert _status(tmp_path) == last, "nothing beats once the work is done"


def test_an_interrupted_task_is_ended_and_nothing_beats_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "HEARTBEAT", 0.02)
    with pytest.raises(KeyboardInterrupt):
        program.run("rollout", _raise(KeyboardInterrupt()), _task(tmp_path))
    last = _status(tmp_path)
    assert last.state == "terminated"
    time.sleep(0.1)
    assert _status(tmp_path) == last


@pytest.mark.parametrize(("level", "expected"), [("debug", 10), ("", 20), ("20", 20), ("WARNING", 30), ("loud", 20)])
def test_a_log_level_that_there_is_not_stops_no_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, expected: int
) -> None:
    monkeypatch.setenv("RATCHET_LOG_LEVEL", level)
    assert program.run("plan", lambda task: "done", _task(tmp_path)) == "done"
    assert logging.getLogger("ratchet").level == expected


def test_the_cause_of_a_trainers_process_reaches_the_one_that_launched_it(tmp_path: Path) -> None:
    assert distributed._read_failure(tmp_path) is None
    distributed._write_failure(tmp_path, OwnershipLostError("lost it to epoch 2"))
    distributed._write_failure(tmp_path, EngineError("a consequence on another rank"))
    told = distributed._read_failure(tmp_path)
    assert isinstance(told, OwnershipLostError)
    assert str(told) == "lost it to epoch 2"
