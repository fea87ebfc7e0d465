"""Files that a killed writer never finished: no listing shows them, `ratchet gc` does, and deletes them in time."""

import os
import signal
import time
from pathlib import Path

import pytest

from ratchet.errors import StoreError
from ratchet.store import layout, leftovers, local, prepared
from ratchet.store.local import LocalStore
from ratchet.store.manifest import Artifact
from ratchet.store.objects import ObjectStore
from ratchet.store.run import Run
from ratchet.store.verification import verify
from tests.ratchet.store.chains import commit, new_run

HOUR = 3600.0


def kill_in_the_middle_of(store: LocalStore, key: str, data: bytes) -> str:
    """Let a process that writes an object be killed with half of it written; return the unfinished file's key."""
    before = {info.key for info in store.unfinished("")}
    pid = os.fork()
    if pid == 0:
        write = local._write_durably

        def write_half(path: Path, data: bytes | memoryview) -> None:
            write(path, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        local._write_durably = write_half
        store.put(key, data)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    (unfinished,) = {info.key for info in store.unfinished("")} - before
    return unfinished


def test_an_unfinished_file_is_no_object_and_can_be_discarded(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/whole", b"12345678")
    unfinished = kill_in_the_middle_of(store, "a/half", b"12345678")
    assert [info.key for info in store.list_objects("")] == ["a/whole"]
    assert [(info.key, info.size) for info in store.unfinished("a")] == [(unfinished, 4)]
    assert list(store.unfinished("b")) == []
    for key in ("a/whole", "a/.tmp-x/whole", "../.tmp-x", ".tmp-x/.tmp-y"):
        with pytest.raises(StoreError):
            store.discard(key)
    store.discard(unfinished)
    store.discard(unfinished)
    assert list(store.unfinished("")) == []
    assert store.get("a/whole") == b"12345678"


def test_a_store_whose_writes_leave_nothing_has_nothing_to_discard(store: ObjectStore) -> None:
    store.put("a/whole", b"1")
    assert list(store.unfinished("")) == []
    with pytest.raises(StoreError):
        store.discard("a/whole")
    assert store.get("a/whole") == b"1"


def test_gc_lists_and_deletes_what_killed_writers_left(tmp_path: Path) -> None:
    run = new_run(str(tmp_path))
    assert isinstance(run.store, LocalStore)
    committed = commit(run, "rollout", 1, {"part": b"rollout"})
    root = LocalStore(tmp_path)
    part = kill_in_the_middle_of(run.store, "step-000001/reward/0001-abc/reward/part", b"12345678")
    manifest = kill_in_the_middle_of(run.store, layout.manifest("reward", 1), b"12345678")
    beside = kill_in_the_middle_of(root, layout.prepared("0" * 64), b"12345678")
    found = verify(Run(str(tmp_path), "run"))
    assert found.faults == ()
    expected = {("step-000001/reward/0001-abc/reward/" + part.rpartition("/")[2], False), (manifest, False)}
    assert {(one.folder, one.is_beside_the_run) for one in found.leftovers} == expected | {(beside, True)}
    assert [(one.epoch, one.bytes) for one in found.leftovers] == [(1, 4)] * 3

    # Whoever writes them may be at work.
    assert leftovers.plan(run, now=time.time() + 23 * HOUR).due == ()
    planned = leftovers.plan(run, now=time.time() + 25 * HOUR)
    assert len(planned.due) == 3
    assert leftovers.delete(run, planned) == planned.due
    found = verify(Run(str(tmp_path), "run"))
    assert (found.faults, found.leftovers) == ((), ())
    assert run.store.get(f"{committed.output('rollout').folder}/part") == b"rollout"
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".tmp-")]


def test_gc_deletes_the_probe_of_a_preflight_that_was_killed(root: str) -> None:
    run = new_run(root)
    run.store.put("preflight/4f1c", b"ratchet")
    found = verify(Run(root, "run"))
    assert (found.faults, [one.folder for one in found.leftovers]) == ((), ["preflight/4f1c"])
    assert leftovers.plan(run).due == ()
    leftovers.delete(run, leftovers.plan(run, older_than=0))
    assert run.store.size("preflight/4f1c") is None
    assert verify(Run(root, "run")).leftovers == ()


def test_an_unfinished_file_belongs_to_the_attempt_that_left_objects_too(tmp_path: Path) -> None:
    run = new_run(str(tmp_path))
    assert isinstance(run.store, LocalStore)
    run.store.put("step-000001/reward/0001-abc/reward/part-0", b"123")
    kill_in_the_middle_of(run.store, "step-000001/reward/0001-abc/reward/part-1", b"12345678")
    (left,) = leftovers.plan(run, older_than=0).due
    assert (left.folder, left.bytes, len(left.objects)) == ("step-000001/reward/0001-abc", 7, 2)
    leftovers.delete(run, leftovers.plan(run, older_than=0))
    assert leftovers.plan(run, older_than=0).due == ()


def test_what_was_finished_since_it_was_planned_stays(tmp_path: Path) -> None:
    run = new_run(str(tmp_path))
    assert isinstance(run.store, LocalStore)
    unfinished = kill_in_the_middle_of(run.store, layout.status("s", "rollout", 1), b"12345678")
    planned = leftovers.plan(run, older_than=0)
    assert [one.folder for one in planned.due] == [unfinished]
    (Path(run.uri) / unfinished).rename(Path(run.uri) / layout.status("s", "rollout", 1))
    assert leftovers.delete(run, planned) == ()
    assert run.store.get(layout.status("s", "rollout", 1)) == b"1234"


def test_a_record_for_all_runs_is_made_beside_an_unfinished_one(tmp_path: Path) -> None:
    key = "0" * 64
    kill_in_the_middle_of(LocalStore(tmp_path), layout.prepared(key), b"12345678")
    mine = prepared.PreparedPrompts(
        run_id="run", artifact=Artifact(folder="data/train/x", files=(), rows=0), source="s"
    )
    assert prepared.find(str(tmp_path), key) is None
    assert prepared.record(str(tmp_path), key, mine) is True
    assert prepared.find(str(tmp_path), key) == mine
