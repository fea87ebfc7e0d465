"""The one MLflow run of a training run: found again wherever it is resumed, made only when there is none.

Trap: `mlflow.start_run` takes MLFLOW_RUN_ID out of the environment, so that the next process opens an unrelated run.
Only `MlflowClient` with explicit ids is used here.
"""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.redaction import hidden

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run as MLflowRun

logger = logging.getLogger(__name__)

ROOT_TAG = "ratchet.root"
"""Where the training run lies: what its MLflow run is found by."""
CREATED_TAG = "ratchet.created"
"""On runs that Ratchet made; the status of any other belongs to who made it."""
LOGGED_TO_TAG = "ratchet.logged_to"
"""On a run that a later pipeline run brought along: the MLflow run that has the metrics."""
PIPELINE_RUN_TAG = "kfp.pipeline_run_id"
PIPELINE_URL_TAG = "kfp.pipeline_run_url"
"""As Kubeflow Pipelines' own plugin names them."""
_PARENT_TAG = "mlflow.parentRunId"
_NOTE_TAG = "mlflow.note.content"
"""What MLflow's page of a run shows as its description."""
_SQLITE = "sqlite:///"
_UNKNOWN = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""What MLflow says of an id that it does not have, or that cannot be one."""
_LONGEST = 300
"""Characters of a client's message that are shown."""
_MAX_EXPERIMENTS = 100
"""Of one name, deleted ones: more is a server that answers anything."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The MLflow run that a training run is logged to, as it was when it was opened."""

    run_id: str
    params: dict[str, str]
    tags: dict[str, str]
    metrics: frozenset[str]
    """Names of those that it had."""
    started: float = 0.0
    """Unix seconds."""

    @property
    def is_ours(self) -> bool:
        """Whether Ratchet made it, and so sets its status."""
        return CREATED_TAG in self.tags


def set_client_defaults() -> None:
    """Make MLflow's client give up within seconds and report nothing home, where the user has not said otherwise.

    By default it waits two minutes for an answer, asks seven more times, and waits before each for as long as the
    server says (`Retry-After`), in which training would stand still; what a short outage costs is caught up.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    os.environ.setdefault("MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")


def default_tracking_uri() -> str:
    """Return MLFLOW_TRACKING_URI, or SQLite in the current folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{_SQLITE}{Path.cwd() / 'mlflow.db'}"


def check_database_folder(tracking_uri: str) -> None:
    """Raise the OSError that SQLite would meet; MLflow would try to open the database for minutes first."""
    path = database(tracking_uri)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass


def database(tracking_uri: str) -> Path | None:
    """Return the file of a SQLite database, None for anything else."""
    return Path(tracking_uri.removeprefix(_SQLITE)).absolute() if tracking_uri.startswith(_SQLITE) else None


def without_passwords(text: str) -> str:
    """Return a tracking URI, or a text that names one, as it may be shown."""
    # A password may hold the signs that end a host's name: MLflow refuses such an address and names it.
    return hidden(re.sub(r"://\S*@", "://", text))


def problem(error: Exception) -> str:
    """Return the first line of what MLflow's client says: its request at the start, the cause at the end.

    It names its server with user and password.
    """
    text = without_passwords(str(error).splitlines()[0] if str(error) else type(error).__name__)
    return text if len(text) <= _LONGEST else f"{text[:100]} ... {text[-_LONGEST + 105 :]}"


def is_plain(error: Exception) -> bool:
    """Return whether the error says by itself what is wrong: MLflow, a driver that is missing, or a setting."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return isinstance(error, (MlflowException, SQLAlchemyError, OSError, ImportError, ValueError))


def open_run(
    client: "MlflowClient", *, root: str, experiment: str, run_name: str, tags: Mapping[str, str]
) -> TrackedRun:
    """Find the MLflow run whose tag `ratchet.root` is `root`; else adopt the injected one; else create one.

    A run injected by MLFLOW_RUN_ID may be nested, one for each task of a pipeline: its outermost parent is adopted,
    so that the tasks share one curve. If that one belongs to another training run, a new run is nested in it; if a
    pipeline run before it began this training run, its metrics stay where they are, and the parent says where that is.
    """
    injected = _injected_run(client)
    if injected is not None:
        experiment_id = str(injected.info.experiment_id)
    else:
        experiment_id = _injected_experiment(client) or _experiment_id(client, experiment)
    found = tagged_run(client, [experiment_id], root)
    wanted = {**tags, ROOT_TAG: root}
    if found is None and injected is not None and ROOT_TAG not in injected.data.tags:
        logger.info("logging to the MLflow run %s, which MLFLOW_RUN_ID names", injected.info.run_id)
        found = injected
    if found is None:
        if injected is not None:
            wanted[_PARENT_TAG] = injected.info.run_id
        wanted |= {CREATED_TAG: "true", "mlflow.source.name": "ratchet"}
        return _create(client, experiment_id, root, run_name, wanted)
    if injected is not None and found.info.run_id != injected.info.run_id and ROOT_TAG not in injected.data.tags:
        _point(client, injected, found, root)
    if CREATED_TAG not in found.data.tags:
        # Kubeflow finds its own run by what it has written there.
        wanted = {key: value for key, value in wanted.items() if key not in (PIPELINE_RUN_TAG, PIPELINE_URL_TAG)}
    missing = {key: value for key, value in wanted.items() if found.data.tags.get(key) != value}
    return _opened(client, found, missing)


def pipeline_tags(submission: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags that name the pipeline run of a submission; none for one outside a pipeline."""
    pipeline_run = submission.get("submission_id")
    if not pipeline_run:
        return {}
    ui = os.environ.get("KF_PIPELINES_UI_ENDPOINT", "").rstrip("/")
    tags = {PIPELINE_RUN_TAG: str(pipeline_run)}
    return {**tags, PIPELINE_URL_TAG: f"{ui}/#/runs/details/{pipeline_run}"} if ui else tags


