"""`ratchet status`: how a run is, and what to do next."""

from ratchet.grains.status.explaining import Sources
from ratchet.grains.status.reading import collect
from ratchet.grains.status.records import FINAL, RunStatus

__all__ = ["FINAL", "RunStatus", "Sources", "collect"]
