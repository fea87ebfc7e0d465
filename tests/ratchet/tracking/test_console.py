import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.errors import StoreError
from ratchet.tracking.console import ConsoleTracker, JsonlTracker


def test_a_step_is_told_in_one_line_when_its_update_is_committed(chain) -> None:
    lines: list[str] = []
    tracker = ConsoleTracker(chain.run, lines.append)
    for step in (1, 2):
        for manifest in chain.step(step):
            tracker.log(manifest)
    tracker.finish("FINISHED")
    rest = "actor/pg_loss: {} | training/global_step: {}"
    assert lines == [
        "step: 1 | response_length/mean: 11 | critic/score/mean: 0.1 | " + rest.format("-0.01", 1),
        "step: 2 | response_length/mean: 12 | critic/score/mean: 0.2 | " + rest.format("-0.02", 2),
        "run r1: finished",
    ]


def test_a_process_that_joins_within_a_step_tells_the_whole_step(chain) -> None:
    lines: list[str] = []
    *_, reward, update = chain.step(1)
    tracker = ConsoleTracker(chain.run, lines.append)
    tracker.log(reward)
    tracker.log(update)
    assert "response_length/mean: 11" in lines[0]


def test_validation_gets_its_own_line_before_training_and_after_an_update(chain) -> None:
    lines: list[str] = []
    tracker = ConsoleTracker(chain.run, lines.append)
    tracker.log(chain.commit("evaluate", 0, {"val-core/gsm8k/reward/mean@1": 0.0}))
    for manifest in [*chain.step(1), *chain.step(2)[:1]]:
        tracker.log(manifest)
    tracker.log(chain.commit("evaluate", 1, {"val-core/gsm8k/reward/mean@1": 0.25}))
    tracker.log(chain.run.require("policy_update", 2))
    assert lines[0] == "step: 0 | val-core/gsm8k/reward/mean@1: 0"
    assert lines[2] == "step: 1 | val-core/gsm8k/reward/mean@1: 0.25"
    assert lines[3].startswith("step: 2 | response_length/mean: 12 | ")


def test_lines_are_logged_unless_they_are_taken(chain, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ratchet.tracking.console")
    tracker = ConsoleTracker(chain.run)
    for manifest in chain.step(1):
        tracker.log(manifest)
    assert [record.message[:8] for record in caplog.records if record.name == "ratchet.tracking.console"] == [
        "step: 1 "
    ]


def test_a_file_gets_every_manifest_once_over_restarts(chain, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonlTracker(chain.run, path)
    for manifest in chain.step(1):
        first.log(manifest)
        first.log(manifest)
    chain.step(2)
    second = JsonlTracker(chain.run, path)
    assert second.catch_up() == 3
    assert second.catch_up() == 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(record["step"], record["stage"]) for record in records] == [
        (step, stage) for step in (1, 2) for stage in ("rollout", "reward", "policy_update")
    ]
    assert records[1] == {
        "run_id": "r1",
        "step": 1,
        "stage": "reward",
        "ended": chain.manifests[1].provenance.ended,
        "metrics": {"critic/score/mean": 0.1},
    }


def test_a_line_that_was_cut_by_a_kill_is_written_again(chain, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(chain.run, path)
    for manifest in chain.step(1):
        tracker.log(manifest)
    whole = path.read_text()
    path.write_text(whole[:-20])
    assert JsonlTracker(chain.run, path).catch_up() == 1
    assert path.read_text() == whole


def test_a_file_of_something_else_is_left_alone(chain, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("{}\n")
    with pytest.raises(StoreError, match=r"metrics\.jsonl is not a file of Ratchet's metrics"):
        JsonlTracker(chain.run, path).catch_up()
    assert path.read_text() == "{}\n"


def test_a_callable_gets_the_records(chain) -> None:
    records: list[dict[str, Any]] = []
    tracker = JsonlTracker(chain.run, records.append)
    for manifest in chain.step(1):
        tracker.log(manifest)
    assert tracker.catch_up() == 0
    assert [record["stage"] for record in records] == ["rollout", "reward", "policy_update"]
