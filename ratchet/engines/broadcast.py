"""Sending a model's weights from the process that trains it to those that sample, over NCCL or gloo.

The group is beside whatever default group each process has: a trainer's, a vLLM engine's. Trap: a broadcast ends only
when every process takes part, so that whoever sends waits a bounded time, and says who did not come.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore

from ratchet.errors import EngineError

TIMEOUT_SECONDS = 120.0
"""For all of them to meet, and for one broadcast."""
_ALIGNMENT = 16
_POLL_SECONDS = 0.0005
_NOTICE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Packed:
    """Where tensors lie in one flat buffer of bytes."""

    entries: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]
    """Name, dtype, shape, first byte."""
    size: int
    """Bytes."""

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> "Packed":
        """Lay the tensors out one after another."""
        entries, end = [], 0
        for name, tensor in weights.items():
            entries.append((name, tensor.dtype, tuple(tensor.shape), end))
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(entries), end)

    def views(self, buffer: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Yield each tensor's place in a buffer of uint8 [size], under its name."""
        for name, dtype, shape, start in self.entries:
            count = torch.Size(shape).numel() * dtype.itemsize
            yield name, buffer[start : start + count].view(dtype).view(shape)


class WeightGroup:
    """One sender, rank 0, and those who receive."""

    def __init__(self, store: TCPStore, rank: int, size: int, device: torch.device) -> None:
        """All processes make theirs together; each GPU may belong to one of them only."""
        self._device = device
        self._buffer: Tensor | None = None
        limit = timedelta(seconds=TIMEOUT_SECONDS)
        if device.type == "cuda":
            from torch._C._distributed_c10d import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group: Any = ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = ProcessGroupGloo(store, rank, size, limit)

    def send(self, weights: Mapping[str, Tensor], packed: Packed, *, check: Callable[[], None]) -> None:
        """Send `weights`, laid out as `packed`; returns when they are sent. `check` raises where a receiver is gone.

        Raises EngineError where they are not taken in time.
        """
        buffer = self._space(packed)
        places = dict(packed.views(buffer))
        torch._foreach_copy_(list(places.values()), [weights[name].to(self._device) for name in places])
        self._broadcast(buffer, check)

    def receive(self, packed: Packed) -> dict[str, Tensor]:
        """Return what was sent, in memory that the next call overwrites."""
        buffer = self._space(packed)
        self._broadcast(buffer, lambda: None)
        return dict(packed.views(buffer))

    def _space(self, packed: Packed) -> Tensor:
        if self._buffer is None or self._buffer.numel() != packed.size:
            self._buffer = None
            self._buffer = torch.empty(packed.size, dtype=torch.uint8, device=self._device)
        return self._buffer

    def _broadcast(self, buffer: Tensor, check: Callable[[], None]) -> None:
        """Wait by asking: a wait on a stream, or within gloo, would not notice that somebody is gone."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            work = self._group.broadcast(buffer, 0)
            while not work.is_completed():
                check()
                if time.monotonic() > deadline:
                    raise EngineError(f"weights were not taken within {TIMEOUT_SECONDS:.0f} s")
                time.sleep(_POLL_SECONDS)
            work.wait()
        except RuntimeError as error:
            # Who has closed the connection may take a moment to end, and `check` names it then.
            noticed = time.monotonic() + _NOTICE_SECONDS
            while time.monotonic() < noticed:
                check()
                time.sleep(_POLL_SECONDS)
            raise EngineError(f"weights could not be sent from process to process: {error}") from error


def rendezvous(host: str, port: int, size: int, *, is_server: bool) -> TCPStore:
    """Return the store over which a group of `size` meets; port 0 of the server takes a free one."""
    limit = timedelta(seconds=TIMEOUT_SECONDS)
    return TCPStore(host, port, size, is_master=is_server, timeout=limit, wait_for_workers=False)
