"""Several live processes at work on one run, and puts whose outcome a process does not know.

A put's boundaries are recorded from an undisturbed run. What must hold: whoever has lost the run stops with a message
that names who has it, nothing that was published is touched by it, and the run is finished as if there had been one.
"""

import hashlib
import os
import re
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.errors import CommitConflictError, OwnershipLostError, StoreError, StoreUnavailableError
from ratchet.grains import loop
from ratchet.grains.session import open_session, submit
from ratchet.store.local import LocalStore
from ratchet.store.run import Run
from ratchet.store.verification import read_chain
from tests.chaos.bench import Broken, Died, Fork, Workbench, committed, expect
from tests.chaos.boundaries import BEFORE, Probe
from tests.chaos.case import Case, Outcome
from tests.chaos.process_faults import thinned

KIND = "rivals"
RUN_ID = "run"
GRAINS = ("segment", "step", "stage")
HOUR = 3600.0

WOKEN = (
    "woken after its successor finished",
    "woken after its successor finished, whose clock is 5 h behind",
    "woken after its successor finished, whose clock is 5 h ahead",
    "woken after its successor at another grain finished",
    "woken after two successors at once",
)
BOTH_ALIVE = ("woken while its successor is at work", "woken while its successor is at work, clocks 30 h apart")
AT_ONCE = ("two at once", "three at once", "three at once, clocks hours apart", "two at once at different grains")
ONE_SUBMISSION = "two processes of one submission"
LOST = (
    "response lost, the put seems refused",
    "response lost, storage seems not to answer",
    "response lost, noticed after a successor finished",
)
NO_CREATE_ONLY = ("storage without create-only puts, new run", "storage without create-only puts, run that exists")


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """A process that trains the run."""

    grain: str
    target: str = ""
    """The boundary at which it does what `does` says."""
    does: str = ""
    """"stop": it stops itself; "tell": it tells those who wait for it; "refused", "silent": what the put answers."""
    clock: float = 0.0
    """Seconds by which its clock is wrong."""
    submission_id: str | None = None


def cases(bench: Workbench, grains: Sequence[str] = GRAINS) -> Iterator[Case]:
    """Yield each fault at puts of each kind, dealt to grains and to variants in turn."""
    for turn, grain in enumerate(grains):
        seen = bench.fork(lambda grain=grain: _seen(bench, grain))
        puts = [
            label
            for label in thinned(seen).values()
            if re.search(rf", {BEFORE}( \(\d+\))?$", label) and "delete" not in label
        ]
        creations = [label for label in puts if _is_create_only(label)]
        for index, label in enumerate(puts):
            yield _case(WOKEN[(index + turn) % len(WOKEN)], grain, label)
        for index, label in enumerate(puts[turn :: len(GRAINS)]):
            other = puts[(index * 7 + 5 * turn) % len(puts)]
            yield _case(BOTH_ALIVE[index % 2], grain, label, other)
        for index, label in enumerate(creations):
            yield _case(AT_ONCE[(index + turn) % len(AT_ONCE)], grain, label)
            yield _case(LOST[(index + turn) % len(LOST)], grain, label)
            yield _case(LOST[(index + turn + 1) % len(LOST)], grain, label)
        for label in creations[3 + turn :: 4]:
            yield _case(ONE_SUBMISSION, grain, label)
        for fault in NO_CREATE_ONLY:
            yield _case(fault, grain, "submission")


def run(case: Case, bench: Workbench) -> Outcome:
    """Let the processes work, and say whether one won and the others were told."""
    root = bench.folder / f"root-{uuid.uuid4().hex}"
    bench.reference(case.grain)
    race = Race(bench, root, case)
    try:
        detail = race.of_kind()()
        outcome = bench.check(str(root), RUN_ID, case.grain)
    except (Broken, Died) as error:
        return Outcome(survived=False, redone_seconds=0.0, redone_stages=0, detail=str(error))
    finally:
        race.end()
        shutil.rmtree(root, ignore_errors=True)
    return Outcome(
        survived=outcome.survived,
        redone_seconds=outcome.redone_seconds,
        redone_stages=outcome.redone_stages,
        detail="; ".join(filter(None, [detail, outcome.detail])),
    )


