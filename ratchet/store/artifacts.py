"""Writing an attempt's files and reading committed ones back, with their digests checked.

Traps: what an attempt writes exists only once a manifest names it; nothing here publishes anything. And bytes may be
damaged on the way only: a file whose digest is another one is read once more before it counts as damaged.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ratchet.errors import DamagedError, StoreError
from ratchet.store.manifest import Artifact, FileEntry, sha256_file, sha256_files
from ratchet.store.objects import ObjectStore


def write_bytes(
    store: ObjectStore, folder: str, files: Mapping[str, bytes | memoryview], *, rows: int | None = None
) -> Artifact:
    """Write small files below `folder` and describe them."""
    entries = []
    for path, data in sorted(files.items()):
        store.put(f"{folder}/{path}", data)
        entries.append(FileEntry(path=path, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))
    return Artifact(folder=folder, files=tuple(entries), rows=rows)


def write_folder(store: ObjectStore, folder: str, source: Path, *, is_given: bool = False) -> Artifact:
    """Copy every file below the local folder `source` to `folder` and describe them; symbolic links are followed.

    Files that are given are the store's from then on: nobody writes to them any more.
    """
    artifact = describe_folder(folder, source)
    if not artifact.files:
        raise StoreError(f"{source} holds no file to store under {store.uri}/{folder}")
    for entry in artifact.files:
        store.upload_file(source / entry.path, f"{folder}/{entry.path}", is_given=is_given)
    return artifact


def describe_folder(folder: str, source: Path) -> Artifact:
    """Describe the files below the local folder `source` as they would be stored below `folder`."""
    paths = sorted(path for path in source.rglob("*") if path.is_file())
    entries = [
        FileEntry(path=path.relative_to(source).as_posix(), bytes=path.stat().st_size, sha256=sha256)
        for path, sha256 in sha256_files(paths).items()
    ]
    return Artifact(folder=folder, files=tuple(sorted(entries, key=lambda entry: entry.path)))


def read_bytes(store: ObjectStore, artifact: Artifact) -> list[bytes]:
    """Return the files' bytes in order; a StoreError names the file whose bytes are not the committed ones."""
    _check_whole(store, artifact)
    contents = []
    for entry in artifact.files:
        key = f"{artifact.folder}/{entry.path}"
        data = store.get(key)
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            data = store.get(key)
            _check(store, artifact, entry, hashlib.sha256(data).hexdigest())
        contents.append(data)
    return contents


def read_folder(store: ObjectStore, artifact: Artifact, target: Path) -> None:
    """Copy the artifact's files below the local folder `target`, checking every digest."""
    _check_whole(store, artifact)
    # One file is hashed while the next one is under way.
    with ThreadPoolExecutor(1) as hasher:
        digests = []
        for entry in artifact.files:
            path = target / entry.path
            store.download_file(f"{artifact.folder}/{entry.path}", path)
            digests.append(hasher.submit(sha256_file, path))
        for entry, digest in zip(artifact.files, digests, strict=True):
            if digest.result() != entry.sha256:
                path = target / entry.path
                store.download_file(f"{artifact.folder}/{entry.path}", path)
                _check(store, artifact, entry, sha256_file(path))


def is_present(store: ObjectStore, artifact: Artifact) -> bool:
    """Whether every stored file is there with its size; retention may have deleted them. Of a delta, not its base."""
    folder, entries = artifact.stored
    return all(store.size(f"{folder}/{entry.path}") == entry.bytes for entry in entries)


def delete(store: ObjectStore, artifact: Artifact) -> None:
    """Delete the artifact's stored files; deltas that build on them can then be read no more."""
    folder, entries = artifact.stored
    for entry in entries:
        store.delete(f"{folder}/{entry.path}")


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield an empty local folder that is deleted afterwards; RATCHET_SCRATCH names a larger disk than /tmp."""
    folder = Path(tempfile.mkdtemp(prefix="ratchet-", dir=os.environ.get("RATCHET_SCRATCH")))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_whole(store: ObjectStore, artifact: Artifact) -> None:
    if artifact.delta is not None:
        raise StoreError(
            f"{store.uri}/{artifact.folder} holds only what changed since step {artifact.delta.step}: "
            "expected an artifact that is stored whole (`ratchet.store.weights` reads both)"
        )


def _check(store: ObjectStore, artifact: Artifact, entry: FileEntry, sha256: str) -> None:
    if sha256 != entry.sha256:
        place = f"{store.uri}/{artifact.folder}/{entry.path}"
        raise DamagedError(f"{place} is damaged: its sha256 is {sha256}, its manifest says {entry.sha256}")
