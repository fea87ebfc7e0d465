"""The verbs verify, gc and replay."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ratchet.store import layout, retention
from ratchet.store.manifest import Artifact, FileEntry, canonical_json, sha256_file
from ratchet.store.run import Run
from ratchet.store.survey import survey
from tests.command_line import Ratchet, in_this_process
from tests.ratchet.store.chains import new_run
from tests.ratchet.store.versions import Killed, killed_at, name, publish, readable
from tests.runs import tiny_config, train_tiny, write_problems


@pytest.fixture
def ratchet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ratchet:
    """Run the command line in this process, as its entry point does."""
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return in_this_process(monkeypatch, capsys)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Folder of a finished run of two steps, the second one a delta."""
    root = tmp_path_factory.mktemp("trained")
    values = {"trainer.grain": "segment", "trainer.full_weights_freq": 9, "trainer.total_training_steps": 2}
    train_tiny(root, "run", tiny_config(tiny_model, write_problems(root / "problems.jsonl"), **values))
    return root / "run"


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    return shutil.copytree(trained, tmp_path / "run")


def policy_file(folder: Path, step: int) -> Path:
    place, (entry, *_) = Run(str(folder.parent), folder.name).require("policy_update", step).output("policy").stored
    return folder / place / entry.path


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_of_a_whole_run_ends_with_0_and_one_line(ratchet: Ratchet, trained: Path) -> None:
    finished = ratchet("verify", trained)
    assert (finished.code, finished.err) == (0, "")
    (line,) = finished.out.splitlines()
    assert line.startswith(f"{trained}: 0 faults | 11 manifests, ")
    assert " bytes hashed, 0 decisions on champions | 0 retired on purpose" in line
    assert " bytes listed, " in ratchet("verify", trained, "--fast").out


def test_verify_names_what_is_damaged_and_ends_with_1(ratchet: Ratchet, folder: Path) -> None:
    path = policy_file(folder, 2)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    finished = ratchet("verify", folder)
    assert (finished.code, finished.err) == (1, "")
    fault, line = finished.out.splitlines()
    assert fault.startswith(f"fault: {path.relative_to(folder)}: expected sha256 ")
    assert line.startswith(f"{folder}: 1 faults | ")
    assert ratchet("verify", folder, "--fast").code == 0
    path.unlink()
    finished = ratchet("verify", folder, "--fast", "--json")
    assert finished.code == 1
    said = json.loads(finished.out)
    assert [fault["place"] for fault in said["faults"]] == [path.relative_to(folder).as_posix()]
    assert (said["is_fast"], said["manifests"], said["leftovers"]) == (True, 11, [])


def test_a_place_without_a_run_is_no_proof(ratchet: Ratchet, tmp_path: Path) -> None:
    finished = ratchet("verify", tmp_path / "run")
    assert finished.code == 2
    assert finished.err.startswith("ratchet: no run at ")


# -- gc ----------------------------------------------------------------------------------------------------------------


def test_gc_lists_and_deletes_when_it_is_told_to(ratchet: Ratchet, folder: Path) -> None:
    old, new = (folder / "step-000001" / "reward" / f"0001-{name}" / "part" for name in ("aa", "bb"))
    for path, hours in ((old, 30), (new, 1)):
        path.parent.mkdir()
        path.write_bytes(b"dead")
        written = path.stat().st_mtime - hours * 3600
        os.utime(path, (written, written))
    verified = ratchet("verify", folder)
    assert verified.code == 0  # what is left over is no fault
    assert "left over: step-000001/reward/0001-aa | 1 objects, 4 bytes, quiet for 30.0 h\n" in verified.out
    holds, *lines = ratchet("gc", folder).out.splitlines()
    assert holds.startswith(f"{folder} holds ")
    assert "trainer states 1.3 MiB, policies " in holds
    assert "leftovers of attempts 8 bytes" in holds
    assert lines == [
        "due: step-000001/reward/0001-aa | 1 objects, 4 bytes, quiet for 30.0 h",
        "kept, may be under way: step-000001/reward/0001-bb | 1 objects, 4 bytes, quiet for 1.0 h",
        f"{folder}: 4 bytes of 1 attempts and 0 bytes of 0 artifacts to delete (--delete)",
    ]
    assert old.is_file()
    said = json.loads(ratchet("gc", folder, "--older-than", "0.5", "--json").out)
    assert {key: [one["folder"][-4:] for one in ones] for key, ones in said.items() if key != "sizes"} == {
        "due": ["1-aa", "1-bb"],
        "kept": [],
        "deleted": [],
        "retire": [],
        "retired": [],
    }
    assert sum(said["sizes"].values()) == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    finished = ratchet("gc", folder, "--delete")
    assert finished.code == 0
    assert finished.out.splitlines()[1].startswith("deleted: step-000001/reward/0001-aa | ")
    assert finished.out.splitlines()[-1] == f"{folder}: 4 bytes of 1 attempts and 0 bytes of 0 artifacts deleted"
    assert (old.is_file(), new.is_file()) == (False, True)
    assert ratchet("verify", folder).code == 0


