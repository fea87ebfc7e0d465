"""What attempts left behind is deleted, and never anything that a manifest names or that may still be written."""

import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.errors import StoreError
from ratchet.store import layout, leftovers
from ratchet.store.run import Run
from ratchet.store.verification import verify
from tests.ratchet.store.chains import commit, new_run
from tests.runs import content_digests

HOUR = 3600.0
STAGES = ("rollout", "reward", "advantage", "policy_update")

Dead = tuple[str, int, int, int, int]
"""Stage, step, epoch, objects, hours since the last write."""

dead_attempts = st.lists(
    st.tuples(
        st.sampled_from(STAGES),
        st.integers(1, 3),
        st.integers(1, 3),
        st.integers(1, 3),
        st.sampled_from([0, 2, 25, 99]),
    ),
    max_size=6,
)


def leave(run: Run, dead: Dead, number: int = 0) -> str:
    """Write what a dead attempt wrote; return its folder."""
    stage, step, epoch, objects, hours = dead
    folder = layout.attempt_folder(stage, step, f"{epoch:04d}-{number:012x}")
    for index in range(objects):
        run.store.put(f"{folder}/{stage}/part-{index}", b"x" * index)
        age(run, f"{folder}/{stage}/part-{index}", hours + index)
    return folder


def age(run: Run, key: str, hours: float) -> None:
    written = time.time() - hours * HOUR
    os.utime(Path(run.uri) / key, (written, written))


@settings(max_examples=12, deadline=None)
@given(
    committed=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    claims=st.integers(1, 3),
    dead=dead_attempts,
    claimed_hours=st.sampled_from([0, 2, 30]),
)
def test_only_dead_attempts_are_deleted_and_the_run_stays_what_it_is(
    committed: list[int], claims: int, dead: list[Dead], claimed_hours: int
) -> None:
    """`committed` is how many stages of each step are committed."""
    with tempfile.TemporaryDirectory() as root:
        run = new_run(root)
        for step, stages in enumerate(committed, 1):
            read = []
            for stage in STAGES[:stages]:
                read = [commit(run, stage, step, {"part": f"{stage} {step}".encode()}, read)]
        for _ in range(claims - 1):
            run.claim({"submission_id": None})
        age(run, layout.owner(claims), claimed_hours)
        folders = {leave(run, one, number): one for number, one in enumerate(dead)}
        before = content_digests(run)

        planned = leftovers.plan(run)
        assert {one.folder for one in (*planned.due, *planned.kept)} == folders.keys()
        assert {one.folder for one in planned.due} == {
            folder
            for folder, (_, _, epoch, _, hours) in folders.items()
            if (hours >= 24 if epoch >= claims else min(hours, claimed_hours) >= 1)
        }
        assert leftovers.delete(run, planned) == planned.due
        found = verify(Run(root, "run"))
        assert (found.faults, found.leftovers) == ((), planned.kept)

        everything = leftovers.plan(run, older_than=0)
        assert everything.kept == ()
        leftovers.delete(run, everything)
        found = verify(Run(root, "run"))
        assert (found.faults, found.leftovers) == ((), ())
        assert content_digests(run) == before


def test_both_kinds_of_storage_lose_the_leftovers_alone(root: str) -> None:
    run = new_run(root)
    first = commit(run, "rollout", 1, {"part": b"rollout"})
    commit(run, "reward", 1, {"part": b"reward"}, [first])
    run.store.put("step-000001/reward/0001-abc/reward/part", b"dead")
    before = {info.key for info in run.store.list_objects("")}
    assert leftovers.plan(run).due == ()
    planned = leftovers.plan(run, now=time.time() + 25 * HOUR)
    assert [one.folder for one in planned.due] == ["step-000001/reward/0001-abc"]
    assert leftovers.delete(run, planned) == planned.due
    assert before - {info.key for info in run.store.list_objects("")} == {"step-000001/reward/0001-abc/reward/part"}
    assert verify(Run(root, "run")).faults == ()


def test_an_attempt_counts_as_quiet_since_its_last_write(tmp_path: Path) -> None:
    run = new_run(str(tmp_path))
    folder = leave(run, ("reward", 1, 1, 1, 99))
    run.store.put(f"{folder}/reward/part-1", b"just now")
    assert leftovers.plan(run).due == ()
    (kept,) = leftovers.plan(run, older_than=HOUR).kept
    assert kept.folder == folder


def test_what_changed_since_it_was_planned_is_kept(tmp_path: Path) -> None:
    run = new_run(str(tmp_path))
    folders = [leave(run, ("reward", 1, 1, 1, 99), number) for number in range(4)]
    planned = leftovers.plan(run)
    assert len(planned.due) == 4
    run.store.put(f"{folders[0]}/reward/part-1", b"one more")
    run.store.put(f"{folders[1]}/reward/part-0", b"")  # equal bytes, written again
    # An attempt of another process that commits after all.
    entry = commit(run, "reward", 1, {"part-0": b""}, attempt=folders[2].rpartition("/")[2], artifacts={})
    assert entry.provenance.attempt in folders[2]
    with pytest.raises(StoreError, match="faults, so nothing is deleted"):
        leftovers.delete(run, planned)
    run.store.delete(layout.manifest("reward", 1))
    assert [one.folder for one in leftovers.delete(run, planned)] == folders[2:]


def test_nothing_is_deleted_from_a_damaged_run(tmp_path: Path) -> None:
    """The files of a manifest that is gone look like a dead attempt's."""
    run = new_run(str(tmp_path))
    first = commit(run, "rollout", 1, {"part": b"rollout"})
    commit(run, "reward", 1, {"part": b"reward"}, [first])
    run.store.delete(layout.manifest("rollout", 1))
    planned = leftovers.plan(run, older_than=0)
    assert [one.folder for one in planned.due] == [first.output("rollout").folder.rpartition("/")[0]]
    with pytest.raises(StoreError, match=r"has 1 faults, so nothing is deleted: step-000001/rollout/manifest\.json: "):
        leftovers.delete(run, planned)
    assert run.store.size(f"{first.output('rollout').folder}/part") == 7
