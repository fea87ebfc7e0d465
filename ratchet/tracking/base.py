"""What every tracker does. A tracker shows a run; it is never needed to resume one."""

from typing import Literal, Protocol

from ratchet.store.manifest import Manifest

Status = Literal["FINISHED", "FAILED", "KILLED"]


class Tracker(Protocol):
    """Sees every committed manifest of a run, in the order of the commits."""

    def log(self, manifest: Manifest) -> None:
        """Show a manifest that was committed; showing it twice is the same as once where the tracker can tell."""

    def catch_up(self) -> int:
        """Show the committed manifests that it has not shown, whoever made them; return how many there were."""

    def finish(self, status: Status) -> None:
        """Say how the run ended. The last call."""
