"""Artifacts of a run in MLflow: its configuration, its pages, and what is shown of single manifests.

The chain of manifests is their outbox as it is the metrics': what is sent is made from it, under a name that says what
it is, so that sending it again replaces it. What could not be sent is sent later, oldest first. Trap: MLflow's artifact
storage can be out of reach, or closed to this process, while MLflow itself answers. It never holds metrics up, and a
storage that failed is left alone for minutes by every process of the run.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ratchet.errors import RatchetError, StoreUnavailableError
from ratchet.redaction import hidden
from ratchet.store.manifest import Manifest
from ratchet.store.run import Run
from ratchet.tracking import report_pages
from ratchet.tracking.mlflow_params import config_digest, send_config
from ratchet.tracking.mlflow_runs import TrackedRun
from ratchet.tracking.progress import Progress

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import RunTag

logger = logging.getLogger(__name__)

ARTIFACTS_TAG = "ratchet.artifacts"
"""What MLflow has of the run's artifacts, as `_State` writes it."""


class Exhibit(Protocol):
    """Something of single manifests that MLflow keeps beside their metrics: a table of completions, for one."""

    def wants(self, manifest: Manifest) -> bool:
        """Whether there is something to send for this manifest. Called for each one: it reads nothing but the manifest.

        The same answer must come from every process, at every time.
        """
        ...

    def send(self, client: "MlflowClient", mlflow_run_id: str, run: Run, manifest: Manifest) -> None:
        """Make it from what is committed and send it. Doing it twice must be the same as doing it once.

        An error of MLflow or of its storage is raised as it is: the same manifest is offered again later, before any
        later one. With any other error the manifest is passed over, with a warning.
        """
        ...


