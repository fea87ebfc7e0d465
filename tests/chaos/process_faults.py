"""What a machine does to a process: it is killed, ended, stopped while another takes over; disk or memory are used up.

Each program is run once undisturbed and its boundaries noted; then each fault strikes it at each of them, thinned out
by rule alone (`_thinned`, `_is_new`). A victim is a fork; whoever comes after it is another one.
"""

import errno
import os
import re
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import ratchet.config
from ratchet.cli.local import train
from ratchet.config import RunConfig
from ratchet.errors import RatchetError
from ratchet.grains import entry, program
from ratchet.grains.tasks import (
    EvaluateTask,
    ExportTask,
    PlanTask,
    PreflightTask,
    PreprocessTask,
    SegmentTask,
    StageTask,
    StepTask,
)
from ratchet.store import layout
from ratchet.store.run import Run
from tests.chaos.bench import Finished, Workbench
from tests.chaos.boundaries import AFTER, Probe
from tests.chaos.case import Bench, Case, Outcome
from tests.chaos.forks import Died, Fork
from tests.chaos.holds import Broken, check_chain, expect

KIND = "process"
RUN_ID = "run"
SIGKILL, SIGTERM, SIGSTOP, DISK, MEMORY = "SIGKILL", "SIGTERM", "SIGSTOP", "disk full", "out of memory"
FAULTS = (SIGKILL, SIGTERM, SIGSTOP, DISK, MEMORY)
"""Of memory, what an allocation raises; the kernel's kill for want of it is a SIGKILL."""

