"""The verbs promote, rollback and champions."""

import json
from pathlib import Path

import pytest

from ratchet.store import champions
from tests.command_line import Ratchet, in_this_process
from tests.promotion import decision, exported_files, finished_run, promotion_config


@pytest.fixture
def ratchet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ratchet:
    """Run the command line in this process, as its entry point does."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return in_this_process(monkeypatch, capsys)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "runs")


def test_promote_decides_and_tells_and_does_so_once(ratchet: Ratchet, root: str) -> None:
    finished_run(root, "first", [1.0, 0.0])
    finished = ratchet("promote", f"{root}/first")
    assert (finished.code, finished.err) == (0, "")
    assert finished.out == "math 1: promoted | first step 1 | accuracy 0.5000 [0.0945, 0.9055] on 2 prompts\n"
    assert ratchet("promote", f"{root}/first").out == finished.out
    finished_run(root, "second", [0.0, 1.0])
    finished = ratchet("promote", f"{root}/second")
    assert finished.code == 0  # a policy that is refused is no error
    first, second = finished.out.splitlines()
    assert first.startswith("math 2: refused | second step 1 | accuracy 0.5000 ")
    assert first.endswith(" over 1")
    assert second.startswith("  improvement over champion 1 +0.0000 [")
    assert len(champions.decisions(root, "math")) == 2
    assert ratchet("promote", f"{root}/second", "--again").out.startswith("math 3: refused")


def test_promote_takes_a_name_and_needs_one(ratchet: Ratchet, root: str) -> None:
    finished_run(root, "run", [1.0], config=promotion_config(**{"promotion.name": ""}))
    finished = ratchet("promote", f"{root}/run")
    assert finished.code == 2
    assert "has no promotion.name; give the champion's name by --name" in finished.err
    assert ratchet("promote", f"{root}/run", "--name", "other").out.startswith("other 1: promoted")
    assert ratchet("promote", f"{root}/none", "--name", "other").code == 2


def test_promote_compares_through_a_baseline(ratchet: Ratchet, root: str) -> None:
    finished_run(root, "first", [1.0, 1.0])
    ratchet("promote", f"{root}/first")
    finished_run(root, "second", [1.0, 0.0], held_out="new")
    assert "not comparable with champion 1" in ratchet("promote", f"{root}/second").out
    finished_run(root, "measures", {0: [0.0, 0.0]}, base=exported_files("first"), held_out="new")
    finished = ratchet("promote", f"{root}/second", "--again", "--baseline", f"{root}/measures")
    assert finished.out.startswith("math 3: promoted")
    assert "+0.5000 [" in finished.out


def test_a_run_without_evaluation_ends_with_what_to_do(ratchet: Ratchet, root: str) -> None:
    finished_run(root, "run", {})
    finished = ratchet("promote", f"{root}/run")
    assert finished.code == 2
    assert f"ratchet evaluate {root}/run --step 1" in finished.err


def test_rollback_says_what_serves_again(ratchet: Ratchet, root: str) -> None:
    for name, rewards in (("first", [0.0]), ("second", [1.0])):
        finished_run(root, name, rewards)
        ratchet("promote", f"{root}/{name}")
    finished = ratchet("rollback", "math", "--root", root, "--reason", "bad units")
    assert finished.code == 0
    first, second = finished.out.splitlines()
    assert first.startswith("math 3: rolled back to 1 | first step 1 | accuracy 0.0000 ")
    assert second.strip() == champions.decisions(root, "math")[0].export.uri
    finished = ratchet("rollback", "math", "--root", root, "--to", 3)
    assert (finished.code, finished.out) == (2, "")
    assert "decision 3 of math promoted nothing; these did: 1, 2" in finished.err
    assert ratchet("rollback", "math", "--root", root, "--to", 2).out.startswith("math 4: rolled back to 2")


def test_champions_shows_the_history_with_its_numbers(ratchet: Ratchet, root: str) -> None:
    for found in (
        decision(1),
        decision(2, "refused", 1, compared_with=1, reasons=("no better", "too slow")),
        decision(3, submission_id="6f0c", compared_with=1),
        decision(4, "rolled_back", 1, run="s3://bucket/runs/night-1", reasons=("bad units",)),
    ):
        champions.append(root, "math", lambda history, found=found: found)
    finished = ratchet("champions", "math", "--root", root)
    assert (finished.code, finished.err) == (0, "")
    assert finished.out.splitlines() == [
        "* 1: promoted | night-1 step 50 | accuracy 0.5000 [0.2500, 0.7500] on 12 prompts",
        "    2023-11-14 22:13:20Z by a test",
        "  2: refused | night-2 step 50 | accuracy 0.5000 [0.2500, 0.7500] on 12 prompts",
        "    2023-11-14 22:13:20Z by a test",
        "    no better",
        "    too slow",
        "  3: promoted | night-3 step 50 | accuracy 0.5000 [0.2500, 0.7500] on 12 prompts",
        "    2023-11-14 22:13:20Z by a test, submission 6f0c",
        "  4: rolled back to 1 | night-1 step 50 | accuracy 0.5000 [0.2500, 0.7500] on 12 prompts",
        "    2023-11-14 22:13:20Z by a test",
        "    bad units",
    ]
    rows = [json.loads(line) for line in ratchet("champions", "math", "--root", root, "--json").out.splitlines()]
    assert [row["verdict"] for row in rows] == ["promoted", "refused", "promoted", "rolled_back"]
    assert rows[1]["evaluation"]["low"] == 0.25


def test_champions_of_an_unknown_name_says_so(ratchet: Ratchet, root: str) -> None:
    finished = ratchet("champions", "math", "--root", root)
    assert (finished.code, finished.out) == (0, "")
    assert finished.err == f"nothing was decided about math below {root}\n"
    assert ratchet("champions", "math", "--root", root, "--json").out == ""


def test_champions_brings_mlflow_up_to_date_or_fails(
    ratchet: Ratchet, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    champions.append(root, "math", lambda history: decision(1))
    answers = [True, False]
    monkeypatch.setattr("ratchet.tracking.registry.sync", lambda *arguments: answers.pop(0))
    assert ratchet("champions", "math", "--root", root, "--sync").err == "MLflow is up to date\n"
    finished = ratchet("champions", "math", "--root", root, "--sync")
    assert finished.code == 2
    assert "MLflow could not be brought up to date with math" in finished.err
    assert finished.out.startswith("* 1: promoted")


def test_a_damaged_record_ends_with_its_place(ratchet: Ratchet, root: str) -> None:
    path = Path(root, "champions", "math", "0001.json")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    finished = ratchet("champions", "math", "--root", root)
    assert finished.code == 2
    assert f"{path} is not a decision" in finished.err
