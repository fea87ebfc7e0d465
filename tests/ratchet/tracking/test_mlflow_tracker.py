"""The tracker against MLflow itself: SQLite for what is stored, a server over HTTP for what happens in between."""

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratchet.tracking.mlflow_tracker import MLflowTracker, Pauses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning"),
]

Open = Callable[..., MLflowTracker]
KEYS = ["actor/pg_loss", "critic/score/mean", "response_length/mean", "training/global_step"]
NOW = Pauses(shortest=0.0, longest=0.0)


@pytest.fixture
def open_tracker(chain, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Open:
    """Open the tracker that a new process would have, in an experiment named after the test."""
    monkeypatch.chdir(tmp_path)

    def open_tracker(uri: str, **changes: Any) -> MLflowTracker:
        arguments: dict[str, Any] = {
            "experiment": request.node.name,
            "run_name": "first",
            "params": {"trainer": {"total_epochs": 1}},
            "tracking_uri": uri,
            "pauses": NOW,
        }
        return MLflowTracker(chain.run, **(arguments | changes))

    return open_tracker


def client_of(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def points(uri: str, run_id: str | None, key: str) -> list[tuple[int, float, int]]:
    return sorted((m.step, m.value, m.timestamp) for m in client_of(uri).get_metric_history(run_id, key))


def steps(uri: str, run_id: str | None, key: str = "training/global_step") -> list[int]:
    return [step for step, _, _ in points(uri, run_id, key)]


def runs_of(uri: str, experiment: str) -> list[Any]:
    client = client_of(uri)
    return list(client.search_runs([client.get_experiment_by_name(experiment).experiment_id]))


# -- one run, one point -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["database", "server_uri"])
def test_a_point_carries_the_step_and_the_time_of_its_manifest_and_comes_once(
    chain, open_tracker: Open, request: pytest.FixtureRequest, kind: str
) -> None:
    uri = request.getfixturevalue(kind)
    for _ in range(2):
        tracker = open_tracker(uri)
        for manifest in chain.manifests or chain.step(3):
            tracker.log(manifest)
            tracker.log(manifest)
    # A tracker that does not know what MLflow has, as after a lost answer, sends again: nothing is added.
    client_of(uri).delete_tag(tracker.run_id, "ratchet.logged")
    assert open_tracker(uri).catch_up() == 3
    ended = chain.manifests[1].provenance.ended
    assert points(uri, tracker.run_id, "critic/score/mean") == [(3, 0.3, int(ended * 1000))]
    assert [steps(uri, tracker.run_id, key) for key in KEYS] == [[3]] * 4


def test_a_training_run_has_one_mlflow_run_over_resumes(
    chain, open_tracker: Open, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_REVISION", "0f1e2d")
    first = open_tracker(database, tags={"team": "a"})
    for manifest in chain.step(1):
        first.log(manifest)
    first.finish("KILLED")
    assert client_of(database).get_run(first.run_id).info.status == "KILLED"
    second = open_tracker(database, tags={"team": "b"})
    assert second.catch_up() == 0
    assert client_of(database).get_run(first.run_id).info.status == "RUNNING"
    second.finish("FINISHED")
    (run,) = runs_of(database, client_of(database).get_experiment(_experiment(database, first)).name)
    assert run.info.run_id == first.run_id == second.run_id
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.tags["ratchet.root"] == chain.run.uri
    assert (run.data.tags["ratchet.run_id"], run.data.tags["team"]) == ("r1", "b")
    assert run.data.tags["ratchet.version"]
    assert run.data.tags["ratchet.revision"] == "0f1e2d"


def _experiment(uri: str, tracker: MLflowTracker) -> str:
    return str(client_of(uri).get_run(tracker.run_id).info.experiment_id)


def test_a_deleted_mlflow_run_is_replaced_by_one_with_the_whole_curve(chain, open_tracker: Open, database: str) -> None:
    tracker = open_tracker(database)
    for manifest in chain.step(1):
        tracker.log(manifest)
    deleted = tracker.run_id
    client_of(database).delete_run(deleted)
    for manifest in chain.step(2):
        tracker.log(manifest)
    tracker.finish("FINISHED")
    assert tracker.run_id != deleted
    assert steps(database, tracker.run_id) == [1, 2]


def test_after_a_deleted_experiment_the_next_one_has_the_whole_curve_until_it_is_restored(
    chain, open_tracker: Open, database: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    name, client = request.node.name, client_of(database)
    tracker = open_tracker(database)
    for manifest in chain.step(1):
        tracker.log(manifest)
    first, experiment = tracker.run_id, _experiment(database, tracker)
    client.delete_experiment(experiment)
    for manifest in chain.step(2):
        tracker.log(manifest)
    assert _experiment(database, tracker) == client.get_experiment_by_name(f"{name}-2").experiment_id
    assert steps(database, tracker.run_id) == [1, 2]
    assert f"experiment {name} is deleted; this run is logged to {name}-2" in caplog.text
    # Another process finds the same one; and what a user restores is the run's again, and lacks nothing.
    assert open_tracker(database).catch_up() == 0
    client.restore_experiment(experiment)
    restored = open_tracker(database)
    assert restored.catch_up() == 3
    assert restored.run_id == first
    assert steps(database, first) == [1, 2]


def test_a_deleted_run_that_is_restored_later_is_the_oldest_and_lacks_nothing(
    chain, open_tracker: Open, database: str
) -> None:
    tracker = open_tracker(database)
    for manifest in chain.step(1):
        tracker.log(manifest)
    first = tracker.run_id
    client_of(database).delete_run(first)
    for manifest in chain.step(2):
        tracker.log(manifest)
    client_of(database).restore_run(first)
    resumed = open_tracker(database)
    for manifest in chain.step(3):
        resumed.log(manifest)
    assert resumed.run_id == first
    assert steps(database, first) == [1, 2, 3]
    assert steps(database, tracker.run_id) == [1, 2]


def test_what_others_committed_meanwhile_is_caught_up_too(chain, open_tracker: Open, database: str) -> None:
    tracker = open_tracker(database)
    for manifest in chain.step(1):
        tracker.log(manifest)
    rollout, *_ = chain.step(2)
    assert tracker.catch_up() == 3
    assert tracker.catch_up() == 0
    assert points(database, tracker.run_id, "response_length/mean")[1][2] == int(rollout.provenance.ended * 1000)


def test_of_two_runs_made_at_once_both_processes_keep_the_oldest(chain, open_tracker: Open, database: str) -> None:
    from ratchet.tracking import mlflow_runs

    first = open_tracker(database)
    first.catch_up()
    client = client_of(database)
    second = mlflow_runs._create(client, _experiment(database, first), chain.run.uri, "second", {})
    assert second.run_id == first.run_id


# -- injected runs ----------------------------------------------------------------------------------------------------


def test_an_injected_run_is_used_and_its_status_left_alone(
    chain, open_tracker: Open, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(database)
    experiment = client.create_experiment("injected")
    injected = client.create_run(experiment).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", injected)
    tracker = open_tracker(database)
    for manifest in chain.step(1):
        tracker.log(manifest)
    tracker.finish("FINISHED")
    assert tracker.run_id == injected
    assert client.get_run(injected).info.status == "RUNNING"
    assert steps(database, injected) == [1]
    # Nothing consumed the variable: the next tracker, or a child process, finds the same run.
    assert open_tracker(database).catch_up() == 0


def test_the_tasks_of_a_pipeline_share_the_curve_of_their_parent(
    chain, open_tracker: Open, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(database)
    experiment = client.create_experiment("tasks")
    parent = client.create_run(experiment).info.run_id
    for manifest in chain.step(1):
        nested = client.create_run(experiment, tags={"mlflow.parentRunId": parent}).info.run_id
        monkeypatch.setenv("MLFLOW_RUN_ID", nested)
        tracker = open_tracker(database)
        tracker.log(manifest)
        assert tracker.run_id == parent
    assert [steps(database, parent, key) for key in KEYS] == [[1]] * 4


def test_an_injected_run_of_another_training_run_gets_a_nested_one(
    chain, open_tracker: Open, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(database)
    experiment = client.create_experiment("sweep")
    parent = client.create_run(experiment, tags={"ratchet.root": "s3://elsewhere/r0"}).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", parent)
    tracker = open_tracker(database)
    tracker.catch_up()
    assert client.get_run(tracker.run_id).data.tags["mlflow.parentRunId"] == parent


@pytest.mark.parametrize("run_id", ["0" * 32, "../.."])
def test_an_injected_run_that_the_server_lacks_is_named_and_ignored(
    chain,
    open_tracker: Open,
    database: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    run_id: str,
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    tracker = open_tracker(database)
    tracker.catch_up()
    assert tracker.run_id is not None
    assert f"the run {run_id}, which" in caplog.text


# -- params, config, data ---------------------------------------------------------------------------------------------


def test_params_and_the_whole_configuration_are_there(chain, open_tracker: Open, server_uri: str) -> None:
    config = {"data": {"train_batch_size": 32}, "reward": {"source": "x" * 7000}, "seed": 1}
    tracker = open_tracker(server_uri, params=config)
    tracker.catch_up()
    client = client_of(server_uri)
    params = client.get_run(tracker.run_id).data.params
    assert (params["data.train_batch_size"], params["seed"], len(params["reward.source"])) == ("32", "1", 6000)
    path = client.download_artifacts(tracker.run_id, "config.yaml")
    assert yaml.safe_load(Path(path).read_text()) == config


def test_a_changed_param_keeps_its_first_value_and_costs_nothing_else(chain, open_tracker: Open, database: str) -> None:
    open_tracker(database, params={"seed": 1, "lr": 0.1}).catch_up()
    tracker = open_tracker(database, params={"seed": 2, "lr": 0.1, **{f"new{n}": n for n in range(150)}})
    for manifest in chain.step(1):
        tracker.log(manifest)
    params = client_of(database).get_run(tracker.run_id).data.params
    assert (params["seed"], params["new149"]) == ("1", "149")
    assert steps(database, tracker.run_id) == [1]


def test_a_param_written_by_another_process_in_between_takes_no_other_with_it(
    chain, open_tracker: Open, database: str
) -> None:
    from ratchet.tracking.mlflow_params import log_params
    from ratchet.tracking.mlflow_runs import TrackedRun

    tracker = open_tracker(database, params={"seed": 1})
    tracker.catch_up()
    assert tracker.run_id is not None
    log_params(client_of(database), TrackedRun(tracker.run_id, {}, {}, frozenset()), {"a": 1, "seed": 2, "z": 3})
    assert client_of(database).get_run(tracker.run_id).data.params == {"a": "1", "seed": "1", "z": "3"}


def test_artifacts_that_cannot_be_written_cost_one_warning_a_run(
    chain, open_tracker: Open, database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    client_of(database).create_experiment("unwritable", artifact_location=(tmp_path / "file" / "below").as_uri())
    for _ in range(2):
        tracker = open_tracker(database, experiment="unwritable")
        for manifest in chain.manifests or chain.step(1):
            tracker.log(manifest)
    assert [record.message[:25] for record in caplog.records if record.levelno >= logging.WARNING] == [
        "MLflow's artifact storage"
    ]
    assert steps(database, tracker.run_id) == [1]


def test_the_prompts_are_logged_as_a_data_set_by_digest(chain, open_tracker: Open, database: str) -> None:
    manifest = chain.commit("preprocess/train", None, {"data/num_duplicates": 2.0})
    for _ in range(2):
        tracker = open_tracker(database)
        tracker.log(manifest)
    run = client_of(database).get_run(tracker.run_id)
    (data,) = run.inputs.dataset_inputs
    digest = manifest.output("prompts").digest
    assert (data.dataset.name, data.dataset.digest) == ("data/train", digest[:36])
    assert json.loads(data.dataset.source) == {"uri": f"{chain.run.uri}/{manifest.output('prompts').folder}"}
    assert json.loads(data.dataset.profile)["num_rows"] == 2
    assert {tag.key: tag.value for tag in data.tags} == {"mlflow.data.context": "training", "ratchet.sha256": digest}
    assert points(database, tracker.run_id, "data/num_duplicates") == [(0, 2.0, int(manifest.provenance.ended * 1000))]


# -- names and values -------------------------------------------------------------------------------------------------


def test_real_names_all_arrive_and_what_is_not_finite_is_not_sent(
    chain, open_tracker: Open, database: str, shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ratchet")
    names = json.loads((shared / "fixtures/r5_metric_names.json").read_text())
    tracker = open_tracker(database)
    committed = chain.commit("evaluate", 1, {name: float(index) for index, name in enumerate(names)})
    # A manifest cannot hold NaN; one that a stage hands over before it is written could.
    metrics = {**committed.provenance.metrics, "nan": math.nan, "inf": math.inf}
    unfit = replace(committed, provenance=replace(committed.provenance, metrics=metrics))
    tracker.log(unfit)
    tracker.log(committed)
    stored = client_of(database).get_run(tracker.run_id).data.metrics
    assert sorted(stored.values()) == [float(index) for index in range(len(names))]
    assert stored["val-core/openai/gsm8k/reward/mean_at_1"] == 1.0
    tags = client_of(database).get_run(tracker.run_id).data.tags
    assert len(json.loads(tags["ratchet.metric_names"])) == 8


def test_a_metric_that_mlflow_refuses_takes_no_other_with_it(
    chain, open_tracker: Open, database: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ratchet.tracking import metric_names

    # As if MLflow grew stricter than the rewriting knows.
    monkeypatch.setattr(metric_names, "mlflow_names", lambda names, known: {name: name for name in names})
    tracker = open_tracker(database)
    tracker.log(chain.commit("reward", 1, {"a": 1.0, "b=c": 2.0, "d": 3.0}))
    tracker.log(chain.commit("policy_update", 1, {"e": 4.0}))
    assert client_of(database).get_run(tracker.run_id).data.metrics == {"a": 1.0, "d": 3.0, "e": 4.0}
    assert "b=c" in caplog.text
    assert open_tracker(database).catch_up() == 0


def test_more_metrics_than_one_request_takes_all_arrive(chain, open_tracker: Open, database: str) -> None:
    tracker = open_tracker(database)
    tracker.log(chain.commit("evaluate", 1, {f"m{n}": float(n) for n in range(2000)}))
    assert len(client_of(database).get_run(tracker.run_id).data.metrics) == 2000


# -- outages ----------------------------------------------------------------------------------------------------------


def test_steps_that_mlflow_lacks_are_caught_up_also_in_the_middle(chain, open_tracker: Open, database: str) -> None:
    chain.step(1)
    assert open_tracker(database).catch_up() == 3
    chain.step(2)
    # The process of step 3 does not know that nobody logged step 2.
    tracker = open_tracker(database)
    for manifest in chain.step(3):
        tracker.log(manifest)
    evaluate = chain.commit("evaluate", 3, {"val-core/gsm8k/reward/mean@1": 0.5})
    assert steps(database, tracker.run_id) == [1, 2, 3]
    last = open_tracker(database)
    assert last.catch_up() == 1
    assert points(database, last.run_id, "val-core/gsm8k/reward/mean_at_1") == [
        (3, 0.5, int(evaluate.provenance.ended * 1000))
    ]


@pytest.mark.parametrize("mode", ["500", "drop", "lost", "page"])
def test_a_server_that_fails_for_a_while_costs_one_warning_and_no_point(
    chain, open_tracker: Open, server_uri: str, make_gateway, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    gateway = make_gateway(server_uri)
    tracker = open_tracker(gateway.uri, experiment=f"fails-{mode}")
    for step in range(1, 7):
        gateway.mode = mode if step in (2, 3, 4) else "ok"
        for manifest in chain.step(step):
            tracker.log(manifest)
    ours = [record for record in caplog.records if record.name.startswith("ratchet")]
    assert [record.levelname for record in ours] == ["WARNING"]
    assert "training goes on" in ours[0].message
    for key in KEYS:
        assert steps(server_uri, tracker.run_id, key) == [1, 2, 3, 4, 5, 6]


def test_a_server_that_is_down_at_first_is_not_asked_all_the_time(
    chain, open_tracker: Open, make_gateway, server_uri: str
) -> None:
    gateway = make_gateway(server_uri)
    gateway.mode = "500"
    tracker = open_tracker(gateway.uri, pauses=Pauses(shortest=60.0))
    for manifest in chain.step(1):
        tracker.log(manifest)
    assert gateway.requests == 1
    gateway.mode = "ok"
    tracker.finish("FINISHED")
    assert steps(server_uri, tracker.run_id) == [1]
    assert client_of(server_uri).get_run(tracker.run_id).info.status == "FINISHED"


def test_a_server_that_never_answers_is_waited_for_once_and_then_for_a_share_of_the_time(
    chain, open_tracker: Open, make_gateway, server_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    gateway = make_gateway(server_uri)
    tracker = open_tracker(gateway.uri, pauses=Pauses(shortest=0.0))
    tracker.catch_up()
    gateway.mode, gateway.requests = "hang", 0
    started = time.monotonic()
    for step in range(1, 4):
        for manifest in chain.step(step):
            tracker.log(manifest)
    assert (gateway.requests, round(time.monotonic() - started)) == (1, 1)
    gateway.mode = "ok"
    tracker.finish("FINISHED")
    assert steps(server_uri, tracker.run_id) == [1, 2, 3]


def test_a_server_that_says_when_to_come_back_does_not_hold_training_up(
    chain, open_tracker: Open, make_gateway, server_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    gateway = make_gateway(server_uri)
    tracker = open_tracker(gateway.uri)
    gateway.mode = "429"
    started = time.monotonic()
    for manifest in chain.step(1):
        tracker.log(manifest)
    assert time.monotonic() - started < 5
    gateway.mode = "ok"
    tracker.finish("FINISHED")
    assert steps(server_uri, tracker.run_id) == [1]


def test_a_slow_server_takes_a_bounded_share_of_the_time(
    chain, open_tracker: Open, make_gateway, server_uri: str
) -> None:
    gateway = make_gateway(server_uri)
    tracker = open_tracker(gateway.uri, pauses=Pauses(slow=0.1))
    tracker.catch_up()
    gateway.delay = 0.2
    started = time.monotonic()
    for step in range(1, 4):
        for manifest in chain.step(step):
            tracker.log(manifest)
    assert time.monotonic() - started < 1.5  # nine calls, of which one asks
    gateway.delay = 0.0
    tracker.finish("FINISHED")
    assert steps(server_uri, tracker.run_id) == [1, 2, 3]


def test_a_server_that_stops_and_starts_again_has_every_point_once(
    chain, open_tracker: Open, make_gateway, server
) -> None:
    gateway = make_gateway(server.uri)
    tracker = open_tracker(gateway.uri)
    for manifest in chain.step(1):
        tracker.log(manifest)
    tracker.log(chain.commit("rollout", 2, {"response_length/mean": 12.0}))
    server.stop()
    tracker.log(chain.commit("policy_update", 2, {"training/global_step": 2.0}))
    for manifest in chain.step(3):
        tracker.log(manifest)
    tracker.finish("KILLED")
    server.start()
    gateway.target = server.uri
    resumed = open_tracker(gateway.uri)
    assert resumed.catch_up() == 4
    for manifest in chain.step(4):
        resumed.log(manifest)
    assert steps(server.uri, resumed.run_id) == [1, 2, 3, 4]
    assert steps(server.uri, resumed.run_id, "response_length/mean") == [1, 2, 3, 4]
    assert steps(server.uri, resumed.run_id, "critic/score/mean") == [1, 3, 4]
    experiment = client_of(server.uri).get_experiment(_experiment(server.uri, resumed))
    assert len(runs_of(server.uri, experiment.name)) == 1


def test_no_database_can_be_opened_and_nothing_stops(
    chain, open_tracker: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    tracker = open_tracker(f"sqlite:///{tmp_path / 'file' / 'mlflow.db'}")
    started = time.monotonic()
    for manifest in chain.step(1):
        tracker.log(manifest)
    tracker.finish("FINISHED")
    assert time.monotonic() - started < 5
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("uri", "variables", "cause"),
    [
        pytest.param("mssql+pymssql://u:geheim77@127.0.0.1:9/db", {}, "No module named 'pymssql'", id="no driver"),
        pytest.param("http://[bad", {}, "Invalid IPv6 URL", id="no address"),
        pytest.param(
            "http://127.0.0.1:9", {"MLFLOW_HTTP_REQUEST_TIMEOUT": ""}, "MLFLOW_HTTP_REQUEST_TIMEOUT", id="no number"
        ),
        pytest.param("", {}, "Failed to parse experiment", id="another API's answer"),
    ],
)
def test_an_error_of_any_class_costs_one_warning_and_never_the_run(
    chain,
    open_tracker: Open,
    make_gateway,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    uri: str,
    variables: dict[str, str],
    cause: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    gateway = make_gateway("http://127.0.0.1:9")
    gateway.mode = "other"
    tracker = open_tracker(uri or gateway.uri)
    for manifest in chain.step(1):
        tracker.log(manifest)
    tracker.finish("FAILED")
    (warning,) = [record.message for record in caplog.records if record.name.startswith("ratchet")]
    assert cause in warning


@pytest.mark.parametrize(
    ("uri", "token"),
    [
        pytest.param("http://u:geheim77@127.0.0.1:9", "", id="login"),
        pytest.param("http://u:ge/heim77@127.0.0.1:9", "", id="login with a slash"),
        pytest.param("http://127.0.0.1:9?token=geheim77", "", id="query"),
        pytest.param("http://127.0.0.1:9", "token-geheim77\n", id="line end in a token"),
    ],
)
def test_no_warning_shows_a_secret(
    chain,
    open_tracker: Open,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    uri: str,
    token: str,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", token)
    open_tracker(uri).catch_up()
    assert "training goes on" in caplog.text
    assert "127.0.0.1:9" in caplog.text
    assert "heim77" not in caplog.text


def test_a_long_message_keeps_the_request_and_the_cause() -> None:
    from ratchet.tracking.mlflow_runs import problem

    text = problem(OSError(f"API request to http://u:p@mlflow failed: {'x' * 400} Read timed out\nsecond line"))
    assert text.startswith("API request to http://mlflow failed")
    assert text.endswith("Read timed out")
    assert len(text) == 300


# -- defaults ---------------------------------------------------------------------------------------------------------


def test_without_a_server_runs_go_to_a_database_in_the_current_folder(
    chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"experiment": "e", "run_name": "n", "params": {}}
    assert MLflowTracker(chain.run, **names).tracking_uri == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example")
    assert MLflowTracker(chain.run, **names).tracking_uri == "http://mlflow.example"


def test_a_user_s_own_settings_of_the_client_stay(chain, open_tracker: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "99")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    open_tracker("http://127.0.0.1:9")
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "99"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "false"
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"


def test_the_stages_of_quick_steps_arrive_in_one_request(
    chain, open_tracker: Open, make_gateway, server_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = make_gateway(server_uri)
    tracker = open_tracker(gateway.uri)
    tracker.catch_up()
    paths: list[str] = []
    gateway.before = lambda method, path, body: paths.append(path)

    def requests(manifests: list[Any]) -> int:
        paths.clear()
        for manifest in manifests:
            tracker.log(manifest)
        return len([path for path in paths if path.endswith("/log-batch")])

    assert requests(chain.step(1)) == 3, "how long steps take shows after two of them"
    assert requests(chain.step(2)) == 3
    assert requests(chain.step(3)) == 1
    evaluate = chain.commit("evaluate", 3, {"val-core/gsm8k/acc": 0.5})
    assert requests([evaluate]) == 0
    assert requests(chain.step(4)) == 1
    assert steps(server_uri, tracker.run_id, "val-core/gsm8k/acc") == [3]
    rollout = chain.commit("rollout", 5, {"response_length/mean": 15.0})
    assert requests([rollout]) == 0
    tracker.close()
    assert steps(server_uri, tracker.run_id, "response_length/mean") == [1, 2, 3, 4, 5]
    from ratchet.tracking import mlflow_tracker

    monkeypatch.setattr(mlflow_tracker, "_QUICK", 0.0)
    assert requests(chain.step(6)) == 3, "a long step is seen while it runs"
