"""Metrics as lines of text: one line for each step on the console, one JSON object for each manifest in a file."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ratchet.errors import StoreError
from ratchet.store.manifest import Manifest
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.tracking.base import Status
from ratchet.tracking.metrics import step_line

logger = logging.getLogger(__name__)


class ConsoleTracker:
    """Tells each step in one line when its policy_update is committed; what comes later gets a line of its own."""

    def __init__(self, run: Run, echo: Callable[[str], None] | None = None) -> None:
        """`echo` gets every line; by default they are logged."""
        self._run = run
        self._echo = echo or logger.info
        self._metrics: dict[str, float] = {}
        self._step: int | None = None
        self._is_partial = False
        self._told = 0

    def log(self, manifest: Manifest) -> None:
        step, metrics = manifest.content.step, manifest.provenance.metrics
        if step is None:
            return
        is_update = manifest.content.stage == POLICY_UPDATE
        if step <= self._told:
            # Validation before training, or after the update: no later manifest of this step would bring it.
            if metrics and not is_update:
                self._echo(step_line(step, metrics))
            return
        if step != self._step:
            # Of the first step that this process sees, an earlier one may have run some stages.
            self._is_partial = self._step is None
            self._step, self._metrics = step, {}
        if is_update and self._is_partial:
            for earlier in self._run.step_manifests(step):
                self._metrics |= earlier.provenance.metrics
        self._metrics |= metrics
        if is_update:
            self._told = step
            self._echo(step_line(step, self._metrics))

    def catch_up(self) -> int:
        return 0

    def finish(self, status: Status) -> None:
        self._echo(f"run {self._run.run_id}: {status.lower()}")


class JsonlTracker:
    """Appends one JSON object for each manifest to a local file, or gives it to a callable.

    Example: {"run_id": "r1", "step": 3, "stage": "reward", "ended": 1700000000.0,
    "metrics": {"critic/score/mean": 0.5}}.
    """

    def __init__(self, run: Run, target: Path | str | Callable[[dict[str, Any]], None]) -> None:
        self._run = run
        self._path = Path(target) if isinstance(target, Path | str) else None
        self._call = target if callable(target) else self._append
        self._seen: set[tuple[int | None, str]] | None = None

    def log(self, manifest: Manifest) -> None:
        key = (manifest.content.step, manifest.content.stage)
        if not manifest.provenance.metrics or key in self._read():
            return
        self._call(
            {
                "run_id": self._run.run_id,
                "step": manifest.content.step,
                "stage": manifest.content.stage,
                "ended": manifest.provenance.ended,
                "metrics": manifest.provenance.metrics,
            }
        )
        self._read().add(key)

    def catch_up(self) -> int:
        """Append what the file lacks. A callable is not asked what it has, so it gets only what comes from now on."""
        if self._path is None:
            return 0
        before = len(self._read())
        for step in self._run.steps():
            for manifest in self._run.step_manifests(step):
                self.log(manifest)
        return len(self._read()) - before

    def finish(self, status: Status) -> None:
        """Nothing is held open."""

    def _read(self) -> set[tuple[int | None, str]]:
        """Return which manifests the target has; of a file, what its lines say, whoever wrote them."""
        if self._seen is None:
            self._seen = set()
            if self._path is not None and self._path.exists():
                text = self._path.read_text()
                whole = text[: text.rfind("\n") + 1]
                if whole != text:
                    # A process was killed within a line: what is half there is written again, whole.
                    self._path.write_text(whole)
                self._seen = self._keys(whole)
        return self._seen

    def _keys(self, text: str) -> set[tuple[int | None, str]]:
        try:
            records = [json.loads(line) for line in text.splitlines()]
            mine = [record for record in records if record["run_id"] == self._run.run_id]
            return {(record["step"], record["stage"]) for record in mine}
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{self._path} is not a file of Ratchet's metrics: {error!r}") from error

    def _append(self, record: dict[str, Any]) -> None:
        assert self._path is not None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
