"""What a tracker has of a run, kept with the tracker's own data, so that a new process can find out what is missing.

Trap: "the newest step that arrived" is not enough. After an outage of minutes the newest step is there and older ones
are not, so the floor only rises past steps that arrived whole, and everything from the floor on is listed.
"""

import json
from collections.abc import Iterator

from ratchet.store import layout
from ratchet.store.manifest import Manifest
from ratchet.store.run import POLICY_UPDATE, Run


class Progress:
    """Every manifest of the steps below `floor` has arrived; from `floor` on, those in `stages` have."""

    def __init__(self, floor: int = 0, stages: set[str] | None = None) -> None:
        self.floor = floor
        self.stages = set() if stages is None else stages

    def has(self, manifest: Manifest) -> bool:
        """Return whether the manifest is known to have arrived; False for one below the floor, which may be late."""
        return _stage(manifest) in self.stages

    def add(self, manifest: Manifest) -> None:
        """Note that the manifest arrived. The caller has brought everything that was committed before it."""
        self.stages.add(_stage(manifest))
        step = manifest.content.step
        if manifest.content.stage == POLICY_UPDATE and step is not None and step > self.floor:
            self.floor = step
            # What belongs to no step or precedes training is always listed: the base may be evaluated late.
            self.stages = {stage for stage in self.stages if not _step(stage) or (_step(stage) or 0) >= step}

    def lower(self, step: int) -> None:
        """Note that something of `step` is missing: everything from there on is offered again, unless it is listed."""
        self.floor = min(self.floor, step)

    def missing(self, run: Run) -> Iterator[Manifest]:
        """Yield the committed manifests that have not arrived, oldest step first."""
        floor = self.floor
        for split in layout.DATA_SPLITS:
            manifest = run.manifest(f"preprocess/{split}", None)
            if manifest is not None and not self.has(manifest):
                yield manifest
        for step in run.steps():
            if step >= floor or step == 0:
                yield from (manifest for manifest in run.step_manifests(step) if not self.has(manifest))

    def copy(self) -> "Progress":
        """Return one that changes on its own."""
        return Progress(self.floor, set(self.stages))

    def to_json(self) -> str:
        """Return a short text: the stages of two steps or so."""
        return json.dumps({"floor": self.floor, "stages": sorted(self.stages)})

    @classmethod
    def from_json(cls, text: str | None) -> "Progress":
        """Read `to_json`'s text; nothing or anything else is a tracker that has nothing."""
        try:
            raw = json.loads(text or "{}")
            return cls(int(raw["floor"]), {str(stage) for stage in raw["stages"]})
        except (ValueError, KeyError, TypeError):
            return cls()


def _stage(manifest: Manifest) -> str:
    return layout.stage_folder(manifest.content.stage, manifest.content.step)


def _step(stage: str) -> int | None:
    return layout.parse_step_folder(stage.partition("/")[0])
