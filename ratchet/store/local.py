"""Object storage in a local folder, with the same guarantees as S3: whole objects, create-only puts.

Trap: a rename replaces; only a hard link refuses to. That is why `put_create` links a finished temporary file. And a
file is durable only once its folder is synced too, and that folder's own folder if it is new.
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ratchet.errors import StoreError
from ratchet.store.objects import (
    TEMPORARY,
    ObjectInfo,
    ObjectNotFoundError,
    ObjectStore,
    check_key,
    check_range,
    folder_prefix,
)

_NOT_AN_OBJECT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class LocalStore(ObjectStore):
    """Objects as files below `root`; unfinished ones are named `.tmp-...` and not listed with them."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self.uri = str(self.root)

    def get(self, key: str) -> bytes:
        with self._errors("read", key), self._open(key) as file:
            return file.read()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(key, start, length)
        if length == 0:
            return b""
        with self._errors("read", key), self._open(key) as file:
            file.seek(start)
            return file.read(length)

    def put(self, key: str, data: bytes | memoryview) -> None:
        with self._errors("write", key), self._temporary(key) as temporary:
            _write_durably(temporary, data)
            _replace_durably(temporary, self.path(key))

    def put_create(self, key: str, data: bytes) -> bool:
        with self._errors("write", key), self._temporary(key) as temporary:
            _write_durably(temporary, data)
            try:
                os.link(temporary, self.path(key))
            except FileExistsError:
                if self.path(key).is_dir():
                    raise
                return False
            except PermissionError as error:
                raise StoreError(f"cannot create {key!r} in {self.uri}: does this disk have hard links?") from error
            _sync(temporary.parent)
            return True

    def size(self, key: str) -> int | None:
        with self._errors("read", key):
            path = self.path(key)
            return path.stat().st_size if path.is_file() else None

    def list_objects(self, folder: str) -> Iterator[ObjectInfo]:
        with self._errors("list", folder):
            found = sorted(self._files(self.root / folder_prefix(folder)), key=lambda info: info.key)
        yield from found

    def list_folders(self, folder: str) -> list[str]:
        with self._errors("list", folder):
            base = self.root / folder_prefix(folder)
            folders = [path for path in base.iterdir() if path.is_dir()] if base.is_dir() else []
            # As on S3, a folder is there only as long as an object is in it.
            return sorted(path.name for path in folders if next(self._files(path), None))

    def delete(self, key: str) -> None:
        with self._errors("delete", key):
            path = self.path(key)
            if path.is_file():
                path.unlink(missing_ok=True)

    def upload_file(self, path: Path, key: str, *, is_given: bool = False) -> None:
        with self._errors("write", key), self._temporary(key) as temporary:
            if not (is_given and _is_linked(path, temporary)):
                shutil.copyfile(path, temporary)
            _sync(temporary)
            _replace_durably(temporary, self.path(key))

    def download_file(self, key: str, path: Path) -> None:
        check_key(key)
        temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        with self._errors("write", key):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with self._errors("read", key), self._open(key):
                    shutil.copyfile(self.path(key), temporary)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

    def unfinished(self, folder: str) -> Iterator[ObjectInfo]:
        with self._errors("list", folder):
            found = sorted(self._files(self.root / folder_prefix(folder), finished=False), key=lambda info: info.key)
        yield from found

    def discard(self, key: str) -> None:
        folder, _, name = key.rpartition("/")
        if not name.startswith(TEMPORARY):
            raise StoreError(f"not an unfinished file: {key!r} (expected a name that begins with {TEMPORARY!r})")
        with self._errors("delete", key):
            (self.root / folder_prefix(folder) / name).unlink(missing_ok=True)

    def child(self, folder: str) -> "LocalStore":
        return LocalStore(self.root / check_key(folder))

    def path(self, key: str) -> Path:
        """Return where the object's file is or would be."""
        return self.root / check_key(key)

    def _files(self, base: Path, *, finished: bool = True) -> Iterator[ObjectInfo]:
        for parent, _, names in os.walk(base, onerror=_raise_unless_missing):
            for name in names:
                path = Path(parent, name)
                if name.startswith(TEMPORARY) is finished or not path.is_file():
                    continue
                try:
                    status = path.stat()
                except FileNotFoundError:  # deleted meanwhile
                    continue
                yield ObjectInfo(path.relative_to(self.root).as_posix(), status.st_size, status.st_mtime)

    def _open(self, key: str) -> BinaryIO:
        """Open a file that is one: a pipe would block, a device need not end."""
        path = self.path(key)
        if not path.is_file():
            raise FileNotFoundError(key)
        return path.open("rb")

    @contextmanager
    def _temporary(self, key: str) -> Iterator[Path]:
        target = self.path(key)
        _make_folder_durably(target.parent)
        temporary = target.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            if verb == "read" and isinstance(error, _NOT_AN_OBJECT):
                raise ObjectNotFoundError(f"no object {key!r} in {self.uri}") from error
            raise StoreError(f"cannot {verb} {key!r} in {self.uri}: {error}") from error


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, _NOT_AN_OBJECT):
        raise error


def _write_durably(path: Path, data: bytes | memoryview) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _is_linked(path: Path, other: Path) -> bool:
    """Make `other` a second name of the file, and say whether that could be done: on another disk it cannot."""
    try:
        os.link(path, other, follow_symlinks=True)
    except OSError:
        return False
    return True


def _replace_durably(temporary: Path, path: Path) -> None:
    temporary.replace(path)
    _sync(path.parent)


def _make_folder_durably(folder: Path) -> None:
    if folder.is_dir():
        return
    if folder.parent != folder:
        _make_folder_durably(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