_TERMINATED = 128 + signal.SIGTERM
_ENDINGS = (f", {AFTER}", f", {AFTER} (2)", ", ended", ", committed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Something that works on a run from nothing to its export."""

    grain: str
    overrides: tuple[tuple[str, Any], ...] = ()
    is_pipeline: bool = False
    """Whether the tasks of a pipeline run, one after the other; otherwise it is `ratchet train`."""
    beyond: str = ""
    """The program beside which only other kinds of boundaries count."""
    takes_first: bool = False
    """Whether of each kind the first boundary is struck, not the last: before there is a trainer's state."""


_CRITIC = ("algorithm.adv_estimator", "gae")
PROGRAMS = {
    "segment": Program(grain="segment"),
    "step": Program(grain="step"),
    "segment, sampling ahead": Program(grain="segment", overrides=(("trainer.async_level", 1),), takes_first=True),
    "stage": Program(grain="stage"),
    "segment with a critic": Program(grain="segment", overrides=(_CRITIC,), beyond="segment"),
    "stage with a critic": Program(grain="stage", overrides=(_CRITIC,), beyond="stage"),
    "pipeline of segments": Program(grain="segment", is_pipeline=True),
    "pipeline of steps": Program(grain="step", is_pipeline=True),
    # Its pods evaluate the base and the last version alone.
    "pipeline of stages": Program(grain="stage", is_pipeline=True, overrides=(("trainer.test_freq", -1),)),
}


def cases(bench: Bench) -> Iterator[Case]:
    """Yield each fault at each boundary that is not the same as another one.

    SIGKILL, after which nothing of a process runs, strikes each program that `ratchet train` runs at every kind of
    boundary. Each other fault strikes once at every kind, dealt to these programs in turn. Tasks of pipelines do the
    same and end otherwise at SIGTERM alone, which is dealt to them once more.
    """
    bench = _workbench(bench)
    boundaries = {name: thinned(_seen(bench, item), item.takes_first) for name, item in PROGRAMS.items()}
    for name, item in PROGRAMS.items():
        boundaries[name] = {
            kind: label for kind, label in boundaries[name].items() if kind not in boundaries.get(item.beyond, ())
        }
    train = {name: found for name, found in boundaries.items() if not PROGRAMS[name].is_pipeline}
    pipelines = {name: found for name, found in boundaries.items() if PROGRAMS[name].is_pipeline}
    for name, found in train.items():
        yield from (_case(SIGKILL, name, label) for label in found.values())
    for turn, fault in enumerate(FAULTS[1:]):
        yield from (_case(fault, name, label) for name, label in _dealt(train, turn))
    yield from (_case(SIGTERM, name, label) for name, label in _dealt(pipelines, 0))


def thinned(seen: list[tuple[str, str]], takes_first: bool = False) -> dict[str, str]:
    """Return kind -> label of the boundaries (thread, label) that differ: of each kind the last, or the first.

    What says that something is over is left out where more comes on the same thread: up to there nothing is written or
    computed.
    """
    last = dict(seen)
    labels = [label for thread, label in seen if not label.endswith(_ENDINGS) or last[thread] == label]
    return {kind_of(label): label for label in (reversed(labels) if takes_first else labels)}


def kind_of(label: str) -> str:
    """Return what a boundary is, whatever the step, the split of the prompts and the file of a model.

    Step 0 is another kind where it is made in another way: base models are copied, evaluations are not.
    """
    label = re.sub(r"^status/.*\.json", "status", re.sub(r" \(\d+\)$", "", label))
    label = re.sub(r"step-(?!000000/\w+_update)\d{6}", "step-K", label)
    label = re.sub(r"^data/(train|val)", "data/SPLIT", label)
    return re.sub(r"(ATTEMPT/(?:policy|critic|export)/)[^/]+?(\.delta)?,", r"\1FILE\2,", label)


def run(case: Case, bench: Bench) -> Outcome:
    """Strike the program, let another submission finish, and say whether everything holds that must hold."""
    bench = _workbench(bench)
    item = PROGRAMS[dict(case.params)["program"]]
    overrides, root = dict(item.overrides), bench.folder / f"root-{uuid.uuid4().hex}"
    expected = bench.reference(item.grain, **overrides)
    victim = bench.start(lambda: _work(bench, item, root, target=case.boundary, fault=case.fault))
    try:
        if case.fault == SIGSTOP:
            _wait_until_stopped(victim)
        else:
            end = _ended(case.fault, victim)
        found = bench.fork(lambda: bench.finish(str(root), RUN_ID, item.grain, overrides, expected))
        _expect_little_redone(item, bench.config(item.grain, **overrides), found)
        if case.fault == SIGSTOP:
            end = _wake(bench, victim, root, expected)
    except (Broken, Died) as error:
        return Outcome(survived=False, redone_seconds=0.0, redone_stages=0, detail=str(error))
    finally:
        victim.end()
        shutil.rmtree(root, ignore_errors=True)
    return found.outcome(end)


# -- programs ----------------------------------------------------------------------------------------------------------


def _workbench(bench: Bench) -> Workbench:
    assert isinstance(bench, Workbench)
    return bench


def _seen(bench: Workbench, item: Program) -> list[tuple[str, str]]:
    root = bench.folder / f"root-{uuid.uuid4().hex}"
    try:
        return bench.fork(lambda: _work(bench, item, root))
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _case(fault: str, name: str, label: str) -> Case:
    params = (("program", name),)
    return Case(kind=KIND, fault=fault, grain=PROGRAMS[name].grain, boundary=label, params=params)


def _dealt(boundaries: dict[str, dict[str, str]], turn: int) -> Iterator[tuple[str, str]]:
    """Yield (program, label) for each kind of boundary, in one of the programs that have it."""
    for number, kind in enumerate(sorted({kind for found in boundaries.values() for kind in found})):
        names = [name for name, found in boundaries.items() if kind in found]
        name = names[(number + turn) % len(names)]
        yield name, boundaries[name][kind]


def _work(bench: Workbench, item: Program, root: Path, target: str = "", fault: str = "") -> list[tuple[str, str]]:
    """Run the program in this process, a fork, and return the boundaries that it came by."""
    probe = Probe(root, RUN_ID, bench.journal(str(root), RUN_ID), target)
    probe.strike = _strike(fault, probe)
    probe.install()
    config = bench.config(item.grain, **dict(item.overrides))
    if item.is_pipeline:
        _run_tasks(root, config)
    else:
        ratchet.config.load_config = lambda *_: config
        train(root=str(root), run_id=RUN_ID)
    return probe.seen


def _run_tasks(root: Path, config: RunConfig) -> None:
    """Run what the pods of a pipeline run."""
    at = {"root": str(root), "run_id": RUN_ID, "submission_id": "pipeline"}
    text, grain = yaml.safe_dump(config.model_dump(mode="json")), config.trainer.grain
    preflight = PreflightTask(
        root=at["root"], run_id=at["run_id"], submission_id=at["submission_id"], config=text, grain=grain
    )
    program.run("preflight", entry.preflight, preflight)
    program.run("preprocess", entry.preprocess, PreprocessTask(**at))
    if grain == "stage":
        program.run("evaluate", entry.evaluate, EvaluateTask(**at, version="base"))
    for iteration in program.run("plan", entry.plan, PlanTask(**at)):
        start = iteration["start"]
        if grain == "segment":
            program.run("segment", entry.segment, SegmentTask(**at, start=start))
        elif grain == "step":
            program.run("step", entry.step, StepTask(**at, step=start))
        else:
            for name in ("rollout", "reward", "advantage", "policy_update"):
                program.run(name, entry.stage, StageTask(**at, step=start), name=name)
    program.run("evaluate", entry.evaluate, EvaluateTask(**at))
    program.run("checkpoint_export", entry.checkpoint_export, ExportTask(**at))


# -- faults ------------------------------------------------------------------------------------------------------------


def _strike(fault: str, probe: Probe) -> Callable[[], None]:
    def send(number: signal.Signals) -> Callable[[], None]:
        return lambda: os.kill(os.getpid(), number)

    def fill_disk() -> None:
        probe.disk_is_full = True

    def use_up_memory() -> None:
        raise MemoryError(MEMORY)

    faults = {
        SIGKILL: send(signal.SIGKILL),
        SIGTERM: send(signal.SIGTERM),
        SIGSTOP: send(signal.SIGSTOP),
        DISK: fill_disk,
        MEMORY: use_up_memory,
    }
    return faults.get(fault, lambda: None)


def _wait_until_stopped(victim: Fork[Any]) -> None:
    while not victim.is_stopped():
        if victim.poll() is not None:
            raise Broken(f"ended before its boundary: {victim.log()[-2000:]}")
        time.sleep(0.002)


def _ended(fault: str, victim: Fork[Any]) -> str:
    """Return how the victim ended; Broken unless it is as the fault makes it."""
    code = victim.wait()
    if fault == SIGKILL:
        expect(code == -signal.SIGKILL, f"ended with {code} before its boundary: {victim.log()[-2000:]}")
        return ""
    if fault == SIGTERM:
        expect(code in (0, _TERMINATED), f"ended with {code} at SIGTERM: {victim.log()[-2000:]}")
        return f"ended with {code}"
    try:
        victim.result()
    except (MemoryError, OSError, RatchetError) as error:
        said = f"{type(error).__name__}: {error}"
        known = {DISK: os.strerror(errno.ENOSPC), MEMORY: MEMORY}[fault]
        expect(known in said, f"ended without naming the cause: {said}")
        return said
    return "finished"


def _expect_little_redone(item: Program, config: RunConfig, found: Finished) -> None:
    """Raise Broken where more was done again than the grain allows."""
    if item.grain != "segment":
        expect(not found.replayed, f"replayed at {item.grain} grain: {found.replayed}")
        expect(len(found.redone) <= 1, f"more than one stage was redone: {', '.join(found.redone)}")
        return
    early = [f"{stage} {step}" for stage, step in found.replayed if step <= found.states[stage]]
    expect(not early, f"replayed although a later state was there: {', '.join(early)}")
    steps = {step for place in found.redone if (step := layout.parse_step_folder(place.split("/")[0]))}
    most = config.trainer.commit_lag + 1 + config.trainer.async_level
    expect(len(steps) <= most, f"more than {most} steps were redone: {', '.join(found.redone)}")


def _wake(bench: Workbench, victim: Fork[Any], root: Path, expected: dict[str, str]) -> str:
    """Let the victim go on after its successor has finished, and return how it ended."""
    before = _records(root)
    victim.signal(signal.SIGCONT)
    end = "finished"
    try:
        victim.result()
    except (OSError, RatchetError) as error:
        end = f"{type(error).__name__}: {error}"
    after = _records(root)
    changed = sorted(name for name in before if after.get(name) != before[name])
    expect(not changed, f"changed by whoever had lost the run: {', '.join(changed)}")
    # Stopped before its claim, it is the one that comes after the successor. And where prompts were prepared stays true
    # of a run that was lost afterwards.
    harmless = ("owner", "submissions", layout.PREPARED)
    added = sorted(name for name in after.keys() - before if Path(name).parent.name not in harmless)
    expect(not added, f"added by whoever had lost the run: {', '.join(added)}")
    bench.fork(lambda: check_chain(Run(str(root), RUN_ID), expected))
    return end


def _records(root: Path) -> dict[str, bytes]:
    """Path -> bytes of everything that is JSON, but for what lies in attempts: without a manifest it is a leftover."""
    found = {path: path.relative_to(root).as_posix().partition("/")[2] for path in root.rglob("*.json")}
    return {str(path): path.read_bytes() for path, key in found.items() if not layout.parse_attempt(key)}