@dataclass(slots=True)
class _State:
    """What of the run's artifacts has arrived."""

    config: str = ""
    """Digest of the configuration that is there."""
    exhibits: Progress = field(default_factory=Progress)
    pages: int = 0
    """Last step of the newest segment whose page is there, with those of all segments before it."""
    failed_at: float = 0.0
    """Unix seconds; when the storage failed, 0 if it worked the last time."""
    error: str = ""
    """Class of that failure's error."""

    def to_json(self) -> str:
        """Return a short text, for a tag."""
        told: dict[str, Any] = {"config": self.config, "exhibits": json.loads(self.exhibits.to_json())}
        told["pages"] = self.pages
        if self.failed_at:
            told["failed"] = {"at": self.failed_at, "error": self.error}
        return json.dumps(told)

    @classmethod
    def from_json(cls, text: str | None) -> "_State":
        """Read `to_json`'s text; anything else is a run that has nothing."""
        try:
            told = json.loads(text or "{}")
            failed = told.get("failed", {})
            return cls(
                config=str(told["config"]),
                exhibits=Progress.from_json(json.dumps(told["exhibits"])),
                pages=int(told["pages"]),
                failed_at=float(failed.get("at", 0.0)),
                error=str(failed.get("error", "")),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls()


class Artifacts:
    """The artifacts of one training run in its MLflow run.

    Failures of the artifact storage end here, with one warning. What MLflow itself refuses is raised to the tracker.
    """

    def __init__(self, run: Run, config: Mapping[str, Any], exhibits: Sequence[Exhibit] = (), *, wait: float) -> None:
        """`config` is the whole configuration; `wait` how many seconds a storage that failed is left alone."""
        self._run = run
        self._config = config
        self._exhibits = tuple(exhibits)
        self._wait = wait
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._state = _State()
        self._stored = ""
        self._is_behind = True

    @property
    def problem(self) -> str:
        """Class of the error for which something is missing; empty where the storage worked the last time."""
        return self._state.error

    def open(self, client: "MlflowClient", tracked: TrackedRun) -> None:
        """Send to this MLflow run from now on: what MLflow says it has, not what this process has sent."""
        self._client, self._run_id = client, tracked.run_id
        self._stored = tracked.tags.get(ARTIFACTS_TAG, "")
        self._state = _State.from_json(self._stored)
        self._is_behind = True
        self._attempt(self._bring_config)

    def miss(self, step: int) -> None:
        """Note that manifests from `step` on may not have been shown to `log`."""
        self._state.exhibits.lower(step)
        self._is_behind = True

    def log(self, manifest: Manifest) -> None:
        """Send what there is to send of a committed manifest, after whatever is missing of earlier ones."""
        if self._state.exhibits.has(manifest):
            return
        if any(exhibit.wants(manifest) for exhibit in self._exhibits):
            self._attempt(self._bring_exhibits if self._is_behind else lambda: self._show_all([manifest]))
        elif not self._is_behind:
            self._state.exhibits.add(manifest)

    def bring(self) -> None:
        """Send the configuration and what is missing of every committed manifest."""
        self._is_behind = True
        self._attempt(self._bring_config, self._bring_exhibits)

    def pages(self, last: int | None, made: Mapping[str, str]) -> None:
        """Send the pages of the segments up to step `last`; for None, of all, and then that of the whole run.

        `made` are those that have been made already, by their names; the others are made here if they are missing.
        """
        self._attempt(lambda: self._bring_pages(last, made))

    def tags(self) -> "list[RunTag]":
        """Return what is to be noted in MLflow of the state, to be sent along with something else."""
        from mlflow.entities import RunTag

        text = self._state.to_json()
        return [] if self._is_behind or text == self._stored else [RunTag(ARTIFACTS_TAG, text)]

    def noted(self, tags: "Sequence[RunTag]") -> None:
        """Say that `tags` have arrived."""
        for tag in tags:
            self._stored = tag.value

    # -- what is sent ------------------------------------------------------------------------------------------------

    def _bring_config(self) -> None:
        digest = config_digest(self._config)
        if self._state.config != digest:
            send_config(self._connected(), self._run_id, self._config)
            self._state.config = digest

    def _bring_exhibits(self) -> None:
        if self._exhibits:
            self._show_all(self._state.exhibits.missing(self._run))
        self._is_behind = False

    def _show_all(self, manifests: Iterable[Manifest]) -> None:
        for manifest in manifests:
            for exhibit in self._exhibits:
                if exhibit.wants(manifest):
                    self._show(exhibit, manifest)
            self._state.exhibits.add(manifest)

    def _show(self, exhibit: Exhibit, manifest: Manifest) -> None:
        from mlflow.exceptions import MlflowException

        place = f"{manifest.stage} of step {manifest.step}"
        try:
            exhibit.send(self._connected(), self._run_id, self._run, manifest)
        except StoreUnavailableError:
            raise
        except RatchetError as error:
            logger.warning("%s cannot be shown in MLflow: %s", place, hidden(str(error)))
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            logger.warning("%s cannot be shown in MLflow, which refuses it: %s", place, error.message)
        except _storage_errors():
            raise
        except Exception:
            # A view must not stop the run that it shows.
            logger.warning("%s cannot be shown in MLflow", place, exc_info=True)

    def _bring_pages(self, last: int | None, made: Mapping[str, str]) -> None:
        upto = self._run.last_step() if last is None else last
        for first, end in report_pages.segments(self._run, self._state.pages, upto):
            self._send_page(report_pages.segment_page(first, end), made, first, end)
            self._state.pages = end
        if last is None and upto > 0:
            self._send_page(report_pages.RUN_PAGE, made)

    def _send_page(self, name: str, made: Mapping[str, str], first: int = 1, last: int | None = None) -> None:
        try:
            text = made.get(name) or report_pages.page(self._run, first, last)
        except StoreUnavailableError:
            raise
        except RatchetError as error:
            logger.warning("no %s in MLflow: %s", name, hidden(str(error)))
            return
        self._connected().log_text(self._run_id, text, f"{report_pages.FOLDER}/{name}")

    # -- failures ----------------------------------------------------------------------------------------------------

    def _attempt(self, *actions: Callable[[], None]) -> None:
        if time.time() < self._state.failed_at + self._wait:
            self._is_behind = True
            return
        state = self._state
        try:
            for action in actions:
                action()
        except Exception as error:
            # Each kind of storage has a client of its own, with errors of its own.
            self._is_behind = True
            if not state.failed_at:
                logger.warning(
                    "MLflow's artifact storage cannot be written from here; training goes on, what is missing is "
                    "brought later: %s",
                    hidden(str(error)),
                )
            state.failed_at, state.error = time.time(), type(error).__name__
            # Told in MLflow, so that the pods of the other stages do not wait for the same storage.
            self._note()
            return
        if state.failed_at:
            logger.info("MLflow's artifact storage can be written again")
            state.failed_at, state.error = 0.0, ""
        self._note()

    def _note(self) -> None:
        text = self._state.to_json()
        if text != self._stored:
            self._connected().set_tag(self._run_id, ARTIFACTS_TAG, text)
            self._stored = text

    def _connected(self) -> "MlflowClient":
        assert self._client is not None
        return self._client


def _storage_errors() -> tuple[type[Exception], ...]:
    """What MLflow's clients raise where artifacts cannot be written."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError
    from mlflow.exceptions import MlflowException

    return (MlflowException, OSError, BotoCoreError, ClientError, Boto3Error, ImportError)
