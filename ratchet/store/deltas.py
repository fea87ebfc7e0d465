"""What changed between two files of equal length, in few bytes.

A step of training changes few weights, and those by little. The XOR of both files is then mostly zero, and of a bf16
number only the low byte changes: with all low bytes side by side, and all high ones, it compresses well.

Format, little-endian: a header (magic, version, bytes of an item, offset of the first item, bytes of a chunk, bytes of
the file), then per chunk the length of its zstd frame (0: nothing changed) and the frame. The first chunk is what
precedes the first item, if anything does. A frame holds the chunk's XOR: byte 0 of every item, byte 1 of every item,
and so on, then what is left of an item at the end.

Trap: a delta knows neither file. Applied to another file of the same length it makes garbage without complaint, so
that whoever stores one must keep the digests of both (`ratchet.store.weights`).
"""

import struct
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ratchet.errors import StoreError

Bytes = npt.NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]

FORMAT = 1

_MAGIC = b"RDELTA"
_HEADER = struct.Struct("<6sHHHIQ")
_LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 4 * 1024 * 1024
_ZSTD_LEVEL = 1
"""Levels 2 and 3 are slower, and on bf16 weights their deltas are no smaller."""


def encode(base: Buffer, new: Buffer, *, item_bytes: int = 4, threads: int = 4) -> bytearray:
    """Return what turns `base` into `new`; StoreError where their lengths differ.

    `item_bytes` is the size of the files' numbers or a multiple of it: 4 for float32, and as good as 2 for bf16. Any
    other costs bytes, never correctness.
    """
    before, after = np.frombuffer(base, np.uint8), np.frombuffer(new, np.uint8)
    if before.size != after.size:
        raise StoreError(f"no delta between files of {before.size} and {after.size} bytes: expected equal lengths")
    first = _first_item(after, item_bytes)
    chunk_bytes = _CHUNK_BYTES // item_bytes * item_bytes
    chunks = _chunks(after.size, first, chunk_bytes)
    with ThreadPoolExecutor(threads) as pool:
        befores, afters = (before[chunk] for chunk in chunks), (after[chunk] for chunk in chunks)
        frames = list(pool.map(partial(_encode_chunk, item_bytes=item_bytes), befores, afters))
    delta = bytearray(_HEADER.size + sum(_LENGTH.size + len(frame) for frame in frames))
    _HEADER.pack_into(delta, 0, _MAGIC, FORMAT, item_bytes, first, chunk_bytes, after.size)
    place, target = _HEADER.size, np.frombuffer(delta, np.uint8)
    for frame in frames:
        _LENGTH.pack_into(delta, place, len(frame))
        place += _LENGTH.size
        # By numpy, which lets other threads run meanwhile: this is done beside a sampler that needs the interpreter.
        target[place : place + len(frame)] = np.frombuffer(frame, np.uint8)
        place += len(frame)
    return delta


def apply(base: bytearray | npt.NDArray[Any], delta: bytes | bytearray, *, threads: int = 4) -> None:
    """Turn `base` into the newer file, in place.

    StoreError for a delta that is damaged or made for a file of another length; `base` is then of no use any more.
    """
    target = np.frombuffer(base, np.uint8)
    if len(delta) < _HEADER.size or not delta.startswith(_MAGIC):
        raise StoreError("not a delta: its header is missing")
    _, version, item_bytes, first, chunk_bytes, length = _HEADER.unpack_from(delta)
    if version != FORMAT:
        raise StoreError(f"delta of format {version}, but this version of Ratchet reads format {FORMAT}")
    if length != target.size:
        raise StoreError(f"delta for a file of {length} bytes, applied to one of {target.size}")
    if not first < item_bytes <= chunk_bytes or length // chunk_bytes * _LENGTH.size > len(delta):
        raise StoreError(f"damaged delta: items of {item_bytes} bytes from {first} on in chunks of {chunk_bytes}")
    chunks = _chunks(length, first, chunk_bytes)
    frames = _frames(delta, len(chunks))
    with ThreadPoolExecutor(threads) as pool:
        # Running through the results raises what a chunk raised.
        for _ in pool.map(partial(_apply_chunk, item_bytes=item_bytes), (target[chunk] for chunk in chunks), frames):
            pass


def _first_item(data: Bytes, item_bytes: int) -> int:
    """Return how many bytes precede the first whole number: in a safetensors file they follow a header of any length.

    Of another file this is as good a guess as any.
    """
    header = 8 + int.from_bytes(data[:8].tobytes(), "little")
    return header % item_bytes if header <= data.size else 0


def _chunks(length: int, first: int, chunk_bytes: int) -> list[slice]:
    edges = [0, *range(first or chunk_bytes, length, chunk_bytes), length]
    return [slice(start, end) for start, end in pairwise(edges)]


def _frames(delta: bytes | bytearray, num_chunks: int) -> list[memoryview]:
    view, position, frames = memoryview(delta), _HEADER.size, []
    for _ in range(num_chunks):
        start = position + _LENGTH.size
        position = start + (_LENGTH.unpack_from(delta, position)[0] if start <= len(delta) else 0)
        frames.append(view[start:position])
    if position != len(delta):
        raise StoreError(f"damaged delta: its {num_chunks} chunks end at byte {position}, the delta at {len(delta)}")
    return frames


def _encode_chunk(before: Bytes, after: Bytes, *, item_bytes: int) -> bytes:
    changed = before ^ after
    if not np.count_nonzero(changed):
        return b""
    planes = np.empty_like(changed)
    for plane, values in _planes(planes, changed, item_bytes):
        plane[:] = values
    frame: bytes = _codec().compress(planes, asbytes=True)
    return frame


def _apply_chunk(target: Bytes, frame: memoryview, *, item_bytes: int) -> None:
    if not frame:
        return
    try:
        planes = np.frombuffer(_codec().decompress(frame, decompressed_size=target.size), np.uint8)
    except OSError as error:
        raise StoreError(f"damaged delta: {error}") from error
    for plane, values in _planes(planes, target, item_bytes):
        values ^= plane


def _planes(planes: Bytes, items: Bytes, item_bytes: int) -> list[tuple[Bytes, Bytes]]:
    """Return views of both layouts of one chunk in pairs that hold the same bytes."""
    count, whole = items.size // item_bytes, items.size // item_bytes * item_bytes
    pairs = [(planes[i * count : (i + 1) * count], items[i:whole:item_bytes]) for i in range(item_bytes)]
    return [*pairs, (planes[whole:], items[whole:])]


def _codec() -> Any:
    return pa.Codec("zstd", compression_level=_ZSTD_LEVEL)