def _point(client: "MlflowClient", parent: "MLflowRun", found: "MLflowRun", root: str) -> None:
    """Say on the run of a later pipeline run where the metrics are."""
    from mlflow.entities import RunTag

    if parent.data.tags.get(LOGGED_TO_TAG) == found.info.run_id:
        return
    place = f"#/experiments/{found.info.experiment_id}/runs/{found.info.run_id}"
    said = {LOGGED_TO_TAG: found.info.run_id}
    if _NOTE_TAG not in parent.data.tags:
        said[_NOTE_TAG] = f"Goes on with `{root}`. The metrics are in [{found.info.run_name}]({place})."
    client.log_batch(parent.info.run_id, tags=[RunTag(key, value) for key, value in said.items()])


def _opened(client: "MlflowClient", found: "MLflowRun", missing: Mapping[str, str]) -> TrackedRun:
    from mlflow.entities import RunTag

    tracked = _tracked(found, missing)
    if missing:
        client.log_batch(tracked.run_id, tags=[RunTag(key, value) for key, value in missing.items()])
    if tracked.is_ours and found.info.status != "RUNNING":
        client.update_run(tracked.run_id, status="RUNNING")
    return tracked


def _create(
    client: "MlflowClient", experiment_id: str, root: str, run_name: str, tags: Mapping[str, str]
) -> TrackedRun:
    created = client.create_run(experiment_id, run_name=run_name, tags=dict(tags))
    # Two pods of one step may both find none and create one: the oldest is kept, by both.
    oldest = tagged_run(client, [experiment_id], root) or created
    if oldest.info.run_id != created.info.run_id:
        client.delete_run(created.info.run_id)
    return _tracked(oldest, {})


def _tracked(run: "MLflowRun", tags: Mapping[str, str]) -> TrackedRun:
    data = run.data
    started = run.info.start_time / 1000
    return TrackedRun(run.info.run_id, dict(data.params), {**data.tags, **tags}, frozenset(data.metrics), started)


def tagged_run(client: "MlflowClient", experiment_ids: list[str], root: str) -> "MLflowRun | None":
    """Return the oldest MLflow run of these experiments that the training run at `root` is logged to."""
    quote = "'" if "'" not in root else '"'
    found = client.search_runs(
        experiment_ids,
        filter_string=f"tags.`{ROOT_TAG}` = {quote}{root}{quote}",
        order_by=["attributes.start_time ASC", "attributes.run_id ASC"],
        max_results=1,
    )
    return found[0] if found else None


def _injected_run(client: "MlflowClient") -> "MLflowRun | None":
    from mlflow.exceptions import MlflowException

    run_id = os.environ.get("MLFLOW_RUN_ID")
    if not run_id:
        return None
    try:
        run = client.get_run(run_id)
        for _ in range(10):
            parent = run.data.tags.get(_PARENT_TAG)
            if not parent:
                break
            run = client.get_run(parent)
    except MlflowException as error:
        if error.error_code not in _UNKNOWN:
            raise
        logger.warning("MLFLOW_RUN_ID names the run %s, which this MLflow server does not have", run_id)
        return None
    return run if run.info.lifecycle_stage == "active" else None


def _injected_experiment(client: "MlflowClient") -> str | None:
    """Return the experiment that MLFLOW_EXPERIMENT_ID names; None where it names none that can be used."""
    from mlflow.exceptions import MlflowException

    experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
    if not experiment_id:
        return None
    try:
        if client.get_experiment(experiment_id).lifecycle_stage == "active":
            return experiment_id
        why = "which is deleted"
    except MlflowException as error:
        if error.error_code not in _UNKNOWN:
            raise
        why = "which this MLflow server does not have"
    logger.warning("MLFLOW_EXPERIMENT_ID names the experiment %s, %s", experiment_id, why)
    return None


def _experiment_id(client: "MlflowClient", name: str) -> str:
    """Return the active experiment `name`, made if there is none.

    MLflow keeps the name of a deleted experiment for it, so that the next one is `name-2`, then `name-3`. What a user
    deleted stays deleted; what a user restores is used again by the next session.
    """
    from mlflow.exceptions import MlflowException

    for number in range(1, _MAX_EXPERIMENTS):
        candidate = name if number == 1 else f"{name}-{number}"
        found = client.get_experiment_by_name(candidate)
        if found is None or found.lifecycle_stage != "deleted":
            if candidate != name:
                logger.warning("MLflow's experiment %s is deleted; this run is logged to %s", name, candidate)
            return _create_experiment(client, candidate) if found is None else str(found.experiment_id)
    raise MlflowException(f"expected an experiment {name} that is not deleted, found {number} that are")


def _create_experiment(client: "MlflowClient", name: str) -> str:
    from mlflow.exceptions import MlflowException

    path = database(client.tracking_uri)
    # MLflow would put the artifacts of a database below whatever folder is current.
    location = None if path is None else (path.parent / "mlruns").as_uri()
    try:
        return str(client.create_experiment(name, artifact_location=location))
    except MlflowException as error:
        found = client.get_experiment_by_name(name)
        if error.error_code != "RESOURCE_ALREADY_EXISTS" or found is None:
            raise
        return str(found.experiment_id)