def _case(fault: str, grain: str, label: str, other: str = "") -> Case:
    boundary = f"{label}; the other {other}" if other else label
    return Case(kind=KIND, fault=fault, grain=grain, boundary=boundary, params=(("label", label), ("other", other)))


def _is_create_only(label: str) -> bool:
    return bool(re.match(r"run\.json|owner/|submissions/|.*/manifest\.json", label))


def _seen(bench: Workbench, grain: str) -> list[tuple[str, str]]:
    root = bench.folder / f"root-{uuid.uuid4().hex}"
    try:
        return _work(bench, root, Runner(grain=grain))
    finally:
        shutil.rmtree(root, ignore_errors=True)


# -- one process -------------------------------------------------------------------------------------------------------


def _work(bench: Workbench, root: Path, runner: Runner) -> list[tuple[str, str]]:
    """Train, or resume, in this process, a fork, and return the boundaries that it came by."""
    now = time.time
    time.time = lambda: now() + runner.clock
    probe = Probe(root, RUN_ID, bench.journal(str(root), RUN_ID), runner.target)
    probe.install()
    if runner.does == "stop":
        probe.strike = lambda: os.kill(os.getpid(), signal.SIGSTOP)
    elif runner.does == "tell":
        probe.strike = _mark(root).touch
    elif runner.does in ("refused", "silent", "stopped and refused"):
        _lose_a_response(probe, runner.does)
    config = bench.config(runner.grain)
    run = submit(str(root), RUN_ID, config, submission_id=runner.submission_id)
    with open_session(run, config) as session:
        loop.train(session)
    return probe.seen


def _lose_a_response(probe: Probe, does: str) -> None:
    """Let the put at the boundary succeed, and its caller see what is seen when the response gets lost."""
    is_struck = []
    probed = LocalStore.put_create

    def put_create(store: LocalStore, key: str, data: bytes) -> bool:
        before = len(is_struck)
        created = probed(store, key, data)
        if len(is_struck) == before:
            return created
        if does == "silent":
            raise StoreUnavailableError(f"cannot write {key!r} in {store.uri}: no answer")
        if does == "stopped and refused":
            os.kill(os.getpid(), signal.SIGSTOP)
        # boto3 asks again, and is told that there is one.
        return False

    probe.strike = lambda: is_struck.append(True)
    LocalStore.put_create = put_create  # type: ignore[method-assign]


def _ignore_create_only() -> None:
    """Let create-only puts replace what is there, as servers do that do not know If-None-Match."""

    def put_create(store: LocalStore, key: str, data: bytes) -> bool:
        store.put(key, data)
        return True

    LocalStore.put_create = put_create  # type: ignore[method-assign]


def _mark(root: Path) -> Path:
    return root.with_name(f"{root.name}-mark")


# -- several -----------------------------------------------------------------------------------------------------------


