"""The verbs audit and sample."""

import json
import os
from pathlib import Path

import pytest

from ratchet.store import index
from ratchet.store.run import POLICY_UPDATE, Run
from tests.command_line import Ratchet, in_this_process
from tests.ratchet.store.chains import commit, new_run


@pytest.fixture
def ratchet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ratchet:
    """Run the command line in this process, as its entry point does."""
    return in_this_process(monkeypatch, capsys)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Four steps of rollout and update; indexes are of two."""
    monkeypatch.setattr(index, "STEPS", 2)
    run = new_run(str(tmp_path / "runs"))
    update = commit(run, POLICY_UPDATE, 0, {"w": b"0"})
    for step in range(1, 5):
        # As of the second half on a GPU, and from another image.
        how = {"device": "cuda", "gpu_seconds": 2.5, "image": "train:2"} if step > 2 else {}
        rollout = commit(run, "rollout", step, {"r": b"%d" % step}, [update], **how)
        update = commit(run, POLICY_UPDATE, step, {"w": b"%d" % step}, [rollout, update], **how)
    return run


def test_audit_prints_a_tree_whose_branches_are_what_was_made_alike(ratchet: Ratchet, run: Run) -> None:
    finished = ratchet("audit", run.uri)
    assert (finished.code, finished.err) == (0, "")
    assert finished.lines[0] == run.uri
    assert "|  |- 10 GPU-seconds" in finished.lines
    assert [line for line in finished.lines if "policy_update 5" in line] == ["|  |  |- policy_update 5"]
    start = finished.lines.index("|  |- 4 steps, 0 rollouts")
    assert finished.lines[start + 1 : start + 5] == [
        "|  |  |- steps 1 to 2: 0 rollouts",
        "|  |  |  `- submission 1, code r, cpu",
        "|  |  |- steps 3 to 4: 0 rollouts",
        "|  |  |  `- submission 1, code r, image train:2, cuda",
    ]


def test_audit_as_json_has_every_stage_and_is_the_same_with_indexes(ratchet: Ratchet, run: Run) -> None:
    bare = ratchet("audit", run.uri, "--json")
    found = json.loads(bare.out)
    assert [[one["stage"] for one in stages] for stages in found["steps"]] == [["policy_update", "rollout"]] * 4
    assert found["steps"][3][0]["manifest_sha256"] == run.require(POLICY_UPDATE, 4).sha256
    indexed = ratchet("audit", run.uri, "--json", "--index")
    assert (indexed.out, indexed.err) == (bare.out, "2 indexes written\n")
    assert ratchet("audit", run.uri, "--json", "--index").err == "0 indexes written\n"


def test_audit_ends_with_code_1_where_the_chain_is_contradicted(ratchet: Ratchet, run: Run) -> None:
    path = Path(run.uri, "step-000002", "rollout", "manifest.json")
    os.chmod(path, 0o644)
    path.write_bytes(path.read_bytes().replace(b'"ended":2.0', b'"ended":3.0'))
    finished = ratchet("audit", run.uri)
    assert finished.code == 1
    assert finished.lines[-1].startswith("`- fault: step-000002/rollout/manifest.json: expected sha256 ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["audit", "models:/math"], "expected models:/NAME/VERSION or models:/NAME@ALIAS"),
        (["audit", "nobody", "--root", "/nowhere"], "nothing serves as nobody"),
        (["sample", "/nowhere/run", "--step", "1", "--id", "x"], "nobody has claimed it"),
    ],
)
def test_what_is_not_there_ends_with_what_was_expected(ratchet: Ratchet, arguments: list[str], told: str) -> None:
    finished = ratchet(*arguments)
    assert finished.code == 2
    assert told in finished.err
