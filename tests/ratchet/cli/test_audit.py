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
        how = {"device": "NVIDIA H200", "gpu_seconds": 2.5, "image": "train:2"} if step > 2 else {}
        began, ended = ({"started": at, "ended": at + 2.5} for at in (10.0 * step, 10.0 * step + 5))
        rollout = commit(run, "rollout", step, {"r": b"%d" % step}, [update], **how, **(began if how else {}))
        update = commit(
            run, POLICY_UPDATE, step, {"w": b"%d" % step}, [rollout, update], **how, **(ended if how else {})
        )
    return run


def test_audit_prints_a_tree_whose_branches_are_what_was_made_alike(ratchet: Ratchet, run: Run) -> None:
    finished = ratchet("audit", run.uri)
    assert (finished.code, finished.err) == (0, "")
    assert finished.lines[0] == run.uri
    at = finished.lines.index("|  |- 10 GPU-seconds")
    assert finished.lines[at + 1 : at + 6] == [
        "|  |  |- policy_update: 4 times, 7 s, 5 GPU-seconds",
        "|  |  |- rollout: 4 times, 7 s, 5 GPU-seconds",
        "|  |  |- version 0: once, 1 s, 0 GPU-seconds",
        "|  |  |- 0.002778 GPU-hours of NVIDIA H200: no price (trainer.prices, or --price 'NVIDIA H200=...')",
        "|  |  |- 0.0008333 hours of cpu: no price (trainer.prices, or --price 'cpu=...')",
    ]
    start = finished.lines.index("|  |- 4 steps, 0 rollouts")
    assert finished.lines[start + 1 : start + 5] == [
        "|  |  |- steps 1 to 2: 0 rollouts",
        "|  |  |  `- submission 1, code r, cpu",
        "|  |  |- steps 3 to 4: 0 rollouts",
        "|  |  |  `- submission 1, code r, image train:2, NVIDIA H200",
    ]


def test_audit_counts_at_the_prices_that_are_given(ratchet: Ratchet, run: Run) -> None:
    priced = json.loads(ratchet("audit", run.uri, "--json", "--price", "NVIDIA H200=3.6", "--price", "cpu=0").out)
    # Four stages of 2.5 s on one accelerator.
    assert priced["cost"]["total"]["money"] == pytest.approx(4 * 2.5 / 3600 * 3.6)
    part = ratchet("audit", run.uri, "--price", "NVIDIA H200=3.6").lines
    assert "|  |- 10 GPU-seconds, cost unknown: cpu without a price" in part
    assert "|  |  |- 0.002778 GPU-hours of NVIDIA H200 at 3.6 an hour: 0.01" in part
    refused = ratchet("audit", run.uri, "--price", "cpu=-1")
    assert (refused.code, refused.out) == (2, "")
    assert "--price: expected DEVICE=PRICE of an hour, such as 'NVIDIA H200=3.5'; found 'cpu=-1'" in refused.err


def test_audit_as_json_has_every_stage_and_is_the_same_with_indexes(ratchet: Ratchet, run: Run) -> None:
    bare = ratchet("audit", run.uri, "--json")
    found = json.loads(bare.out)
    assert [[one["stage"] for one in stages] for stages in found["steps"]] == [
        *[["policy_update", "rollout"]] * 2,
        *[["rollout", "policy_update"]] * 2,
    ]
    assert found["steps"][3][1]["manifest_sha256"] == run.require(POLICY_UPDATE, 4).sha256
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


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("s3://bucket", "s3://bucket: expected s3://bucket/run-id, or s3://bucket/prefix/run-id"),
        ("models:/", "'models:': expected models:/NAME/VERSION or models:/NAME@ALIAS"),
    ],
)
def test_what_names_no_run_is_refused(ratchet: Ratchet, asked: str, told: str) -> None:
    refused = ratchet("audit", asked)
    assert (refused.code, refused.out) == (2, "")
    assert told in refused.err


def test_a_run_of_examples_has_no_sample(ratchet: Ratchet, tmp_path: Path) -> None:
    run = new_run(str(tmp_path / "runs"))
    # An output is called as its stage here, and so is what the update reads.
    commit(run, POLICY_UPDATE, 1, {"w": b"1"}, [commit(run, "examples", 1, {"table": b"1"})])
    refused = ratchet("sample", run.uri, "--step", "1", "--id", "train-0000000")
    assert refused.code == 2
    assert "learns from examples and samples nothing: there are no completions of step 1" in refused.err
