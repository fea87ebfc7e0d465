"""The lineage of a manifest: everything behind it, proven from its head, with indexes and without."""

import gzip
import os
from pathlib import Path

import pytest

from ratchet.errors import NotCommittedError, StoreError
from ratchet.store import index, layout
from ratchet.store.lineage import Lineage
from ratchet.store.local import LocalStore
from ratchet.store.run import POLICY_UPDATE, Run
from tests.ratchet.store.chains import commit, new_run

STEPS = 5


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "STEPS", 2)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Steps 1 to 5 of prompts, rollout, reward and update; step 3 has an evaluation, which nothing was made from."""
    run = new_run(str(tmp_path / "runs"))
    update = commit(run, POLICY_UPDATE, 0, {"w": b"0"})
    prompts = commit(run, "preprocess/train", None, {"p": b"p"}, [update])
    for step in range(1, STEPS + 1):
        rollout = commit(run, "rollout", step, {"r": b"%d" % step}, [prompts, update])
        reward = commit(run, "reward", step, {"s": b"%d" % step}, [rollout])
        update = commit(run, POLICY_UPDATE, step, {"w": b"%d" % step}, [rollout, reward, update])
    commit(run, "evaluate", 3, {"e": b"3"}, [run.require(POLICY_UPDATE, 3)])
    return run


def _traced(run: Run, *, indexed: bool) -> Lineage:
    lineage = Lineage(Run(run.root, run.run_id))
    if indexed:
        assert lineage.use_indexes(STEPS) == {1, 2, 3, 4}
    lineage.trace(POLICY_UPDATE, STEPS)
    return lineage


def _reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []
    original = LocalStore.get

    def get(self: LocalStore, key: str) -> bytes:
        read.append(key)
        return original(self, key)

    monkeypatch.setattr(LocalStore, "get", get)
    return read


def _tampered(run: Run, place: str) -> None:
    """Change one number of a stored manifest, so that it still reads as one."""
    path = Path(run.uri, place, "manifest.json")
    os.chmod(path, 0o644)
    path.write_bytes(path.read_bytes().replace(b'"gpu_seconds":0.0', b'"gpu_seconds":9.0'))


def test_everything_that_a_policy_came_from_is_found_with_and_without_indexes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {"data/train", "step-000000/policy_update"}
    stages = (POLICY_UPDATE, "reward", "rollout")
    expected |= {layout.stage_folder(stage, step) for stage in stages for step in range(1, STEPS + 1)}
    bare = _traced(run, indexed=False)
    assert bare.manifests.keys() == expected
    assert bare.faults == []
    index.rebuild(run, STEPS)
    read = _reads(monkeypatch)
    indexed = _traced(run, indexed=True)
    assert (indexed.manifests, indexed.sha256, indexed.faults) == (bare.manifests, bare.sha256, [])
    assert all(indexed.sha256[place] == one.sha256 for place, one in indexed.manifests.items())
    # The head and its step from storage; of the indexed steps nothing.
    assert [key for key in read if key.startswith(("step-000001", "step-000002", "step-000003", "step-000004"))] == []
    assert indexed.others - indexed.manifests.keys() == {"step-000003/evaluate"}


def test_an_index_that_says_something_else_changes_nothing(run: Run) -> None:
    index.rebuild(run, STEPS)
    text = gzip.decompress(run.store.get(layout.index(2)))
    run.store.put(layout.index(2), gzip.compress(text.replace(b'"gpu_seconds":0.0', b'"gpu_seconds":7.0')))
    found = _traced(run, indexed=True)
    assert found.faults == []
    assert sum(one.provenance.gpu_seconds for one in found.manifests.values()) == 0
    run.store.put(layout.index(4), b"garbage")
    lineage = Lineage(run)
    assert lineage.use_indexes(STEPS) == {1, 2}
    lineage.trace(POLICY_UPDATE, STEPS)
    assert lineage.manifests == found.manifests


def test_a_manifest_that_was_changed_or_lost_is_a_fault_and_ends_its_branch(run: Run) -> None:
    _tampered(run, "step-000002/reward")
    found = _traced(run, indexed=False)
    [fault] = found.faults
    assert fault.place == "step-000002/reward/manifest.json"
    assert fault.expected == f"sha256 {run.require('reward', 2).sha256}, which another manifest was made from"
    assert fault.found != f"sha256 {run.require('reward', 2).sha256}"
    assert "step-000002/reward" not in found.manifests
    assert "step-000001/reward" in found.manifests  # it is reached through the policy, too
    Path(run.uri, "step-000002/reward/manifest.json").unlink()
    [fault] = _traced(run, indexed=False).faults
    assert fault.found == "nothing"


def test_an_index_still_proves_what_storage_has_lost(run: Run) -> None:
    expected = _traced(run, indexed=False).manifests
    index.rebuild(run, STEPS)
    _tampered(run, "step-000002/reward")
    assert _traced(run, indexed=True).manifests == expected  # what was read for the policy is what the index holds


def test_one_step_alone_is_followed_no_further(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read = _reads(monkeypatch)
    lineage = Lineage(Run(run.root, run.run_id))
    lineage.trace(POLICY_UPDATE, 3, within=3)
    assert sorted(lineage.manifests) == [
        "data/train",
        "step-000003/policy_update",
        "step-000003/reward",
        "step-000003/rollout",
    ]
    assert len(read) == 4


def test_what_stands_beside_the_lineage_is_compared_with_it(run: Run) -> None:
    lineage = _traced(run, indexed=False)
    assert [one.stage for one in lineage.read(["step-000003/evaluate", "step-000004/evaluate"])] == ["evaluate"]
    assert lineage.faults == []
    assert lineage.places([3, 5]) == [
        *(f"step-000003/{name}" for name in ("evaluate", POLICY_UPDATE, "reward", "rollout")),
        *(f"step-000005/{name}" for name in (POLICY_UPDATE, "reward", "rollout")),
    ]
    other = new_run(run.root, "other")
    commit(other, POLICY_UPDATE, 3, {"w": b"3"})
    stray = commit(other, "evaluate", 4, {"e": b"4"}, [other.require(POLICY_UPDATE, 3)])
    run.store.put("step-000004/evaluate/manifest.json", stray.to_json())
    lineage.read(["step-000004/evaluate"])
    [fault] = lineage.faults
    assert fault.place == "step-000003/policy_update/manifest.json"
    assert fault.expected.endswith("which was read for step-000004/evaluate")


def test_a_head_that_is_missing_or_damaged_is_an_error(run: Run) -> None:
    with pytest.raises(NotCommittedError, match="step-000009/policy_update is not committed"):
        Lineage(run).trace(POLICY_UPDATE, 9)
    run.store.put("step-000009/policy_update/manifest.json", b"{}")
    with pytest.raises(StoreError, match="expected a manifest as it was written"):
        Lineage(run).trace(POLICY_UPDATE, 9)
