"""A manifest whose commit is under way: it reads like the committed one, and waits only for what is not known yet.

Trap: what runs on the writer's own thread must never wait for a manifest that the same thread is still to commit.
"""

from collections.abc import Mapping
from concurrent.futures import Future

from ratchet.errors import StoreError
from ratchet.store.manifest import Artifact, Content, Manifest, Provenance


class PendingManifest(Manifest):
    """What a stage has made, before it is published. `content` and `provenance` wait until it is."""

    __slots__ = ("_artifacts", "_committed", "_known", "_metrics", "_took")

    _artifacts: Mapping[str, "Future[Artifact]"]
    _committed: "Future[Manifest]"
    _known: tuple[str, int | None, int | None]
    _metrics: dict[str, float]
    _took: tuple[float, float, str, float]

    def __init__(
        self,
        *,
        stage: str,
        step: int | None,
        policy_version: int | None,
        artifacts: Mapping[str, "Future[Artifact]"],
        metrics: dict[str, float],
        started: float,
        seconds: float,
        device: str,
        gpu_seconds: float,
    ) -> None:
        values = {
            "_artifacts": artifacts,
            "_committed": Future(),
            "_known": (stage, step, policy_version),
            "_metrics": metrics,
            "_took": (started, seconds, device, gpu_seconds),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def settle(self, committed: "Future[Manifest]") -> None:
        """Take over the outcome of the commit, whenever it comes."""

        def take_over(done: "Future[Manifest]") -> None:
            error = done.exception() if not done.cancelled() else StoreError(f"{self.stage} was not committed")
            if error is not None:
                self._committed.set_exception(error)
            else:
                self._committed.set_result(done.result())

        committed.add_done_callback(take_over)

    def committed(self) -> Manifest:
        """Wait for the commit, and return the manifest; raises what kept it from being published."""
        return self._committed.result()

    @property
    def content(self) -> Content:
        return self.committed().content

    @property
    def provenance(self) -> Provenance:
        return self.committed().provenance

    @property
    def stage(self) -> str:
        return self._known[0]

    @property
    def step(self) -> int | None:
        return self._known[1]

    @property
    def policy_version(self) -> int | None:
        return self._known[2]

    @property
    def metrics(self) -> dict[str, float]:
        return self._metrics

    @property
    def started(self) -> float:
        return self._took[0]

    @property
    def seconds(self) -> float:
        return self._took[1]

    @property
    def device(self) -> str:
        return self._took[2]

    @property
    def gpu_seconds(self) -> float:
        return self._took[3]

    def has(self, role: str) -> bool:
        return role in self._artifacts

    def output(self, role: str) -> Artifact:
        """Return the files of `role` as soon as their digests are known, which is before the commit."""
        artifact = self._artifacts.get(role)
        return self.committed().output(role) if artifact is None else artifact.result()
