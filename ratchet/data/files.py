"""Files that users bring: read whole, within limits, and only where they are files.

Trap: a name says nothing of what lies behind it. A pipe blocks for ever, /dev/zero never ends, and a link in a folder
that somebody else packed may lead to any file of this machine.
"""

import os
import stat
from pathlib import Path

from ratchet.errors import DataError

MAX_BYTES = 4 * 2**30
"""Of one file, and of what a Parquet file unpacks to: rows are held in memory, at several times that."""
MAX_ROW_BYTES = 64 * 2**20
"""Of one line of JSON, and of one row of Parquet."""
MAX_DEPTH = 100
"""Lists and objects in each other, in one row."""
MAX_COLUMNS = 1000
"""Of a Parquet file, those within structs counted."""
MAX_VALUES = 2**28
"""Of a Parquet file, in all columns and lists: a billion missing values take a few bytes of it."""


def check_size(name: str, size: int, limit: int = MAX_BYTES, what: str = "bytes") -> None:
    """Raise DataError for more than `limit` of what is counted."""
    if size > limit:
        raise DataError(f"{name}: expected at most {limit} {what}, got {size}")


def read_file(path: str | Path) -> bytes:
    """Return the bytes of a regular file; DataError for anything else, or where it is too large or cannot be read."""
    try:
        # Of a pipe without a writer, a plain open would not return.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{path}: expected a regular file, got {_kind(status.st_mode)}")
            check_size(str(path), status.st_size)
            return file.read(status.st_size)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def outside(path: Path, folder: Path) -> Path | None:
    """Return where `path` leads through a link that leaves `folder`, or None where none does; itself for a loop.

    A snapshot in the hub's cache may link into its own repository's cache.
    """
    allowed = folder.resolve()
    if allowed.parent.name == "snapshots" and allowed.parent.parent.name.startswith(("models--", "datasets--")):
        allowed = allowed.parent.parent
    try:
        target = path.resolve()
    except (OSError, RuntimeError):  # links in a circle
        return path
    return None if target.is_relative_to(allowed) else target


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
