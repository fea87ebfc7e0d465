"""Reads JSON Lines, naming file and line in every error.

The trap: `str.splitlines` also splits at U+2028, U+0085 and form feeds, which JSON allows inside a string; lines end at
"\\n" and nowhere else.
"""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ratchet.data.files import MAX_ROW_BYTES, check_size
from ratchet.errors import DataError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def parse_json_lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, object) for each line that is not blank.

    DataError for one that is no JSON object, or longer than a row may be.
    """
    for number, raw in enumerate(iter(lambda: stream.readline(MAX_ROW_BYTES + 1), b""), start=1):
        where = f"{name}, line {number}"
        check_size(where, len(raw), MAX_ROW_BYTES, "bytes in a line")
        if number == 1:
            raw = raw.removeprefix(_BYTE_ORDER_MARK)
        if not raw.strip():
            continue
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: expected UTF-8, got byte 0x{raw[error.start]:02x} at {error.start}") from error
        try:
            record = json.loads(text)
            if "\\ud" in text or "\\uD" in text:
                json.dumps(record, ensure_ascii=False).encode()  # half of an escaped pair is no text
        except (ValueError, RecursionError) as error:
            said = f"expected a JSON object, got {text[:1000].strip()[:80]!r} ({error})"
            raise DataError(f"{where}: {said}") from error
        if not isinstance(record, dict):
            raise DataError(f"{where}: expected one JSON object a line, got {type(record).__name__}")
        yield number, record


def read_json_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """`parse_json_lines` of a local file, streaming; DataError where there is no such file."""
    try:
        stream: BinaryIO = open(path, "rb")  # noqa: SIM115 - closed below; opened apart so that only this is caught
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    with stream:
        yield from parse_json_lines(stream, str(path))


def json_lines_of(body: bytes, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """`parse_json_lines` of bytes that came from object storage."""
    return parse_json_lines(io.BytesIO(body), name)
