"""How long a server that fails or is slow is left alone."""

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pauses:
    """How long MLflow is left alone, in seconds."""

    shortest: float = 5.0
    """After a first failure; doubled with each further one."""
    longest: float = 120.0
    slow: float = 1.0
    """A call of `log` that takes longer is followed by a pause of `share` times as long; so is any that fails."""
    share: float = 10.0
    artifacts: float = 600.0
    """After its artifact storage failed, by every process of the run: each attempt may take a minute."""


class Rest:
    """Whether a server is left alone at the moment, by what became of the last requests."""

    def __init__(self, pauses: Pauses) -> None:
        self._pauses = pauses
        self._failures = 0
        self._until = -math.inf

    @property
    def is_over(self) -> bool:
        """Whether the server may be asked again."""
        return time.monotonic() >= self._until

    def failed(self, seconds: float) -> bool:
        """Note a failure and how long it took; return whether it is the first one of an outage."""
        pause = max(self._pauses.shortest * 2**self._failures, seconds * self._pauses.share)
        self._until = time.monotonic() + min(pause, self._pauses.longest)
        self._failures = min(self._failures + 1, 30)
        return self._failures == 1

    def worked(self) -> bool:
        """Note that requests were answered; return whether that ends an outage."""
        is_end = self._failures > 0
        self._failures = 0
        return is_end

    def took(self, seconds: float) -> None:
        """Note how long a call took: a slow server gets a bounded share of the time."""
        if seconds > self._pauses.slow:
            self._until = time.monotonic() + min(seconds * self._pauses.share, self._pauses.longest)