class Race:
    """The processes of one case. Each method lets them work until all have ended, and says how they did."""

    def __init__(self, bench: Workbench, root: Path, case: Case) -> None:
        self._bench, self._root, self._case = bench, root, case
        self._label, self._other = (dict(case.params)[name] for name in ("label", "other"))
        self._forks: list[Fork[Any]] = []

    def of_kind(self) -> Callable[[], str]:
        """Return the method for this case's fault."""
        fault = self._case.fault
        methods = [
            (WOKEN, self.woken),
            (BOTH_ALIVE, self.both_alive),
            (AT_ONCE, self.at_once),
            ((ONE_SUBMISSION,), self.one_submission),
            (LOST, self.lost),
            (NO_CREATE_ONLY, self.refused),
        ]
        return next(method for faults, method in methods if fault in faults)

    def woken(self) -> str:
        """One stops before a put; its successor, or two at once, finish; then it goes on."""
        fault, grain = self._case.fault, self._case.grain
        first = self._start(target=self._label, does="stop")
        self._wait_until_stopped(first)
        clock = -5 * HOUR if "behind" in fault else 5 * HOUR if "ahead" in fault else 0.0
        other = GRAINS[(GRAINS.index(grain) + 1) % 3] if "another grain" in fault else grain
        rivals = [self._start(grain=other, clock=clock) for _ in range(2 if "two" in fault else 1)]
        return "; ".join([*self._ends(rivals), self._wake(first)])

    def both_alive(self) -> str:
        """One stops before a put, its successor before another; the first goes on, then the successor."""
        first = self._start(target=self._label, does="stop")
        self._wait_until_stopped(first)
        clock = -30 * HOUR if "clocks" in self._case.fault else 0.0
        second = self._start(target=self._other, does="stop", clock=clock)
        while not second.is_stopped() and second.poll() is None:
            time.sleep(0.002)
        said = self._wake(first, is_over=False)
        if second.poll() is None:
            second.signal(signal.SIGCONT)
        ends = [said, self._end(second)]
        expect("finished" in ends, f"nobody finished: {ends}")
        return "; ".join(ends)

    def at_once(self) -> str:
        """The others start when the first comes by a put, and nobody waits for anybody."""
        fault = self._case.fault
        first = self._start(target=self._label, does="tell")
        self._wait_until_told(first)
        count = 3 if "three" in fault else 2
        grains = [GRAINS[(GRAINS.index(self._case.grain) + n * ("different" in fault)) % 3] for n in range(1, count)]
        clocks = [(-7.0, 11.0)[n % 2] * HOUR * ("clocks" in fault) for n in range(1, count)]
        rivals = [self._start(grain=grain, clock=clock) for grain, clock in zip(grains, clocks, strict=True)]
        return "; ".join(self._ends([first, *rivals]))

    def one_submission(self) -> str:
        """A pod that was believed dead and the one that replaced it: both hold the same claim."""
        first = self._start(target=self._label, does="tell", submission_id="same")
        self._wait_until_told(first)
        second = self._start(submission_id="same")
        ends = []
        for fork in (first, second):
            try:
                fork.result()
                ends.append("finished")
            except CommitConflictError as error:
                expect("another process does this work" in str(error), f"stopped without naming the cause: {error}")
                ends.append(str(error))
        expect("finished" in ends, f"none of two processes of one submission finished: {ends}")
        expect(Run(str(self._root), RUN_ID).newest_epoch() == 1, "one submission made several claims")
        return "; ".join(ends)

    def lost(self) -> str:
        """A put succeeds, and whoever made it sees that it was refused, or nothing."""
        fault = self._case.fault
        does = "silent" if "not to answer" in fault else "stopped and refused" if "successor" in fault else "refused"
        first = self._start(target=self._label, does=does)
        if does == "stopped and refused":
            self._wait_until_stopped(first)
            return "; ".join([*self._ends([self._start()]), self._wake(first)])
        try:
            first.result()
        except StoreUnavailableError as error:
            # Outside a segment nobody asks storage again: the program does, or the next submission.
            expect(does == "silent", f"a put whose response was lost ended the run: {error}")
            return str(error)
        except (StoreError, Died) as error:
            raise Broken(f"a put whose response was lost ended the run: {error!r}") from error
        return "finished"

    def refused(self) -> str:
        """Storage that cannot keep two owners apart takes no run."""
        bench, root = self._bench, self._root
        is_old = "exists" in self._case.fault
        if is_old:
            bench.fork(lambda: _work(bench, root, Runner(grain=self._case.grain)))
        before = _published(root)

        def work() -> None:
            _ignore_create_only()
            submit(str(root), RUN_ID, bench.config(self._case.grain))

        try:
            bench.fork(work)
        except StoreError as error:
            expect("ignores create-only puts" in str(error), f"refused without naming the cause: {error}")
            said = str(error)
        else:
            raise Broken("a store without create-only puts was not refused")
        after = _published(root)
        other = sorted(name for name in before if after.get(name, ("",))[0] != before[name][0])
        expect(not other, f"changed in a run that was refused: {', '.join(other)}")
        expect(not any(name.startswith("owner/") for name in after.keys() - before), "a run was claimed nevertheless")
        if not is_old:
            # The very same storage, now with create-only puts.
            bench.fork(lambda: _work(bench, root, Runner(grain=self._case.grain)))
        return said

    def end(self) -> None:
        """End every process that is still there."""
        for fork in self._forks:
            fork.end()
        _mark(self._root).unlink(missing_ok=True)

    # -- what they did -------------------------------------------------------------------------------------------------

    def _start(self, **settings: Any) -> Fork[Any]:
        runner = Runner(**{"grain": self._case.grain, **settings})
        fork = self._bench.start(lambda: _work(self._bench, self._root, runner))
        self._forks.append(fork)
        return fork

    def _wait_until_stopped(self, fork: Fork[Any]) -> None:
        while not fork.is_stopped():
            if fork.poll() is not None:
                raise Broken(f"ended before its boundary: {fork.log()[-2000:]}")
            time.sleep(0.002)

    def _wait_until_told(self, fork: Fork[Any]) -> None:
        while not _mark(self._root).exists():
            if fork.poll() is not None:
                raise Broken(f"ended before its boundary: {fork.log()[-2000:]}")
            time.sleep(0.002)

    def _ends(self, forks: list[Fork[Any]]) -> list[str]:
        """Wait for all; one must have finished, and every other one name who has the run."""
        ends = [self._end(fork) for fork in forks]
        expect("finished" in ends, f"nobody finished: {ends}")
        return ends

    def _end(self, fork: Fork[Any]) -> str:
        """Return how a process ended: it finished, or names a later claim, made by one of the others."""
        try:
            fork.result()
        except OwnershipLostError as error:
            named = re.search(r"epoch (\d+) lost it to epoch (\d+) \(process (\d+) on (\S+)\)", str(error))
            expect(named is not None, f"lost the run without naming who has it: {error}")
            assert named is not None
            mine, newest, pid, host = int(named[1]), int(named[2]), int(named[3]), named[4]
            known = {other.pid for other in self._forks if other is not fork}
            expect(mine < newest and host == socket.gethostname() and pid in known, f"names another one: {error}")
            return str(error)
        except (StoreError, Died) as error:
            raise Broken(f"ended otherwise than by losing the run: {error!r}") from error
        return "finished"

    def _wake(self, fork: Fork[Any], *, is_over: bool = True) -> str:
        """Let a stopped process go on, and return how it ended.

        Nothing that is published may change by that, and where the run is over, nothing may come to it.
        """
        before = _published(self._root)
        chain = committed(Run(str(self._root), RUN_ID))
        fork.signal(signal.SIGCONT)
        said = self._end(fork)
        if said == "finished" and not is_over:
            # Its rival had not claimed the run yet: all of it was its own to do.
            return said
        after = _published(self._root)
        touched = sorted(name for name in before if after.get(name) != before[name])
        expect(not touched, f"touched by whoever had lost the run: {', '.join(touched)}")
        added = committed(Run(str(self._root), RUN_ID)).keys() - chain.keys()
        # Stopped between its last look at the claims and its put, it may still publish what nobody else has yet.
        under_way = set() if is_over else {self._label.partition("/manifest.json")[0]}
        expect(added <= under_way, f"published by whoever had lost the run: {', '.join(sorted(added))}")
        return said


def _published(root: Path) -> dict[str, tuple[str, int]]:
    """Path -> digest and time of change of everything in the run that a manifest names or that is no attempt's."""
    place = root / RUN_ID
    if not place.is_dir():
        return {}
    over = {info.key for one in read_chain(Run(str(root), RUN_ID)).leftovers for info in one.objects}
    found = {}
    for path in place.rglob("*"):
        key = path.relative_to(place).as_posix()
        if path.is_file() and not path.name.startswith(".tmp-") and key not in over:
            found[key] = (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
    return found
