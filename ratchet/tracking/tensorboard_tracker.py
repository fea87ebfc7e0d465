"""Metrics as TensorBoard event files; needs the package `tensorboard`, which is not among Ratchet's dependencies.

Trap: event files are only ever appended to, so what they hold is noted beside them to keep a resumed curve single.
"""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.errors import ConfigError
from ratchet.store.manifest import Manifest
from ratchet.store.run import Run
from ratchet.tracking.base import Status
from ratchet.tracking.progress import Progress

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_PROGRESS = "ratchet-logged.json"


class TensorBoardTracker:
    """Writes every metric as a scalar at its step and its time into `folder`."""

    def __init__(self, run: Run, folder: Path) -> None:
        """Raise ConfigError if tensorboard is not installed."""
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("trainer.logger: 'tensorboard' needs the package tensorboard: pip install tensorboard")
        self._run = run
        self._folder = folder
        self._writer: SummaryWriter | None = None
        path = folder / _PROGRESS
        self._progress = Progress.from_json(path.read_text() if path.exists() else None)
        self._is_behind = True

    def log(self, manifest: Manifest) -> None:
        if self._is_behind:
            self.catch_up()
        if not self._progress.has(manifest):
            self._write(manifest)

    def catch_up(self) -> int:
        """Write what the event files lack."""
        missing = list(self._progress.missing(self._run))
        for manifest in missing:
            self._write(manifest)
        self._is_behind = False
        return len(missing)

    def finish(self, status: Status) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, manifest: Manifest) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder))
        for name, value in manifest.provenance.metrics.items():
            self._writer.add_scalar(name, value, manifest.content.step or 0, manifest.provenance.ended)
        self._writer.flush()
        self._progress.add(manifest)
        (self._folder / _PROGRESS).write_text(self._progress.to_json())
