"""Under Kubeflow Pipelines' own MLflow plugin: its parent run, its nested runs, its experiment, its workspace.

What the plugin does is done here as it does it: a parent for the pipeline run, nested runs for the iterations and their
tasks, and variables for each task's program.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from demo.servers import mlflow_server
from ratchet.tracking.mlflow_runs import pipeline_tags
from ratchet.tracking.mlflow_tracker import MLflowTracker
from tests.ratchet.tracking.conftest import Chain

pytestmark = pytest.mark.slow

KEYS = ["actor/pg_loss", "critic/score/mean", "response_length/mean", "training/global_step"]
WORKSPACE = "team-a"


class Plugin:
    """One pipeline run of Kubeflow's, as its plugin shows it in MLflow."""

    def __init__(self, client: Any, experiment_id: str, pipeline_run: str) -> None:
        self._client, self._experiment_id = client, experiment_id
        url = f"https://kfp.example/#/runs/details/{pipeline_run}"
        tags = {"kfp.pipeline_run_id": pipeline_run, "kfp.pipeline_run_url": url, "kfp.pipeline_id": "p"}
        self.parent = client.create_run(experiment_id, run_name=f"grpo {pipeline_run}", tags=tags).info.run_id

    def nested(self, name: str, parent: str | None = None) -> str:
        tags = {"mlflow.parentRunId": parent or self.parent}
        return str(self._client.create_run(self._experiment_id, run_name=name, tags=tags).info.run_id)

    def ended(self) -> None:
        for run in self._client.search_runs([self._experiment_id]):
            if run.info.status == "RUNNING":
                self._client.set_terminated(run.info.run_id, "FINISHED")


@pytest.fixture(scope="module")
def server_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with workspaces; whoever names none is in the default one."""
    with mlflow_server(tmp_path_factory.mktemp("workspaces"), options=["--enable-workspaces"]) as server:
        yield server.uri


@pytest.fixture
def open_tracker(chain: Chain, monkeypatch: pytest.MonkeyPatch, server_uri: str) -> Callable[..., MLflowTracker]:
    """Open the tracker of a task's program."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server_uri)

    def open_tracker(run_id: str, experiment_id: str) -> MLflowTracker:
        monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
        monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", experiment_id)
        return MLflowTracker(chain.run, experiment="not used", run_name="not used", params={"seed": 1})

    return open_tracker


def client_of(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def steps(client: Any, run_id: str, key: str) -> list[int]:
    return sorted(point.step for point in client.get_metric_history(run_id, key))


def test_the_tasks_of_two_pipeline_runs_share_one_curve_in_the_workspace(
    chain: Chain, open_tracker, server_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client_of(server_uri).create_workspace(WORKSPACE)
    monkeypatch.setenv("MLFLOW_WORKSPACE", WORKSPACE)
    client = client_of(server_uri)
    experiment_id = client.create_experiment("of the plugin")
    first = Plugin(client, experiment_id, "kfp-1")
    chain.run.claim({"submission_id": "kfp-1", "grain": "segment"})
    for step in (1, 2):
        # An iteration of ParallelFor is a nested run itself, and each of its tasks one below.
        iteration = first.nested("for-loop-1")
        for manifest in chain.step(step):
            tracker = open_tracker(first.nested(manifest.stage, iteration), experiment_id)
            tracker.catch_up()
            tracker.log(manifest)
            assert tracker.run_id == first.parent
    tracker.finish("FINISHED")
    # Kubeflow sets the status of its own runs, and finds them by its own tags.
    parent = client.get_run(first.parent)
    assert parent.info.status == "RUNNING"
    assert parent.data.tags["kfp.pipeline_run_id"] == "kfp-1"
    assert parent.data.tags["ratchet.root"] == chain.run.uri
    assert parent.data.params == {"seed": "1"}
    first.ended()

    second = Plugin(client, experiment_id, "kfp-2")
    chain.run.claim({"submission_id": "kfp-2", "grain": "segment"})
    for manifest in chain.step(3):
        tracker = open_tracker(second.nested(manifest.stage), experiment_id)
        tracker.log(manifest)
        assert tracker.run_id == first.parent
    for key in KEYS:
        assert steps(client, first.parent, key) == [1, 2, 3]
    parent = client.get_run(first.parent)
    assert (parent.info.status, parent.data.tags["kfp.pipeline_run_id"]) == ("FINISHED", "kfp-1")
    pointer = client.get_run(second.parent)
    assert pointer.data.tags["ratchet.logged_to"] == first.parent
    assert f"(#/experiments/{experiment_id}/runs/{first.parent})" in pointer.data.tags["mlflow.note.content"]
    assert pointer.data.metrics == {}
    curves = [run for run in client.search_runs([experiment_id]) if run.data.metrics]
    assert [run.info.run_id for run in curves] == [first.parent], "no nested run has a curve of its own"
    # Nothing of it is in the workspace of those who name none.
    monkeypatch.delenv("MLFLOW_WORKSPACE")
    assert client_of(server_uri).get_experiment_by_name("of the plugin") is None


def test_an_experiment_that_is_injected_alone_is_used(
    chain: Chain, server_uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_of(server_uri)
    experiment_id = client.create_experiment("injected alone")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", experiment_id)
    chain.run.claim({"submission_id": "kfp-9", "grain": "segment"})
    monkeypatch.setenv("KF_PIPELINES_UI_ENDPOINT", "https://kfp.example/")

    def tracked() -> Any:
        tracker = MLflowTracker(chain.run, experiment="by its name", run_name="r", params={}, tracking_uri=server_uri)
        tracker.catch_up()
        return client.get_run(tracker.run_id)

    run = tracked()
    assert run.info.experiment_id == experiment_id
    assert run.data.tags["kfp.pipeline_run_id"] == "kfp-9"
    assert run.data.tags["kfp.pipeline_run_url"] == "https://kfp.example/#/runs/details/kfp-9"
    # A later pipeline run goes on with the same MLflow run, which Ratchet made.
    chain.run.claim({"submission_id": "kfp-10", "grain": "segment"})
    again = tracked()
    assert (again.info.run_id, again.data.tags["kfp.pipeline_run_id"]) == (run.info.run_id, "kfp-10")

    client.delete_experiment(experiment_id)
    for unusable in (experiment_id, "987654"):
        monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", unusable)
        assert client.get_experiment(tracked().info.experiment_id).name == "by its name"
        assert f"MLFLOW_EXPERIMENT_ID names the experiment {unusable}" in caplog.text


def test_a_workspace_that_the_server_does_not_have_is_a_warning(
    chain: Chain, open_tracker, server_uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_WORKSPACE", "nobody-made-it")
    tracker = MLflowTracker(chain.run, experiment="e", run_name="r", params={}, tracking_uri=server_uri)
    for manifest in chain.step(1):
        tracker.log(manifest)
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "nobody-made-it" in warning
    assert tracker.run_id is None


def test_a_submission_outside_a_pipeline_names_no_pipeline_run() -> None:
    assert pipeline_tags({}) == pipeline_tags({"submission_id": None}) == {}
    assert pipeline_tags({"submission_id": "kfp-1"}) == {"kfp.pipeline_run_id": "kfp-1"}
