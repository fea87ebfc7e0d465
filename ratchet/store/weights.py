"""Weights in storage: whole, or as what changed since an earlier step's.

Traps: a delta can be read only as long as everything that it builds on is there, back to the last whole copy, so that
nothing in between may be deleted alone; and since no step's files are in storage themselves, `read_weights` is the one
way to them.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ratchet.errors import StoreError
from ratchet.store import deltas, layout
from ratchet.store.artifacts import read_bytes, read_folder, write_bytes
from ratchet.store.manifest import Artifact, Delta, FileEntry, Manifest
from ratchet.store.objects import ObjectNotFoundError, ObjectStore
from ratchet.store.retired import refuse_retired
from ratchet.store.run import Run

_SUFFIX = ".delta"


def read_weights(run: Run, manifest: Manifest, role: str, target: Path) -> None:
    """Copy the weights that `manifest` names under `role` below the local folder `target`, checking every digest.

    The last whole copy is read, and the deltas since then are applied to it in memory, file by file. A StoreError names
    what is missing or damaged, and is a RetiredError where that was deleted on purpose; `target` is then of no use.
    """
    refuse_retired(run.store, manifest.stage, manifest.step, role)
    (start, whole), later = _chain(run, manifest, role)
    with _named(run, manifest, role, start):
        read_folder(run.store, whole, target)
    for entry in manifest.output(role).files:
        if entry in whole.files:
            continue
        data = np.fromfile(target / entry.path, np.uint8)
        for step, delta in later:
            with _named(run, manifest, role, step):
                _apply(run, delta, entry.path, data)
        sha256 = hashlib.sha256(data.data).hexdigest()
        if sha256 != entry.sha256:
            raise StoreError(
                f"{run.uri}/{manifest.output(role).folder}/{entry.path}, made of step {start} and the deltas since, "
                f"is damaged: its sha256 is {sha256}, its manifest says {entry.sha256}"
            )
        data.tofile(target / entry.path)


def write_delta(
    store: ObjectStore,
    folder: str,
    base: Artifact,
    base_step: int,
    new_entry: FileEntry,
    base_bytes: deltas.Buffer,
    new_bytes: deltas.Buffer,
) -> Artifact:
    """Write what changed in one file of `base` below `folder`, and describe all files as they are now.

    `base` is the artifact of `base_step`, itself whole or a delta, and `base_bytes` are its file's; they are not
    compared with its digest, and other bytes would make a delta that nobody can read. StoreError where `base` has no
    file of this name, or one of another length.
    """
    files = {entry.path: entry for entry in base.files}
    path, place = new_entry.path, f"{store.uri}/{folder}/{new_entry.path}"
    if path not in files:
        raise StoreError(f"{place}: no file of this name to write a delta to; step {base_step} has: {', '.join(files)}")
    old, sizes = files[path], [np.frombuffer(data, np.uint8).size for data in (base_bytes, new_bytes)]
    if not old.bytes == new_entry.bytes == sizes[0] == sizes[1]:
        raise StoreError(
            f"{place}: no delta from {old.bytes} to {new_entry.bytes} bytes, given {sizes[0]} and {sizes[1]}: "
            "expected equal lengths"
        )
    stored: tuple[FileEntry, ...] = ()
    if new_entry != old:
        delta = deltas.encode(base_bytes, new_bytes)
        stored = write_bytes(store, folder, {f"{path}{_SUFFIX}": memoryview(delta)}).files
    files[path] = new_entry
    return Artifact(
        folder=folder,
        files=tuple(files.values()),
        delta=Delta(base=base.digest, step=base_step, folder=folder, files=stored),
    )


def _chain(run: Run, manifest: Manifest, role: str) -> tuple[tuple[int, Artifact], list[tuple[int, Delta]]]:
    """Return the last whole copy and the deltas from there to `manifest`, each with its step."""
    stage, step, artifact = manifest.stage, manifest.step, manifest.output(role)
    assert step is not None, f"{stage} belongs to no step, so it has no weights"
    later: list[tuple[int, Delta]] = []
    while (delta := artifact.delta) is not None:
        place = f"{run.uri}/{artifact.folder}"
        # Ever earlier steps cannot lead in a circle.
        if delta.step >= step:
            raise StoreError(f"{place} of step {step} builds on step {delta.step}: expected an earlier one")
        found = run.manifest(stage, delta.step)
        if found is None:
            missing = layout.manifest(stage, delta.step)
            raise StoreError(f"{place} builds on step {delta.step}, but {run.uri}/{missing} is missing")
        base = found.output(role)
        if base.digest != delta.base:
            raise StoreError(
                f"{place} builds on {role} {delta.base} of step {delta.step}, but {run.uri}/{base.folder} "
                f"is {base.digest}"
            )
        if {entry.path for entry in base.files} != {entry.path for entry in artifact.files}:
            raise StoreError(f"{place} has other files than {run.uri}/{base.folder}, which it builds on")
        later.append((step, delta))
        step, artifact = delta.step, base
    return (step, artifact), later[::-1]


def _apply(run: Run, delta: Delta, path: str, data: npt.NDArray[np.uint8]) -> None:
    """Bring one file's bytes from the delta's base to the delta's step; a file that it does not name stays."""
    for entry in delta.files:
        if entry.path == f"{path}{_SUFFIX}":
            (changes,) = read_bytes(run.store, Artifact(folder=delta.folder, files=(entry,)))
            try:
                deltas.apply(data, changes)
            except StoreError as error:
                raise StoreError(f"{run.uri}/{delta.folder}/{entry.path}: {error}") from error


@contextmanager
def _named(run: Run, manifest: Manifest, role: str, step: int) -> Iterator[None]:
    """Say of a missing file what it is needed for."""
    try:
        yield
    except ObjectNotFoundError as error:
        # It may have been retired since it was begun to be read.
        refuse_retired(run.store, manifest.stage, manifest.step, role)
        wanted = layout.stage_folder(manifest.stage, manifest.step)
        raise ObjectNotFoundError(f"{role} of {wanted} needs that of step {step}: {error}") from error
