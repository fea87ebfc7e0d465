"""The CUDA stream of an engine that lives in this process and is called from more than one thread.

Trap: vLLM keeps the stream that was current when it ran first, and makes it current again in the middle of every step.
Called on any other stream, it frees and fills memory that its kernels still read: tokens out of range, or a hang. And
its start changes the current stream of the thread that starts it; the trainer would queue up behind the sampler.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class EngineStream:
    """One stream for every call of an engine, from whichever thread; nothing at all where there is no GPU."""

    def __init__(self, *, is_on_gpu: bool) -> None:
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream() if is_on_gpu else None  # type: ignore[no-untyped-call]

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Start the engine; the stream that it chooses is its own from then on, and the caller's stays as it was."""
        with self.current():
            yield
            if self._stream is not None:
                self._stream = torch.cuda.current_stream()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the stream current: after what the caller has queued up, and before what it queues up next."""
        if self._stream is None:
            yield
            return
        outside = torch.cuda.current_stream()
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            yield
        outside.wait_stream(self._stream)
