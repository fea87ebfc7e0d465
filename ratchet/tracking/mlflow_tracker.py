"""Metrics, params and data of a run in MLflow: one MLflow run, one point for each metric of each step.

Trap: MLflow keeps two points for one step if their timestamps differ, so everything that is sent comes from the
manifest, and sending it again changes nothing. The chain of manifests is the truth and MLflow a view of it: no failure
here may stop a run, and what was missed is brought later.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ratchet
from ratchet.environment import code_revision
from ratchet.store.manifest import Manifest
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.tracking import mlflow_metrics
from ratchet.tracking.base import Status
from ratchet.tracking.metric_names import MetricNames
from ratchet.tracking.mlflow_artifacts import Artifacts, Exhibit
from ratchet.tracking.mlflow_data import PREPROCESS, datasets
from ratchet.tracking.mlflow_params import log_params
from ratchet.tracking.mlflow_runs import (
    TrackedRun,
    check_database_folder,
    default_tracking_uri,
    is_plain,
    open_run,
    pipeline_tags,
    problem,
    set_client_defaults,
    without_passwords,
)
from ratchet.tracking.mlflow_system import SystemMonitor
from ratchet.tracking.pauses import Pauses, Rest
from ratchet.tracking.progress import Progress

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

PROGRESS_TAG = "ratchet.logged"
"""What MLflow has of the run, as `Progress` writes it; sent with the metrics that it speaks of."""

_QUICK = 10.0
"""Seconds: where steps are shorter, all stages of a step are sent in one request, when it ends."""


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
        exhibits: Sequence[Exhibit] = (),
        system_metrics: bool = False,
        is_session: bool = True,
    ) -> None:
        """`params` is the whole configuration, nested; `tracking_uri` is by default MLFLOW_TRACKING_URI, or SQLite.

        `exhibits` are what MLflow keeps of single manifests beside their metrics. `system_metrics` says whether the
        machine is measured, too, from the first connection until `finish` or `close`. Whoever only brings what is
        missing is no session of the run: the code that it runs is not the run's.
        """
        set_client_defaults()
        self.tracking_uri = tracking_uri or default_tracking_uri()
        self._run = run
        self._experiment = experiment
        self._run_name = run_name
        self._params = params
        code = {"ratchet.version": ratchet.__version__, "ratchet.revision": code_revision()} if is_session else {}
        self._tags = {**(tags or {}), "ratchet.run_id": run.run_id, **code}
        pauses = pauses or Pauses()
        self._rest = Rest(pauses)
        self._artifacts = Artifacts(run, params, exhibits, wait=pauses.artifacts)
        self._measures = system_metrics
        self._monitor: SystemMonitor | None = None
        self._lock = threading.RLock()
        self._client: MlflowClient | None = None
        self._tracked: TrackedRun | None = None
        self._waiting: list[Manifest] = []
        self._updated, self._pace = -math.inf, math.inf
        self._progress = Progress()
        self._missed: int | None = None
        self._names = MetricNames({}, ())

    @property
    def run_id(self) -> str | None:
        """The id of the MLflow run; None until it was reached."""
        return self._tracked.run_id if self._tracked else None

    @property
    def missing_artifacts(self) -> str:
        """Class of the error for which artifacts are missing in MLflow; empty where they could be written."""
        return self._artifacts.problem

    def log(self, manifest: Manifest) -> None:
        """Log a committed manifest's metrics at its step and its time. Never raises for MLflow's sake.

        While MLflow fails or is slow, it is left alone for a while and the manifest is brought later.
        """
        with self._lock:
            self._waiting.append(manifest)
            if not self._is_held(manifest):
                self._send_waiting()

    def catch_up(self) -> int:
        """Log every committed manifest that MLflow lacks, and return how many there were; 0 if it cannot be reached."""
        with self._lock:
            # They are in the chain.
            self._waiting.clear()
            return self._attempt(self._catch_up) or 0

    def finish(self, status: Status) -> None:
        """Bring what is missing and set the run's status, unless another program made the MLflow run."""
        self.close()
        with self._lock:
            self._attempt(lambda: self._finish(status))

    def keep_pages(self, last: int | None, made: Mapping[str, str]) -> None:
        """Bring the pages of the segments up to step `last`; for None, those of all, and that of the whole run.

        `made` are pages that are there already, by their names; one that is missing is made. A failure is only logged.
        """
        with self._lock:
            self._attempt(lambda: self._artifacts.pages(last, made))

    def close(self) -> None:
        """Send what waits, and measure the machine no more."""
        with self._lock:
            self._send_waiting()
        self._measures = False
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None

    # -- failures ----------------------------------------------------------------------------------------------------

    def _attempt(self, action: Callable[[], int | None]) -> int | None:
        """Return what `action` returns, or None if MLflow failed: a warning for the first failure of an outage."""
        started = time.monotonic()
        try:
            self._connect()
            result = action()
        except Exception as error:
            # A driver that is missing, a setting, a proxy's answer: MLflow's client lets errors of any class through.
            self._client = self._tracked = None
            if self._rest.failed(time.monotonic() - started):
                logger.warning(
                    "MLflow at %s cannot be used; training goes on, its metrics are brought later: %s",
                    without_passwords(self.tracking_uri),
                    problem(error),
                    exc_info=not is_plain(error),
                )
            return None
        if self._rest.worked():
            logger.info("MLflow at %s can be used again", without_passwords(self.tracking_uri))
        return result

    def _miss(self, step: int | None) -> None:
        self._missed = min(step or 0, self._missed if self._missed is not None else step or 0)
        self._artifacts.miss(self._missed)

    def _connect(self) -> None:
        if self._client is not None:
            return
        from mlflow import MlflowClient

        check_database_folder(self.tracking_uri)
        client = MlflowClient(tracking_uri=self.tracking_uri)
        tags = {**pipeline_tags(next(self._run.submissions(), {})), **self._tags}
        tracked = open_run(client, root=self._run.uri, experiment=self._experiment, run_name=self._run_name, tags=tags)
        log_params(client, tracked, self._params)
        # What MLflow says it has, not what this process has sent: the database may have been set back.
        self._progress = Progress.from_json(tracked.tags.get(PROGRESS_TAG))
        self._miss(self._progress.floor)
        self._names = MetricNames(tracked.tags, tracked.metrics)
        self._client, self._tracked = client, tracked
        self._artifacts.open(client, tracked)
        if self._measures and self._monitor is None:
            self._monitor = SystemMonitor(self._destination, epoch=tracked.started)
            self._measures = self._monitor.start()

    def _destination(self) -> "tuple[MlflowClient, str] | None":
        client, tracked = self._client, self._tracked
        return (client, tracked.run_id) if client is not None and tracked is not None and self._rest.is_over else None

    # -- what is logged ----------------------------------------------------------------------------------------------

    def _is_held(self, manifest: Manifest) -> bool:
        """Whether the manifest can wait for the others of its step."""
        if manifest.stage == POLICY_UPDATE:
            now = time.monotonic()
            self._pace, self._updated = now - self._updated, now
            return False
        return bool(manifest.step) and self._pace < _QUICK

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting or (self._rest.is_over and self._attempt(lambda: self._log(waiting)) is not None):
            return
        self._miss(min(manifest.step or 0 for manifest in waiting))

    def _log(self, manifests: Sequence[Manifest]) -> int:
        started = time.monotonic()
        count = self._replay()
        count += self._send_all(one for one in manifests if not self._progress.has(one))
        for manifest in manifests:
            self._artifacts.log(manifest)
        self._rest.took(time.monotonic() - started)
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

    def _catch_up(self) -> int:
        # Others may have committed what this process was not told of.
        count = self._replay(self._progress.floor)
        self._artifacts.bring()
        return count

    def _finish(self, status: Status) -> int:
        count = self._replay()
        if status == "FINISHED":
            # Whoever was told to stop has seconds left, and goes on or is resumed.
            self._artifacts.bring()
        client, tracked = self._connected()
        if tracked.is_ours:
            client.set_terminated(tracked.run_id, status)
        return count

    def _send_all(self, manifests: Iterable[Manifest]) -> int:
        """Send manifests in as few requests as MLflow allows; return how many had something to send."""
        told = (one for one in manifests if one.metrics or one.stage.startswith(PREPROCESS))
        count = 0
        for batch in mlflow_metrics.batches(told):
            self._send(batch)
            count += len(batch)
        return count

    def _send(self, manifests: Sequence[Manifest]) -> None:
        from mlflow.entities import RunTag

        client, tracked = self._connected()
        inputs = [data for manifest in manifests for data in datasets(self._run, manifest)]
        if inputs:
            client.log_inputs(tracked.run_id, inputs)
        progress = self._progress.copy()
        for manifest in manifests:
            progress.add(manifest)
        names = self._names.stored(name for manifest in manifests for name in manifest.metrics)
        if self._names.new_tags():
            self._send_names()
        kept = self._artifacts.tags()
        tags = [RunTag(PROGRESS_TAG, progress.to_json()), *kept]
        mlflow_metrics.send(client, tracked.run_id, mlflow_metrics.points(manifests, names), tags)
        self._progress = progress
        self._artifacts.noted(kept)

    def _send_names(self) -> None:
        """Ahead of the metrics: no curve may be there of which nothing says whose it is."""
        client, tracked = self._connected()
        # The pods of other stages may have named some in the meantime.
        self._names.learn(client.get_run(tracked.run_id).data.tags)
        renamed = self._names.new_tags()
        for key, value in renamed.items():
            client.set_tag(tracked.run_id, key, value)
        self._names.learn(renamed)

    def _connected(self) -> "tuple[MlflowClient, TrackedRun]":
        assert self._client is not None
        assert self._tracked is not None
        return self._client, self._tracked
