"""Indexes: what they hold, when they are written, and that nothing depends on them."""

import gzip
import logging
from pathlib import Path

import pytest

from ratchet.errors import StoreError, StoreUnavailableError
from ratchet.store import index, layout, leftovers
from ratchet.store.local import LocalStore
from ratchet.store.manifest import Manifest
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.store.usage import usage
from ratchet.store.verification import read_chain, verify
from tests.ratchet.store.chains import commit, new_run

STEPS = 4


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes of two steps each."""
    monkeypatch.setattr(index, "STEPS", 2)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return _trained(str(tmp_path / "runs"))


def _trained(root: str) -> Run:
    """Steps 1 to 4, each of a rollout and an update."""
    run = new_run(root)
    update = commit(run, POLICY_UPDATE, 0, {"w": b"0"})
    for step in range(1, STEPS + 1):
        rollout = commit(run, "rollout", step, {"r": b"%d" % step}, [update])
        update = commit(run, POLICY_UPDATE, step, {"w": b"%d" % step}, [rollout, update])
    return run


def _indexes(run: Run) -> list[str]:
    return [info.key for info in run.store.list_objects(layout.INDEX)]


@pytest.mark.parametrize(("step", "last"), [(1, 50), (49, 50), (50, 50), (51, 100), (1000, 1000)])
def test_a_step_belongs_to_the_index_of_its_fifty(step: int, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "STEPS", 50)
    assert index.last_of(step) == last
    assert layout.parse_index(layout.index(last)) == last
    assert layout.index(last) == f"index/{last:06d}.jsonl.gz"


def test_an_index_holds_the_manifests_of_its_steps_byte_for_byte(run: Run) -> None:
    index.write(run, 4)
    found = index.read(run, 4)
    assert found is not None
    places = [f"step-00000{step}/{stage}" for step in (3, 4) for stage in (POLICY_UPDATE, "rollout")]
    assert sorted(found.bodies) == places
    assert all(body == run.store.get(f"{place}/manifest.json") for place, body in found.bodies.items())
    first = run.store.get(layout.index(4))
    index.write(run, 4)
    assert run.store.get(layout.index(4)) == first  # nothing in it says when it was written
    assert [one.last for one in index.read_up_to(run, 4)] == [4]
    assert index.read_up_to(run, 2) == []


def test_indexes_are_written_and_found_on_both_kinds_of_storage(root: str) -> None:
    run = _trained(root)
    assert index.rebuild(run, STEPS) == [2, 4]
    assert [(one.last, len(one.bodies)) for one in index.read_up_to(run, 3)] == [(2, 4), (4, 4)]
    assert verify(run).faults == ()
    run.store.delete(layout.index(2))
    assert index.rebuild(run, STEPS) == [2]


def test_the_last_update_of_its_steps_writes_an_index_and_a_late_evaluation_writes_it_again(run: Run) -> None:
    for step in (0, 1, 3):
        index.committed(run, run.require(POLICY_UPDATE, step))
    index.committed(run, run.require("rollout", 2))
    assert _indexes(run) == []
    index.committed(run, run.require(POLICY_UPDATE, 2))
    assert _indexes(run) == ["index/000002.jsonl.gz"]
    index.committed(run, commit(run, "evaluate", 1, {"e": b"1"}, [run.require(POLICY_UPDATE, 1)]))
    found = index.read(run, 2)
    assert found is not None
    assert "step-000001/evaluate" in found.bodies
    # Of steps that are not through there is none to write again.
    index.committed(run, commit(run, "evaluate", 5, {"e": b"5"}))
    assert _indexes(run) == ["index/000002.jsonl.gz"]


def test_what_cannot_be_read_as_an_index_is_none(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    index.write(run, 2)
    good = run.store.get(layout.index(2))
    header, *bodies = gzip.decompress(good).split(b"\n")
    wrong = [b"", b"no gzip", good[:-9], gzip.compress(b"{"), gzip.compress(b"[]"), gzip.compress(header)]
    wrong += [gzip.compress(b"\n".join([header.replace(b'"format":1', b'"format":2'), *bodies]))]
    wrong += [gzip.compress(b"\n".join([header.replace(b'"last":2', b'"last":4'), *bodies]))]
    for body in wrong:
        run.store.put(layout.index(2), body)
        assert index.read(run, 2) is None
    assert len(caplog.records) == len(wrong)
    assert index.read(run, 4) is None
    assert len(caplog.records) == len(wrong)  # that there is none is no news
    assert index.rebuild(run, STEPS) == [2, 4]
    assert index.rebuild(run, STEPS) == []
    assert run.store.get(layout.index(2)) == good


def test_verify_gc_and_sizes_know_indexes(run: Run) -> None:
    index.rebuild(run, STEPS)
    assert verify(run).faults == ()
    planned = leftovers.plan(run, older_than=0)
    assert (planned.due, planned.kept) == ((), ())
    assert set(usage(read_chain(run))) == {"tables", "manifests and records"}
    # Another manifest than the one that is there, and garbage: both are told of, and neither keeps gc from its work.
    index.write(run, 2)
    text = gzip.decompress(run.store.get(layout.index(2)))
    run.store.put(layout.index(2), gzip.compress(text.replace(b'"device":"cpu"', b'"device":"tpu"', 1)))
    run.store.put(layout.index(4), b"garbage")
    faults = verify(run).faults
    assert [fault.place for fault in faults] == ["index/000002.jsonl.gz", "index/000004.jsonl.gz"]
    assert "it may be deleted" in faults[0].expected
    commit(run, "rollout", 9, {"r": b"9"})
    assert leftovers.delete(run, planned) == ()


def test_an_index_that_cannot_be_written_costs_a_warning_but_silence_is_tried_again(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    update: Manifest = run.require(POLICY_UPDATE, 2)

    def refuse(self: LocalStore, key: str, data: bytes) -> None:
        raise error("no")

    monkeypatch.setattr(LocalStore, "put", refuse)
    error: type[StoreError] = StoreError
    with caplog.at_level(logging.WARNING):
        index.committed(run, update)
    assert "no index of the steps up to 2" in caplog.text
    error = StoreUnavailableError
    with pytest.raises(StoreUnavailableError):
        index.committed(run, update)
