"""Publishing each version of a model: its weights in full, or as what changed since the version before.

Trap: the digest of a version is that of its whole file, however it is stored; only so do grains publish equal content.
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ratchet.stages.base import Context
from ratchet.store.manifest import Artifact, FileEntry
from ratchet.store.weights import write_delta
from ratchet.store.writer import direct

if TYPE_CHECKING:
    from torch import Tensor

    from ratchet.engines.flat_weights import FlatWeights

_FILE = "model.safetensors"
_WORTH = 0.7
"""A delta of more than this share of the file is hardly worth its chain: the next version is stored in full."""


@dataclass(frozen=True, slots=True)
class _Version:
    step: int
    file: "FlatWeights"
    artifact: "Future[Artifact]"


class Publisher:
    """Publishes the versions of one model in order; between two full copies come deltas."""

    def __init__(self, role: str, full_freq: int) -> None:
        """Every `full_freq` steps the weights are stored in full, and whenever the version before is not at hand."""
        self._role = role
        self._full_freq = full_freq
        self._last: _Version | None = None
        self._spare: list[FlatWeights] = []
        self._is_worth_it = True

    def publish(self, context: Context, step: int, weights: "Mapping[str, Tensor]") -> "Future[Artifact]":
        """Copy the weights and let the writer store them; they may change once this returns."""
        file = self._file(weights)
        base = self._last if self._last is not None and self._last.step == step - 1 else None
        is_full = step % self._full_freq == 0
        artifact = context.writer.submit(lambda: self._write(context, file, base, is_full=is_full))
        self._last = _Version(step, file, artifact)
        return artifact

    def _file(self, weights: "Mapping[str, Tensor]") -> "FlatWeights":
        from ratchet.engines.flat_weights import FlatWeights

        if not self._spare:
            return FlatWeights.like(weights)
        file = self._spare.pop()
        file.fill(weights)
        return file

    def _write(self, context: Context, file: "FlatWeights", base: _Version | None, *, is_full: bool) -> Artifact:
        """Store a version; afterwards the memory of the one before is free for another."""
        file.wait()
        store, folder = direct(context.store), f"{context.folder}/{self._role}"
        entry = _describe(file)
        if base is None or is_full or not self._is_worth_it:
            store.put(f"{folder}/{entry.path}", file.data)
            artifact = Artifact(folder=folder, files=(entry,))
            self._is_worth_it = True
        else:
            artifact = write_delta(store, folder, base.artifact.result(), base.step, entry, base.file.data, file.data)
            _, stored = artifact.stored
            self._is_worth_it = sum(one.bytes for one in stored) <= _WORTH * entry.bytes
        if base is not None:
            self._spare.append(base.file)
        return artifact


def digest_of_weights(weights: "Mapping[str, Tensor]") -> str:
    """Return the digest of the artifact that these weights are published as; nothing is written."""
    from ratchet.engines.flat_weights import FlatWeights

    file = FlatWeights.like(weights)
    file.wait()
    return Artifact(folder="", files=(_describe(file),)).digest


def _describe(file: "FlatWeights") -> FileEntry:
    return FileEntry(path=_FILE, bytes=len(file.data), sha256=hashlib.sha256(file.data).hexdigest())
