"""Training without storage, to measure what storage costs: nothing that a segment makes is written.

Only steps from a run's first on can be trained so, in one segment: nothing could be read back.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from ratchet.stages import updates
from ratchet.stages.residents import Residents
from ratchet.store.writer import BackgroundWriter

Result = TypeVar("Result")

OVERRIDES = {"trainer.commit_lag": 1_000_000}
"""No step waits for a commit that never comes."""


class VolatileWriter(BackgroundWriter):
    """Takes every job and does none."""

    def submit(self, job: Callable[[], Result]) -> "Future[Result]":
        return Future()

    def drain(self) -> None:
        """Nothing is under way."""

    def close(self, *, seconds: float = 0.0) -> None:
        super().close()


@contextmanager
def nothing_copied() -> Iterator[None]:
    """Leave out what is copied only to be written: weights and trainer states."""
    publish, state = Residents.publish, updates._trainer_state

    def keep(self: Residents, place: Any, context: Any, weights: Any) -> Any:
        self._fresh.clear()
        self._fresh[place] = weights
        return Future()

    Residents.publish = keep  # type: ignore[method-assign]
    updates._trainer_state = lambda context, trainer: None
    try:
        yield
    finally:
        Residents.publish, updates._trainer_state = publish, state  # type: ignore[method-assign]
