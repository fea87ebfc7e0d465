"""Tables of completions: which, how many, how long, and in MLflow once, however often they are sent."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.manifest import Manifest
from ratchet.store.run import Run
from ratchet.tracking import mlflow_tables
from ratchet.tracking.mlflow_tables import FOLDER, LISTED_TAG, CompletionTables, graded_table, held_out_table
from ratchet.tracking.mlflow_tracker import MLflowTracker
from tests.ratchet.tracking.report_runs import evaluation_table, graded_tables, learning_run, new_run, put, put_prompts


def rows_of(table: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def a_step(run: Run, step: int, rewards: list[list[float]]) -> None:
    tables = graded_tables(run, f"step-{step:06d}/rollout/0001-aa", rewards)
    put(run, "rollout", step, metrics={}, artifacts={"rollouts": tables["rollouts"]})
    put(run, "reward", step, metrics={"critic/score/mean": 0.5}, artifacts={"rewards": tables["rewards"]})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = new_run(str(tmp_path / "runs"))
    put_prompts(found)
    return found


def test_a_table_goes_from_the_best_to_the_worst_with_all_that_was_said(run: Run) -> None:
    # 5 prompts of 8 samples: rewards 0.00, 0.01, .., 0.38, and one completion without an answer.
    rewards = [[(8 * prompt + sample) / 100 for sample in range(8)] for prompt in range(5)]
    rewards[4][7] = math.nan
    a_step(run, 3, rewards)
    table = graded_table(run, 3)
    assert table["columns"][:4] == ["prompt", "completion", "reward", "ground_truth"]
    found = rows_of(table)
    # 40 completions: places 0, 2.6, 5.2, .. of the ranking, whose last ones are 0.01, and 0.0 twice.
    ranking = [round(0.38 - place / 100, 2) for place in range(39)] + [0.0]
    assert [row["reward"] for row in found] == [ranking[round(place * 39 / 15)] for place in range(16)]
    assert found[0] | {"error": ""} == {
        "prompt": "Ann has 4 pears and buys 5 more. How many?",
        "completion": "She has 9 pears.\n#### 9",
        "reward": 0.38,
        "ground_truth": "9",
        "extracted": "9",
        "finish_reason": "stop",
        "error": "",
        "prompt_id": "train-0000004",
        "sample_index": 6,
        "step": 3,
        "reward/answer": 0.38,
        **{name: 0.5 for name in table["columns"] if name.startswith("reward/format")},
    }
    assert found[-1]["prompt_id"] == "train-0000004"
    assert (found[-1]["extracted"], found[-1]["finish_reason"]) == (None, "length")


def test_cells_are_short_and_what_is_no_number_is_text(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"prompt_id": "train-0000001", "sample_index": 0, "step": 1, "finish_reason": "length", "extracted": None}
    row = {**long, "completion": "a" * 50_000 + "end", "reward": math.inf, "is_parseable": False, "error": None}
    other = {**row, "sample_index": 1, "reward": 1.0, "completion": "b"}
    monkeypatch.setattr(mlflow_tables, "graded_rows", lambda *_: [row, other])
    best, worst = rows_of(graded_table(run, 1))
    assert (best["completion"], best["reward"]) == ("b", 1.0)
    assert worst["reward"] == "inf"
    assert len(worst["completion"]) < 3000
    assert worst["completion"].endswith("aend")
    assert "[.. 47043 characters ..]" in worst["completion"]
    # Too many prompts to be read for a few texts: their ids stand for them.
    monkeypatch.setattr(mlflow_tables, "_MAX_PROMPTS", 10)
    assert rows_of(graded_table(run, 1))[0]["prompt"] == "train-0000001"


def test_evaluations_show_the_same_prompts_each_time(run: Run) -> None:
    for step in (0, 5):
        # With more prompts than a table has rows, every other one, and the last.
        rewards = [float(number < step) for number in range(16)]
        table = evaluation_table(run, f"step-{step:06d}/evaluate/0001-aa/evaluations", rewards)
        put(run, "evaluate", step, metrics={}, artifacts=table)
    before, after = (rows_of(held_out_table(run, step)) for step in (0, 5))
    assert {row["prompt_id"] for row in before} == {row["prompt_id"] for row in after}
    assert [row["reward"] for row in after] == [1.0] * 5 + [0.0] * 11
    assert after[0]["prompt"] == "Ann has 0 pears and buys 1 more. How many?"


@pytest.mark.parametrize(
    ("stage", "step", "inputs", "wanted"),
    [
        ("reward", 1, {}, True),
        ("reward", 10, {}, True),
        ("reward", 11, {}, False),
        ("rollout", 10, {}, False),
        ("evaluate", 3, {"prompts": "ab"}, True),
        ("evaluate", 3, {"examples": "ab"}, False),
        ("preprocess/train", None, {}, False),
    ],
)
def test_a_table_is_made_of_some_steps_and_every_evaluation(
    chain: Any, stage: str, step: int | None, inputs: dict[str, str], wanted: bool
) -> None:
    made: Manifest = chain.commit(stage, step, {})
    content = dataclasses.replace(made.content, inputs=inputs)
    assert CompletionTables(10).wants(dataclasses.replace(made, content=content)) is wanted


def client_of(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def files(client: Any, run_id: str) -> list[str]:
    return [file.path for split in ("train", "val") for file in client.list_artifacts(run_id, f"{FOLDER}/{split}")]


@pytest.mark.slow
def test_mlflow_has_each_table_once_and_shows_it_as_one(
    tmp_path: Path, server_uri: str, make_gateway: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = learning_run(str(tmp_path / "runs"), 3)
    gateway = make_gateway(server_uri)

    def track() -> MLflowTracker:
        tracker = MLflowTracker(
            run,
            experiment="tables",
            run_name="r",
            params={},
            tracking_uri=gateway.uri,
            exhibits=[CompletionTables(2)],
        )
        tracker.catch_up()
        return tracker

    gateway.mode = "drop"
    track()
    gateway.mode = "ok"
    tracker = track()
    assert tracker.run_id is not None
    client = client_of(server_uri)
    graded = [f"{FOLDER}/train/step-{step:06d}.json" for step in (1, 2)]
    held_out = [f"{FOLDER}/val/step-{step:06d}.json" for step in range(4)]
    assert sorted(files(client, tracker.run_id)) == sorted([*graded, *held_out])
    listed = json.loads(client.get_run(tracker.run_id).data.tags[LISTED_TAG])
    assert sorted(entry["path"] for entry in listed) == sorted([*graded, *held_out])
    # MLflow's own reader, which takes its server from the environment, of what `mlflow.log_table` writes.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server_uri)
    experiment = client.get_run(tracker.run_id).info.experiment_id
    table = client.load_table(experiment, graded[0], run_ids=[tracker.run_id])
    assert len(table) == 16
    assert table.iloc[0]["reward"] == 1.0
    # A database that was set back: everything is sent again, and stands there once.
    for tag in [tag for tag in client.get_run(tracker.run_id).data.tags if tag.startswith("ratchet.")]:
        if tag != "ratchet.root":
            client.delete_tag(tracker.run_id, tag)
    client.set_tag(tracker.run_id, LISTED_TAG, json.dumps([{"path": "mine.json", "type": "table"}]))
    track()
    assert len(client.load_table(experiment, graded[0], run_ids=[tracker.run_id])) == 16
    listed = json.loads(client.get_run(tracker.run_id).data.tags[LISTED_TAG])
    assert [entry["path"] for entry in listed] == [
        "mine.json",
        held_out[0],
        *(path for pair in zip(graded, held_out[1:3], strict=True) for path in pair),
        held_out[3],
    ]


@pytest.mark.slow
def test_the_newest_tables_are_listed_while_the_tag_has_room(server_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(server_uri)
    run_id = client.create_run(client.create_experiment("many tables")).info.run_id
    for step, split in enumerate(["val", "train", "val", "train", "val"]):
        client.log_text(run_id, "{}", f"{FOLDER}/{split}/step-{step:06d}.json")
    monkeypatch.setattr(mlflow_tables, "_MAX_TAG", 160)
    mlflow_tables._list_tables(client, run_id)
    text = client.get_run(run_id).data.tags[LISTED_TAG]
    assert len(text) <= 160
    assert [entry["path"][-8:-5] for entry in json.loads(text)] == ["003", "004"]
