"""The trackers of a run by its config, and bringing MLflow up to date when no process works on the run any more."""

from collections.abc import Callable
from dataclasses import dataclass

from ratchet.config import RunConfig
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.tracking.mlflow_artifacts import Exhibit
from ratchet.tracking.mlflow_tables import CompletionTables
from ratchet.tracking.mlflow_tracker import MLflowTracker
from ratchet.tracking.pauses import Pauses
from ratchet.tracking.trackers import Trackers, open_trackers


@dataclass(frozen=True, kw_only=True, slots=True)
class Synced:
    """What MLflow has after it was brought up to date."""

    tracking_uri: str
    run_id: str
    """Of the MLflow run."""
    num_stages: int
    """Whose metrics or data it lacked."""
    missing: str
    """Why artifacts could not be written, empty where they are there."""


def open_views(run: Run, config: RunConfig, echo: Callable[[str], None] | None = None) -> Trackers:
    """Return the trackers that the config names. `echo` gets the console tracker's lines."""
    return open_trackers(
        config.trainer.logger,
        # Trackers see what is committed, never what this process has under way.
        Run(run.root, run.run_id),
        experiment=config.trainer.project_name,
        run_name=run.run_id,
        params=config.model_dump(mode="json"),
        exhibits=_exhibits(config),
        system_metrics=config.trainer.system_metrics and config.trainer.grain != "stage",
        echo=echo,
    )


def sync(run: Run, config: RunConfig, *, is_finished: bool, tracking_uri: str | None = None) -> Synced | None:
    """Bring everything to MLflow that it lacks of the run, the pages of a finished one, too; None if it cannot be used.

    `tracking_uri` is by default MLFLOW_TRACKING_URI.
    """
    tracker = MLflowTracker(
        Run(run.root, run.run_id),
        experiment=config.trainer.project_name,
        run_name=run.run_id,
        params=config.model_dump(mode="json"),
        exhibits=_exhibits(config),
        tracking_uri=tracking_uri,
        # Somebody asks for it: a storage that failed a minute ago is tried again.
        pauses=Pauses(artifacts=0.0),
        tags=_code(run),
        is_session=False,
    )
    count = tracker.catch_up()
    if is_finished:
        tracker.keep_pages(None, {})
        tracker.finish("FINISHED")
    if tracker.run_id is None:
        return None
    return Synced(
        tracking_uri=tracker.tracking_uri, run_id=tracker.run_id, num_stages=count, missing=tracker.missing_artifacts
    )


def _code(run: Run) -> dict[str, str]:
    newest = run.manifest(POLICY_UPDATE, run.last_step())
    return {} if newest is None else {"ratchet.revision": newest.provenance.code_revision}


def _exhibits(config: RunConfig) -> list[Exhibit]:
    every = config.trainer.log_completions_freq
    return [CompletionTables(every)] if every > 0 else []
