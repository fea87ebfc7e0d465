"""The trackers that a run names, behind one: `trainer.logger: [console, mlflow]`."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.errors import ConfigError
from ratchet.store.manifest import Manifest
from ratchet.store.run import Run
from ratchet.tracking.base import Status, Tracker
from ratchet.tracking.console import ConsoleTracker, JsonlTracker
from ratchet.tracking.mlflow_artifacts import Exhibit
from ratchet.tracking.mlflow_tracker import MLflowTracker
from ratchet.tracking.tensorboard_tracker import TensorBoardTracker

logger = logging.getLogger(__name__)

TRACKERS = ("console", "jsonl", "mlflow", "tensorboard")


class Trackers:
    """Several trackers as one. A full disk or an unreadable file costs that tracker's lines, never the run."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)
        self._failed: set[int] = set()

    def log(self, manifest: Manifest) -> None:
        """Show a committed manifest to every tracker."""
        for tracker in self.trackers:
            self._guard(tracker, partial(tracker.log, manifest))

    def catch_up(self) -> int:
        """Bring every tracker up to date; return how many manifests were shown, over all trackers."""
        return sum(self._guard(tracker, tracker.catch_up) or 0 for tracker in self.trackers)

    def finish(self, status: Status) -> None:
        """Tell every tracker how the run ended."""
        for tracker in self.trackers:
            self._guard(tracker, partial(tracker.finish, status))

    def close(self) -> None:
        """End what goes on beside the run in this process."""
        for tracker in self.trackers:
            if isinstance(tracker, MLflowTracker):
                tracker.close()

    @property
    def keeps_pages(self) -> bool:
        """Whether `keep_pages` would do anything."""
        return any(isinstance(tracker, MLflowTracker) for tracker in self.trackers)

    def keep_pages(self, last: int | None, made: Mapping[str, str]) -> None:
        """Keep the pages of the segments up to step `last`, for None those of all and of the run, where a tracker can.

        `made` are those that have been made already, by their names (`ratchet.tracking.report_pages`).
        """
        for tracker in self.trackers:
            if isinstance(tracker, MLflowTracker):
                self._guard(tracker, partial(tracker.keep_pages, last, made))

    def _guard(self, tracker: Tracker, action: Callable[[], int | None]) -> int | None:
        try:
            return action()
        except OSError as error:
            if id(tracker) not in self._failed:
                logger.warning("%s failed; training goes on: %s", type(tracker).__name__, error)
            self._failed.add(id(tracker))
            return None


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of trackers, each once; ConfigError for one that is not known."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"trainer.logger: no tracker {name!r}; expected some of {', '.join(TRACKERS)}")
    return tuple(dict.fromkeys(names))


def open_trackers(
    names: Sequence[str],
    run: Run,
    *,
    experiment: str,
    run_name: str,
    params: Mapping[str, Any],
    tags: Mapping[str, str] | None = None,
    tracking_uri: str | None = None,
    exhibits: Sequence[Exhibit] = (),
    system_metrics: bool = False,
    echo: Callable[[str], None] | None = None,
    folder: Path | None = None,
) -> Trackers:
    """Return the trackers that `names` lists. Nothing is contacted or written yet.

    `echo` gets the console's lines. Local files go to `folder` (by default the current one): `<run id>.jsonl`, and
    the folder `tensorboard/<run id>`. The others are MLflow's: see `MLflowTracker`.
    """
    place = folder or Path.cwd()
    makers: dict[str, Callable[[], Tracker]] = {
        "console": lambda: ConsoleTracker(run, echo),
        "jsonl": lambda: JsonlTracker(run, place / f"{run.run_id}.jsonl"),
        "mlflow": lambda: MLflowTracker(
            run,
            experiment=experiment,
            run_name=run_name,
            params=params,
            tags=tags,
            tracking_uri=tracking_uri,
            exhibits=exhibits,
            system_metrics=system_metrics,
        ),
        "tensorboard": lambda: TensorBoardTracker(run, place / "tensorboard" / run.run_id),
    }
    return Trackers([makers[name]() for name in check_names(names)])
