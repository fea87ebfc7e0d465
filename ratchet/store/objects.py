"""The small interface behind which object storage lives: bytes under keys, and nothing about runs.

Keys are relative, `/`-separated and checked by `check_key`. A listing always asks for a folder, with its trailing
slash, so that `step-1` never leaks `step-10`. Trap: no key may be the folder of another ("a" beside "a/b"); S3 allows
it, disks and servers that keep a tree do not.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from ratchet.errors import ConfigError, StoreError

TEMPORARY = ".tmp-"
"""How the names of unfinished files begin; no object may be called so."""

_SEGMENT = re.compile(r"[^/\x00-\x1f\\]+")


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """No object under this key."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing."""

    key: str
    size: int
    """Bytes."""
    modified: float = field(default=0.0, compare=False)
    """Unix seconds of the last write, by the storage's clock: to notice a change, never an identity."""


class ObjectStore(Protocol):
    """Bytes under keys below one root. Every failure is a StoreError that names the root and the key."""

    uri: str
    """Where the root is: a folder's path or `s3://bucket/prefix`, without a trailing slash."""

    def get(self, key: str) -> bytes:
        """Return the whole object; ObjectNotFoundError if there is none."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return `length` bytes from `start`; fewer at the object's end, none beyond it."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write the object, replacing one that exists. Readers see the old bytes or the new, never a mixture."""

    def put_create(self, key: str, data: bytes) -> bool:
        """Write the object only if there is none under `key`; atomically. False if there is one.

        A response that was lost on the way makes the retry answer False for one's own object, and an error leaves open
        whether the object was written: read it back.
        """

    def size(self, key: str) -> int | None:
        """Return the object's size in bytes, or None if there is none."""

    def list_objects(self, folder: str) -> Iterator[ObjectInfo]:
        """Yield every object below `folder` (the root for ""), at any depth, sorted by key."""

    def list_folders(self, folder: str) -> list[str]:
        """Return the names of the folders directly in `folder`, sorted, without slashes.

        A folder whose objects were all deleted may be named for a while: some servers keep a tree, and tidy it later.
        """

    def delete(self, key: str) -> None:
        """Delete the object; deleting one that is not there is no error."""

    def upload_file(self, path: Path, key: str, *, is_given: bool = False) -> None:
        """Copy a local file into the store, in parallel parts when it is large.

        A file that is given is not written to any more: a store on the same disk need not copy it.
        """

    def download_file(self, key: str, path: Path) -> None:
        """Copy an object into a local file, whose folder is made; the file appears whole or not at all."""

    def unfinished(self, folder: str) -> Iterator[ObjectInfo]:
        """Yield the unfinished files of writers below `folder` (the root for ""), which no listing shows.

        They are of writers at work, or of some that were killed; a store whose writes leave nothing has none.
        """
        return iter(())

    def discard(self, key: str) -> None:
        """Delete an unfinished file; deleting one that is not there is no error."""
        raise StoreError(f"{self.uri} has no unfinished files: {key!r}")

    def child(self, folder: str) -> "ObjectStore":
        """Return the store whose root is `folder` in this one."""


def check_key(key: str) -> str:
    """Return `key` if it is a relative path without empty, `.`, `..` or `.tmp-*` segments; StoreError otherwise."""
    if all(_is_segment(segment) for segment in key.split("/")):
        return key
    raise StoreError(
        f"not a key of object storage: {key!r} (expected UTF-8 segments joined by '/', "
        f"none empty, '.', '..' or beginning with {TEMPORARY!r})"
    )


def _is_segment(text: str) -> bool:
    if not _SEGMENT.fullmatch(text) or text in (".", "..") or text.startswith(TEMPORARY):
        return False
    return not any("\ud800" <= character <= "\udfff" for character in text)


def check_range(key: str, start: int, length: int) -> None:
    """Raise StoreError for a range that would count from the end on one store and fail on another."""
    if start < 0 or length < 0:
        raise StoreError(f"cannot read {length} bytes from {start} of {key!r}: neither may be negative")


def folder_prefix(folder: str) -> str:
    """Return the prefix that lists `folder` and nothing beside it."""
    return "" if folder == "" else check_key(folder.rstrip("/")) + "/"


def open_store(uri: str) -> ObjectStore:
    """Open the store at `uri`: a local folder (a path or file://...) or `s3://bucket[/prefix]`."""
    if uri.startswith("s3://"):
        from ratchet.store.s3 import S3Store

        return S3Store(uri)
    path = uri
    if "://" in uri:
        parts = urlsplit(uri)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
            raise ConfigError(f"cannot store anything at {uri!r}: expected a local folder or s3://bucket/prefix")
        path = unquote(parts.path)
    if not path:
        raise ConfigError(f"cannot store anything at {uri!r}: expected a local folder or s3://bucket/prefix")
    from ratchet.store.local import LocalStore

    return LocalStore(Path(path))
