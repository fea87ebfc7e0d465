"""Weights as one safetensors file in memory: hashed, compared and written without another copy.

Trap: copies from a GPU are only begun by `fill`; whoever reads calls `wait` first, and nobody fills again while another
still reads.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from ratchet.errors import EngineError

# safetensors' names, in the order in which it lays out a file: wide types last here, first there.
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_RANKS = {dtype: rank for rank, dtype in enumerate(_DTYPES)}
_ALIGNMENT = 8


class FlatWeights:
    """What safetensors.torch.save_file(weights, path, metadata={"format": "pt"}) writes, byte for byte."""

    def __init__(self, layout: Mapping[str, tuple[torch.dtype, torch.Size]], *, pin_memory: bool) -> None:
        """Use `like`; `layout` is name -> dtype and shape. Raises EngineError for a dtype that no file can hold."""
        for name, (dtype, _) in layout.items():
            if dtype not in _DTYPES:
                raise EngineError(f"expected a dtype that safetensors has, got {dtype} of {name!r}")
        names = sorted(layout, key=lambda name: (-_RANKS[layout[name][0]], name.encode()))
        ends = [0]  # of each tensor, after the start of the first
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for name in names:
            dtype, shape = layout[name]
            ends.append(ends[-1] + shape.numel() * dtype.itemsize)
            header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": ends[-2:]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        head = bytearray(len(text).to_bytes(8, "little") + text)
        self._buffer = torch.empty(len(head) + ends[-1], dtype=torch.uint8, pin_memory=pin_memory)
        self._buffer[: len(head)] = torch.frombuffer(head, dtype=torch.uint8)
        body = self._buffer[len(head) :]
        self._tensors = {
            name: body[start:end].view(layout[name][0]).view(layout[name][1])
            for name, (start, end) in zip(names, pairwise(ends), strict=True)
        }
        self._copied: torch.cuda.Event | None = None

    @classmethod
    def like(cls, weights: Mapping[str, Tensor]) -> Self:
        """A file of `weights`, copied as `fill` does; its memory is pinned where one of them is on a GPU."""
        layout = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
        flat = cls(layout, pin_memory=any(tensor.is_cuda for tensor in weights.values()))
        flat.fill(weights)
        return flat

    @property
    def data(self) -> memoryview:
        """All bytes of the file, the header included, in one piece."""
        return self._buffer.numpy().data.toreadonly()

    @torch.no_grad()
    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Copy `weights`, whose names, shapes and dtypes are those of the file; EngineError otherwise.

        From a GPU the copies are made in the order of its current stream, after this returns.
        """
        self._check(weights)
        if weights:
            torch._foreach_copy_([self._tensors[name] for name in weights], list(weights.values()), non_blocking=True)
        for device in {tensor.device for tensor in weights.values() if tensor.is_cuda}:
            self._copied = torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        """Wait until what was last filled in is there."""
        if self._copied is not None:
            self._copied.synchronize()

    def _check(self, weights: Mapping[str, Tensor]) -> None:
        if weights.keys() != self._tensors.keys():
            differing = sorted(weights.keys() ^ self._tensors.keys())
            raise EngineError(f"expected the {len(self._tensors)} weights of the file, got others: {differing[:5]}")
        for name, tensor in weights.items():
            own = self._tensors[name]
            if (tensor.dtype, tensor.shape) != (own.dtype, own.shape):
                expected, got = (f"{one.dtype} {list(one.shape)}" for one in (own, tensor))
                raise EngineError(f"expected {expected} for {name!r}, got {got}")
