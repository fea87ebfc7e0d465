"""Metrics, params and data of a run in MLflow: one MLflow run, one point for each metric of each step.

Trap: MLflow keeps two points for one step if their timestamps differ, so everything that is sent comes from the
manifest, and sending it again changes nothing. The chain of manifests is the truth and MLflow a view of it: no failure
here may stop a run, and what was missed is brought later.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ratchet
from ratchet.environment import code_revision
from ratchet.store import layout
from ratchet.store.manifest import Manifest
from ratchet.store.run import Run
from ratchet.tracking.base import Status
from ratchet.tracking.metrics import mlflow_names
from ratchet.tracking.mlflow_params import log_config, log_params, upload
from ratchet.tracking.mlflow_runs import (
    TrackedRun,
    check_database_folder,
    default_tracking_uri,
    open_run,
    problem,
    set_client_defaults,
    without_passwords,
)
from ratchet.tracking.progress import Progress

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Metric

logger = logging.getLogger(__name__)

PROGRESS_TAG = "ratchet.logged"
"""What MLflow has of the run, as `Progress` writes it; sent with the metrics that it speaks of."""

_MAX_METRICS = 900
"""In one request; MLflow takes 1000 metrics, params and tags together."""
_PREPROCESS = "preprocess/"
_DATASET_DIGEST = 36
"""Characters of a digest that MLflow stores."""


@dataclass(frozen=True, slots=True)
class Pauses:
    """How long MLflow is left alone, in seconds."""

    shortest: float = 5.0
    """After a first failure; doubled with each further one."""
    longest: float = 120.0
    slow: float = 1.0
    """A call of `log` that takes longer is followed by a pause of `share` times as long."""
    share: float = 10.0


class MLflowTracker:
    """Logs the manifests of a training run to its one MLflow run. Nothing is asked of MLflow before the first call."""

    def __init__(
        self,
        run: Run,
        *,
        experiment: str,
        run_name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str] | None = None,
        tracking_uri: str | None = None,
        pauses: Pauses | None = None,
    ) -> None:
        """`params` is the whole configuration, nested; `tracking_uri` is by default MLFLOW_TRACKING_URI, or SQLite."""
        set_client_defaults()
        self.tracking_uri = tracking_uri or default_tracking_uri()
        self._run = run
        self._experiment = experiment
        self._run_name = run_name
        self._params = params
        self._tags = {
            **(tags or {}),
            "ratchet.run_id": run.run_id,
            "ratchet.version": ratchet.__version__,
            "ratchet.revision": code_revision(),
        }
        self._pauses = pauses or Pauses()
        self._lock = threading.RLock()
        self._client: MlflowClient | None = None
        self._tracked: TrackedRun | None = None
        self._progress = Progress()
        self._missed: int | None = None
        self._names: dict[str, str] = {}
        self._failures = 0
        self._paused_until = -math.inf

    @property
    def run_id(self) -> str | None:
        """The id of the MLflow run; None until it was reached."""
        return self._tracked.run_id if self._tracked else None

    def log(self, manifest: Manifest) -> None:
        """Log a committed manifest's metrics at its step and its time. Never raises for MLflow's sake.

        While MLflow fails or is slow, it is left alone for a while and the manifest is brought later.
        """
        with self._lock:
            if time.monotonic() >= self._paused_until and self._attempt(lambda: self._log(manifest)) is not None:
                return
            self._miss(manifest.content.step)

    def catch_up(self) -> int:
        """Log every committed manifest that MLflow lacks, and return how many there were; 0 if it cannot be reached."""
        with self._lock:
            # Others may have committed what this process was not told of.
            return self._attempt(lambda: self._replay(self._progress.floor)) or 0

    def finish(self, status: Status) -> None:
        """Bring what is missing and set the run's status, unless another program made the MLflow run."""
        with self._lock:
            self._attempt(lambda: self._finish(status))

    def keep_file(self, path: Path, folder: str) -> None:
        """Upload a file to the MLflow run's artifacts, in place of one of its name; a failure is only logged."""
        with self._lock:
            self._attempt(lambda: upload(*self._connected(), path, folder))

    # -- failures ----------------------------------------------------------------------------------------------------

    def _attempt(self, action: Callable[[], int]) -> int | None:
        """Return what `action` returns, or None if MLflow failed: a warning for the first failure of an outage."""
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            self._connect()
            result = action()
        except (MlflowException, SQLAlchemyError, OSError) as error:
            self._client = self._tracked = None
            pause = min(self._pauses.shortest * 2**self._failures, self._pauses.longest)
            self._paused_until = time.monotonic() + pause
            self._failures = min(self._failures + 1, 30)
            if self._failures == 1:
                logger.warning(
                    "MLflow at %s cannot be used; training goes on, its metrics are brought later: %s",
                    without_passwords(self.tracking_uri),
                    problem(error),
                )
            return None
        if self._failures:
            logger.info("MLflow at %s can be used again", without_passwords(self.tracking_uri))
        self._failures = 0
        return result

    def _miss(self, step: int | None) -> None:
        self._missed = min(step or 0, self._missed if self._missed is not None else step or 0)

    def _connect(self) -> None:
        if self._client is not None:
            return
        from mlflow import MlflowClient

        check_database_folder(self.tracking_uri)
        client = MlflowClient(tracking_uri=self.tracking_uri)
        tracked = open_run(
            client, root=self._run.uri, experiment=self._experiment, run_name=self._run_name, tags=self._tags
        )
        log_params(client, tracked, self._params)
        log_config(client, tracked, self._params)
        # What MLflow says it has, not what this process has sent: the database may have been set back.
        self._progress = Progress.from_json(tracked.tags.get(PROGRESS_TAG))
        self._miss(self._progress.floor)
        self._client, self._tracked = client, tracked

    # -- what is logged ----------------------------------------------------------------------------------------------

    def _log(self, manifest: Manifest) -> int:
        started = time.monotonic()
        count = self._replay()
        if not self._progress.has(manifest):
            count += self._send_all([manifest])
        seconds = time.monotonic() - started
        if seconds > self._pauses.slow:
            self._paused_until = time.monotonic() + min(seconds * self._pauses.share, self._pauses.longest)
        return count

    def _replay(self, since: int | None = None) -> int:
        """Send what is missing if anything may be: after a failure or a pause, at first, and where `since` says."""
        if since is not None:
            self._miss(since)
        if self._missed is None:
            return 0
        self._progress.lower(self._missed)
        count = self._send_all(self._progress.missing(self._run))
        self._missed = None
        return count

    def _finish(self, status: Status) -> int:
        count = self._replay()
        client, tracked = self._connected()
        if tracked.is_ours:
            client.set_terminated(tracked.run_id, status)
        return count

    def _send_all(self, manifests: Iterable[Manifest]) -> int:
        """Send manifests in as few requests as MLflow allows; return how many had something to send."""
        batch: list[Manifest] = []
        num_metrics = count = 0
        for manifest in manifests:
            if not manifest.provenance.metrics and not manifest.content.stage.startswith(_PREPROCESS):
                continue
            count += 1
            if batch and num_metrics + len(manifest.provenance.metrics) > _MAX_METRICS:
                self._send(batch)
                batch, num_metrics = [], 0
            batch.append(manifest)
            num_metrics += len(manifest.provenance.metrics)
        if batch:
            self._send(batch)
        return count

    def _send(self, manifests: Sequence[Manifest]) -> None:
        from mlflow.entities import RunTag

        client, tracked = self._connected()
        datasets = [data for manifest in manifests for data in _datasets(self._run, manifest)]
        if datasets:
            client.log_inputs(tracked.run_id, datasets)
        progress = self._progress.copy()
        for manifest in manifests:
            progress.add(manifest)
        metrics = self._metrics(manifests)
        # The tag goes with the last part, so that it never speaks of metrics that did not arrive.
        while len(metrics) > _MAX_METRICS:
            self._send_metrics(metrics[:_MAX_METRICS], [])
            metrics = metrics[_MAX_METRICS:]
        self._send_metrics(metrics, [RunTag(PROGRESS_TAG, progress.to_json())])
        self._progress = progress

    def _send_metrics(self, metrics: "list[Metric]", tags: list[Any]) -> None:
        from mlflow.exceptions import MlflowException

        client, tracked = self._connected()
        try:
            client.log_batch(tracked.run_id, metrics=metrics, tags=tags)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            # A deleted run refuses everything: a new connection finds or makes another.
            if client.get_run(tracked.run_id).info.lifecycle_stage != "active":
                raise
            if len(metrics) <= 1 and not tags:
                logger.warning("MLflow refused the metric %s: %s", metrics[0].key, error.message)
                return
            # One refused metric must neither take the others with it nor be tried for ever.
            for metric in metrics:
                self._send_metrics([metric], [])
            client.log_batch(tracked.run_id, tags=tags)

    def _metrics(self, manifests: Sequence[Manifest]) -> "list[Metric]":
        from mlflow.entities import Metric

        names = mlflow_names((name for manifest in manifests for name in manifest.provenance.metrics), self._names)
        for name, stored in names.items():
            if name != stored and name not in self._names:
                logger.info("metric %s is named %s in MLflow", name, stored)
        self._names |= names
        return [
            Metric(names[name], float(value), int(manifest.provenance.ended * 1000), manifest.content.step or 0)
            for manifest in manifests
            for name, value in manifest.provenance.metrics.items()
            if math.isfinite(value)
        ]

    def _connected(self) -> "tuple[MlflowClient, TrackedRun]":
        assert self._client is not None
        assert self._tracked is not None
        return self._client, self._tracked


def _datasets(run: Run, manifest: Manifest) -> "list[DatasetInput]":
    """Return the tables of a preprocess stage as MLflow's dataset inputs: names, digests and places, no data."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    if not manifest.content.stage.startswith(_PREPROCESS):
        return []
    split = manifest.content.stage.removeprefix(_PREPROCESS)
    found = []
    for role, artifact in manifest.provenance.artifacts.items():
        uri = f"{run.uri}/{artifact.folder}"
        dataset = Dataset(
            name=layout.stage_folder(manifest.content.stage, None),
            digest=artifact.digest[:_DATASET_DIGEST],
            source_type="s3" if uri.startswith("s3://") else "local",
            source=json.dumps({"uri": uri}),
            profile=json.dumps({"num_rows": artifact.rows, "role": role}),
        )
        tags = [InputTag("mlflow.data.context", split), InputTag("ratchet.sha256", artifact.digest)]
        found.append(DatasetInput(dataset, tags))
    return found
