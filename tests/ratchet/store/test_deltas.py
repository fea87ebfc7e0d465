"""Deltas of two files: exact for any bytes, small for weights that hardly changed, loud where they are damaged."""

import struct
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.errors import StoreError
from ratchet.store import deltas

HEADER_BYTES = 24
LENGTH_BYTES = 4


@st.composite
def pairs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Two files of equal length, which differ in some bytes."""
    base = bytearray(draw(st.binary(max_size=200)))
    new = bytearray(base)
    for index in draw(st.lists(st.integers(0, len(base) - 1), max_size=10)) if base else []:
        new[index] = draw(st.integers(0, 255))
    return bytes(base), bytes(new)


def applied(base: bytes, delta: bytes) -> bytes:
    target = bytearray(base)
    deltas.apply(target, delta)
    return bytes(target)


def weights(share: float, count: int = 1_000_000) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """bf16 weights, and the same with that share of them changed by one unit in the last place."""
    rng = np.random.default_rng(0)
    base = (rng.normal(0, 0.02, count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    step = rng.choice(np.array([1, -1], np.int16), count).view(np.uint16)
    return base, base + step * (rng.random(count) < share)


@given(pairs(), st.integers(1, 9), st.integers(9, 40))
def test_any_two_files_of_equal_length_come_back(pair: tuple[bytes, bytes], item_bytes: int, chunk_bytes: int) -> None:
    base, new = pair
    with patch.object(deltas, "_CHUNK_BYTES", chunk_bytes):
        delta = deltas.encode(base, new, item_bytes=item_bytes, threads=2)
    assert applied(base, delta) == new
    assert applied(new, delta) == base  # XOR knows no direction


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 4 * 2**20 - 1, 4 * 2**20 + 1, 4 * 2**20 + 6])
def test_lengths_around_an_item_and_a_chunk(length: int) -> None:
    rng = np.random.default_rng(length)
    base, new = rng.bytes(length), rng.bytes(length)
    assert applied(base, deltas.encode(base, new)) == new


def test_the_bytes_are_those_of_the_documented_format() -> None:
    base = bytes.fromhex("01020304 05060708 0a")
    new = bytes.fromhex("01020304 04060788 0b")
    delta = deltas.encode(base, new, item_bytes=4)
    assert delta[:HEADER_BYTES] == struct.pack("<6sHHHIQ", b"RDELTA", 1, 4, 0, 4 * 2**20, 9)
    frame = delta[HEADER_BYTES + LENGTH_BYTES :]
    assert delta[HEADER_BYTES : HEADER_BYTES + LENGTH_BYTES] == struct.pack("<I", len(frame))
    # Bytes 0 of both items, bytes 1, 2 and 3, and the byte that belongs to no item.
    assert bytes(pa.decompress(frame, 9, codec="zstd")) == bytes.fromhex("0001 0000 0000 0080 01")


def test_buffers_of_other_kinds_are_taken_as_their_bytes() -> None:
    base, new = weights(0.5, 1000)
    delta = deltas.encode(base.data, new)
    assert delta == deltas.encode(base.tobytes(), bytearray(new.tobytes()), threads=1)
    deltas.apply(base, delta)
    assert (base == new).all()


def test_what_did_not_change_takes_no_room() -> None:
    base = bytes(20 * 2**20)
    assert len(deltas.encode(base, base)) == HEADER_BYTES + 5 * LENGTH_BYTES
    changed = bytearray(base)
    changed[9 * 2**20] = 1  # in the third chunk of five
    delta = deltas.encode(base, changed)
    lengths = struct.unpack("<II", delta[HEADER_BYTES : HEADER_BYTES + 2 * LENGTH_BYTES])
    assert lengths == (0, 0)
    assert len(delta) < HEADER_BYTES + 5 * LENGTH_BYTES + 1000


@pytest.mark.parametrize(("share", "ratio"), [(0.05, 0.05), (0.6, 0.18)])
def test_weights_that_changed_in_the_last_place_take_little(share: float, ratio: float) -> None:
    base, new = weights(share)
    aligned = len(deltas.encode(base, new))
    assert aligned < ratio * base.nbytes
    # Behind a safetensors header of an odd length the numbers begin at an odd byte.
    header = (7).to_bytes(8, "little") + b'{"a":1}'
    behind = len(deltas.encode(header + base.tobytes(), header + new.tobytes()))
    assert behind < 1.01 * aligned


def test_files_of_other_lengths_are_refused() -> None:
    with pytest.raises(StoreError, match="no delta between files of 3 and 4 bytes"):
        deltas.encode(b"abc", b"abcd")
    with pytest.raises(StoreError, match="for a file of 3 bytes, applied to one of 4"):
        deltas.apply(bytearray(4), deltas.encode(b"abc", b"abd"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda delta: b"", "not a delta"),
        (lambda delta: delta[:20], "not a delta"),
        (lambda delta: b"PK" + delta[2:], "not a delta"),
        (lambda delta: delta[:6] + b"\x02" + delta[7:], "delta of format 2, but .* reads format 1"),
        (lambda delta: delta[:8] + b"\x00\x00" + delta[10:], "items of 0 bytes"),
        (lambda delta: delta[:12] + struct.pack("<I", 4) + delta[16:], "damaged delta: items of 4 .* in chunks of 4"),
        (lambda delta: delta[:HEADER_BYTES], "damaged delta: its 1 chunks end at byte 28, the delta at 24"),
        (lambda delta: delta[:-1], "damaged delta: its 1 chunks end at"),
        (lambda delta: delta + b"x", "damaged delta: its 1 chunks end at"),
        (lambda delta: delta[:-9] + bytes(9), "damaged delta: .*"),
    ],
)
def test_damage_is_named(change: object, message: str) -> None:
    assert callable(change)
    base, new = weights(0.5, 1000)
    with pytest.raises(StoreError, match=message):
        applied(base.tobytes(), change(deltas.encode(base, new)))


def test_no_damaged_byte_raises_anything_but_a_store_error() -> None:
    base, new = (array.tobytes() for array in weights(0.5, 100))
    delta = deltas.encode(base, new)
    for index in range(len(delta)):
        for flipped in (0x01, 0x80, 0xFF):
            damaged = bytearray(delta)
            damaged[index] ^= flipped
            try:
                deltas.apply(bytearray(base), bytes(damaged), threads=1)
            except StoreError:
                continue
