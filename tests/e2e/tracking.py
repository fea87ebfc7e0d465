"""What MLflow must show of a run: its metrics by step, and the champion's alias."""

import os

import pytest

from tests.e2e.live import Live, LiveRun

_URI = "MLFLOW_TRACKING_URI"


def tracking_uri(live: Live) -> str:
    """Return MLflow's address for this machine, or skip the test where it or that of pods is not known."""
    if not os.environ.get(_URI, "").startswith(("http://", "https://")):
        pytest.skip(f"no MLflow server: set {_URI} (and RATCHET_E2E_POD_{_URI} where pods need another address)")
    if not (live.settings or {}).get(_URI):
        pytest.skip(f"the pods' config map ratchet-environment has no {_URI}, or may not be read")
    return os.environ[_URI]


def check_tracked(uri: str, run: LiveRun) -> None:
    """Fail unless MLflow has the run's steps once, and the name that it promotes under points to its policy."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("ratchet-e2e")
    assert experiment is not None, f"{uri} has no experiment ratchet-e2e\n{run.report()}"
    found = client.search_runs([experiment.experiment_id], f"tags.`ratchet.root` = '{run.place}'")
    assert len(found) == 1, f"{uri} has {len(found)} runs of {run.place}\n{run.report()}"
    points = client.get_metric_history(found[0].info.run_id, "response_length/mean")
    assert [point.step for point in points] == [1]
    name = run.values["champion"]
    version = client.get_model_version_by_alias(name, "champion")
    assert version.tags["ratchet.decision"] == "1", version
