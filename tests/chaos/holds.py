"""What must hold of a run after every fault, and how much of it was made again."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ratchet.stages import recovery
from ratchet.store import artifacts, layout, leftovers, verification
from ratchet.store.manifest import Manifest
from ratchet.store.objects import TEMPORARY
from ratchet.store.run import Run
from tests.runs import content_digests, manifests


class Broken(AssertionError):
    """Something does not hold that must hold; the message says what."""


def committed(run: Run) -> dict[str, Manifest]:
    """Place -> manifest of everything that is committed, read from storage again."""
    return {layout.stage_folder(item.stage, item.step): item for item in manifests(run).values()}


def check_chain(run: Run, expected: dict[str, str]) -> None:
    """Raise Broken unless the run is the one with these digests, verifies, and gc leaves nothing over and no change."""
    _expect_digests(run, expected)
    found = verification.verify(run)
    expect(not found.faults, f"ratchet verify: {'; '.join(map(str, found.faults))}")
    leftovers.delete(run, leftovers.plan(run, older_than=0.0))
    found = verification.verify(run, fast=True)
    expect(not found.faults, f"after gc: {'; '.join(map(str, found.faults))}")
    expect(not found.leftovers, f"after gc there is left over: {', '.join(one.folder for one in found.leftovers)}")
    _expect_digests(run, expected)
    root = Path(run.root)
    if root.is_dir():
        unfinished = [str(path.relative_to(root)) for path in root.rglob("*") if path.name.startswith(TEMPORARY)]
        expect(not unfinished, f"after gc there are unfinished files: {', '.join(unfinished)}")


def newest_state(run: Run, stage: str) -> int:
    """Return the newest step whose trainer's state is there, 0 where none is."""
    for step in reversed(run.steps()):
        found = run.manifest(stage, step)
        state = None if found is None else found.provenance.trainer_state
        if state is not None and artifacts.is_present(run.store, state):
            return step
    return 0


def expect(holds: bool, otherwise: str) -> None:
    """Raise Broken with `otherwise` unless something holds."""
    if not holds:
        raise Broken(otherwise)


def _expect_digests(run: Run, expected: dict[str, str]) -> None:
    found = content_digests(run)
    other = sorted(place for place in found.keys() | expected.keys() if found.get(place) != expected.get(place))
    expect(not other, f"not what an uninterrupted run commits: {', '.join(other)}")


@contextlib.contextmanager
def watched_replays() -> Iterator[list[tuple[str, int, float]]]:
    """Note each committed update that is made again, with its seconds."""
    seen: list[tuple[str, int, float]] = []
    replay = recovery._replay

    def watched(residents: Any, learner: recovery.Learner, trainer: Any, steps: range) -> None:
        started = time.perf_counter()
        replay(residents, learner, trainer, steps)
        seconds = (time.perf_counter() - started) / len(steps)
        seen.extend((learner.stage, step, seconds) for step in steps)

    recovery._replay = watched
    try:
        yield seen
    finally:
        recovery._replay = replay