def test_gc_retires_what_the_newest_submission_or_the_caller_does_not_keep(
    ratchet: Ratchet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    run = new_run(str(tmp_path))
    for step in range(6):
        publish(run, step, is_delta=step == 5)
    config = tiny_config("model", "data", **{"trainer.keep_policies": 3})
    run.claim({"submission_id": None, "config": config.model_dump(mode="json")})
    name(run, "checkpoint_export", 2)
    assert "to retire: " not in ratchet("gc", run.uri).out
    listed = ratchet("gc", run.uri, "--retire").out.splitlines()
    assert listed[1:-1] == [
        "to retire: step-000001/policy_update trainer_state, 42 bytes",
        "to retire: step-000001/policy_update policy, 48 bytes",
        "to retire: step-000002/policy_update trainer_state, 42 bytes",
        "to retire: step-000003/policy_update trainer_state, 42 bytes",
    ]
    assert listed[-1] == f"{run.uri}: 0 bytes of 0 attempts and 174 bytes of 4 artifacts to delete (--delete)"
    assert readable(run) == [0, 1, 2, 3, 4, 5]
    refused = ratchet("gc", run.uri, "--keep-policies", "1")
    assert (refused.code, "give both" in refused.err) == (2, True)
    said = json.loads(ratchet("gc", run.uri, "--retire", "--keep-policies", "1", "--delete", "--json").out)
    gone = [(item["step"], item["role"]) for item in said["retired"]]
    states = [(step, "trainer_state") for step in (1, 2, 3)]
    # 2 is exported, 4 is what 5 is made of.
    assert sorted(gone) == sorted([*states, (1, "policy"), (3, "policy")])
    assert readable(run) == [0, 2, 4, 5]
    verified = ratchet("verify", run.uri)
    assert verified.code == 0
    assert verified.out.endswith(" | 5 retired on purpose\n")
    refused = ratchet("replay", run.uri, "--step", 3, "--stage", "checkpoint_export")
    assert refused.code == 2


def test_gc_finishes_what_a_process_that_died_has_retired(
    ratchet: Ratchet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    run = new_run(str(tmp_path))
    for step in range(4):
        publish(run, step)
    with pytest.raises(Killed), killed_at(2):
        retention.retire(run, survey(run, with_weights=True), retention.Rules(), proven=set())
    assert ratchet("verify", run.uri).code == 0
    lines = ratchet("gc", run.uri).out.splitlines()
    assert "being deleted 28 bytes" in lines[0]
    assert lines[1] == "to retire: step-000001/policy_update trainer_state, 42 bytes"
    assert "retired: step-000001/policy_update trainer_state, 42 bytes" in ratchet("gc", run.uri, "--delete").out
    assert "being deleted" not in ratchet("gc", run.uri).out
    assert ratchet("verify", run.uri).code == 0


def test_gc_refuses_a_damaged_run(ratchet: Ratchet, folder: Path) -> None:
    (folder / layout.manifest("reward", 1)).unlink()
    assert ratchet("gc", folder, "--older-than", "0").code == 0
    finished = ratchet("gc", folder, "--older-than", "0", "--delete")
    assert finished.code == 2
    assert "so nothing is deleted: step-000001/reward/manifest.json: " in finished.err


# -- replay ------------------------------------------------------------------------------------------------------------


def test_replay_of_an_update_that_is_a_delta_is_equal(ratchet: Ratchet, trained: Path) -> None:
    assert policy_file(trained, 2).suffix == ".delta"
    finished = ratchet("replay", trained, "--step", 2, "--stage", "policy_update")
    assert finished.code == 0, finished.err
    assert finished.out.startswith("policy: equal (committed ")
    finished = ratchet("replay", trained, "--step", 1, "--stage", "reward", "--json")
    (said,) = map(json.loads, finished.out.splitlines())
    assert (said["role"], said["is_equal"], said["largest_difference"]) == ("rewards", True, None)


def test_replay_of_another_policy_tells_by_how_much_it_differs(ratchet: Ratchet, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = policy_file(folder, 1)
    weights = load_file(path)
    tensor = weights["model.norm.weight"]
    old = float(tensor[3])
    tensor[3] = old + 0.5
    difference = abs(float(tensor[3]) - old)
    save_file(weights, path, metadata={"format": "pt"})
    commit_as_it_is(folder, path)
    finished = ratchet("replay", folder, "--step", 1, "--stage", "policy_update")
    assert finished.code == 1, finished.err
    assert finished.out.startswith("policy: different (committed ")
    assert finished.out.endswith(f"), the largest difference of a weight is {difference:g}\n")


def test_replay_of_what_is_not_committed_is_an_error(ratchet: Ratchet, trained: Path) -> None:
    assert ratchet("replay", trained, "--step", 3, "--stage", "rollout").code == 2
    finished = ratchet("replay", trained, "--step", 1, "--stage", "polish")
    assert finished.code == 2
    assert "no stage 'polish'" in finished.err


def commit_as_it_is(folder: Path, path: Path) -> None:
    """Make the manifest of step 1's policy say what is stored now."""
    key = folder / layout.manifest("policy_update", 1)
    raw: dict[str, Any] = json.loads(key.read_bytes())
    entry = FileEntry(path=path.name, bytes=path.stat().st_size, sha256=sha256_file(path))
    raw["provenance"]["artifacts"]["policy"]["files"] = [
        {"path": entry.path, "bytes": entry.bytes, "sha256": entry.sha256}
    ]
    raw["content"]["outputs"]["policy"] = Artifact(folder="", files=(entry,)).digest
    key.write_bytes(canonical_json(raw))
