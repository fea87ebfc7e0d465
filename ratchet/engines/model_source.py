"""Where models come from: a local folder, the hub, or a folder of object storage, all as checked local folders.

Traps: a folder of that name wins over the hub. And what is copied from object storage is copied once a process, into
RATCHET_SCRATCH, and is used whole or not at all; the copy lives as long as the process, or until the files at the place
are others.
"""

import atexit
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from ratchet.engines.model_folder import TEXTS, WEIGHTS, check_file_names, check_model_folder, weight_names
from ratchet.errors import EngineError, StoreError
from ratchet.store import ObjectInfo, ObjectStore, open_store

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_TEXTS = ["*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
_STORE = "s3://"

Listing = tuple[tuple[str, int, float], ...]


@dataclass(frozen=True, slots=True)
class _Copy:
    """What lay at a place in object storage, and where it lies here."""

    uri: str
    listing: Listing
    """(name, bytes, time of the last write) of every file of the model."""
    folder: Path
    sizes: Mapping[str, int]
    """Of the files that were copied."""
    has_weights: bool

    def is_whole(self) -> bool:
        """Whether nobody has tidied the scratch disk meanwhile."""
        paths = ((self.folder / name, size) for name, size in self.sizes.items())
        return all(path.is_file() and path.stat().st_size == size for path, size in paths)


_copies: list[_Copy] = []
_lock = threading.Lock()
_scratch: Path | None = None


def resolve_model_folder(path_or_id: str, *, revision: str | None = None) -> Path:
    """A checked local folder for a path, an `s3://bucket/...` folder, or a hub id such as "org/name".

    A folder that exists wins over the hub. From the hub and from object storage only safetensors and what is text are
    taken. Raises EngineError where there is no such folder, where the hub cannot be reached, or where what is there is
    no model (`check_model_folder`), and StoreError where object storage refuses or cannot be reached.
    """
    if path_or_id.startswith(_STORE):
        return _stored(path_or_id, with_weights=True)
    folder = _local(path_or_id)
    if folder.exists():
        return check_model_folder(folder)
    if not _HUB_ID.fullmatch(path_or_id):
        raise EngineError(f"model folder {path_or_id!r} does not exist")
    return check_model_folder(_snapshot(path_or_id, revision, [f"*{WEIGHTS}", *_HUB_TEXTS]))


def resolve_tokenizer_folder(path_or_id: str) -> Path:
    """A local folder with a model's configuration and tokenizer, found and checked as by `resolve_model_folder`.

    From the hub and from object storage no weights are copied, although they must be there.
    """
    if path_or_id.startswith(_STORE):
        return _stored(path_or_id, with_weights=False)
    if _local(path_or_id).exists() or not _HUB_ID.fullmatch(path_or_id):
        return resolve_model_folder(path_or_id)
    try:
        names = HfApi().list_repo_files(path_or_id)
    except (HfHubHTTPError, OSError, ValueError):
        # What was downloaded before will do; where there is nothing, the error says more.
        return resolve_model_folder(path_or_id)
    check_file_names(path_or_id, names)
    return _snapshot(path_or_id, None, _HUB_TEXTS)


def _local(path: str) -> Path:
    return Path(path.removeprefix("file://")).expanduser()


def _snapshot(hub_id: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise EngineError(
            f"model {hub_id!r} is neither a local folder nor a hub model that could be downloaded: {error}"
        ) from error


def _stored(uri: str, *, with_weights: bool) -> Path:
    with _lock:
        try:
            store = open_store(uri)
            files = _model_files(store)
            listing = _listing(files)
            for copy in _copies:
                is_enough = copy.has_weights or not with_weights
                if copy.uri == store.uri and copy.listing == listing and is_enough and copy.is_whole():
                    return copy.folder
            copy = _copied(store, files, with_weights=with_weights)
        except StoreError as error:
            raise type(error)(f"model folder {uri!r} cannot be read: {error}") from error
        _copies.append(copy)
        return copy.folder


def _model_files(store: ObjectStore) -> dict[str, ObjectInfo]:
    """The model's files by name, checked by name; files of other kinds and folders below are left out."""
    everything = {info.key: info for info in store.list_objects("")}
    if not everything:
        raise EngineError(f"model folder {store.uri!r} does not exist: no object lies there")
    names = {key for key in everything if "/" not in key}
    try:
        check_file_names(store.uri, names)
    except EngineError as error:
        below = [key.rpartition("/")[0] for key in everything if key.endswith("/config.json")]
        if "config.json" in names or not below:
            raise
        exports = [folder for folder in below if folder.endswith("/export")]
        raise EngineError(f"{error}; there is one in {store.uri}/{(exports or below)[-1]}") from error
    return {name: everything[name] for name in sorted(names) if name.endswith((WEIGHTS, *TEXTS))}


def _listing(files: Mapping[str, ObjectInfo]) -> Listing:
    return tuple((name, info.size, info.modified) for name, info in files.items())


def _copied(store: ObjectStore, files: Mapping[str, ObjectInfo], *, with_weights: bool) -> _Copy:
    """Copy the files; StoreError unless they are the same ones, in full, before and after."""
    folder = Path(tempfile.mkdtemp(prefix=f"{_slug(store.uri)}-", dir=_scratch_folder()))
    try:
        names = [name for name in files if not name.endswith(WEIGHTS)]
        _download(store, folder, names)
        weights = weight_names(folder, files, place=store.uri)
        if with_weights:
            _check_space(store.uri, folder, sum(files[name].size for name in weights))
            logger.info("copying model %s to %s", store.uri, folder)
            _download(store, folder, weights)
            names += weights
        copy = _Copy(store.uri, _listing(files), folder, {name: files[name].size for name in names}, with_weights)
        if not copy.is_whole() or _listing(_model_files(store)) != copy.listing:
            raise StoreError("its files changed while they were copied; try again once they are complete")
        return copy
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _download(store: ObjectStore, folder: Path, names: list[str]) -> None:
    for name in names:
        store.download_file(name, folder / name)


def _check_space(uri: str, folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise EngineError(
            f"model folder {uri!r} has {needed / 1e9:.1f} GB of weights, and {folder.parent} {free / 1e9:.1f} GB free; "
            "RATCHET_SCRATCH names a folder on a larger disk"
        )


def _slug(uri: str) -> str:
    """What tells people, in later messages about the copy, where it came from."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", uri.removeprefix(_STORE))[-120:]


def _scratch_folder() -> Path:
    global _scratch
    if _scratch is None or not _scratch.is_dir():
        _scratch = Path(tempfile.mkdtemp(prefix="ratchet-base-", dir=os.environ.get("RATCHET_SCRATCH")))
        atexit.register(_remove, _scratch, os.getpid())
    return _scratch


def _remove(folder: Path, process_id: int) -> None:
    if os.getpid() == process_id:  # a fork that ends must not take its parent's models along
        shutil.rmtree(folder, ignore_errors=True)
