"""What a run holds of that which retention decides on: versions of policy and critic, and their trainers' states.

One listing, and the manifests of what may be due. Trap: what a process has under way is nothing to decide on, so the
run is read anew and not by way of what that process knows of it.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal

from ratchet.store import layout
from ratchet.store.manifest import Artifact, Manifest
from ratchet.store.retired import TRAINER_STATE, WEIGHTS, by_role
from ratchet.store.run import Run

NAMING = ("evaluate", "checkpoint_export")
"""Stages whose manifests name the policy of their step."""
_READERS = 16

Key = tuple[str, int, str]
"""Stage, step and role."""
Condition = Literal["here", "damaged", "leaving", "gone"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One artifact that may be retired."""

    stage: str
    step: int
    role: str
    """Of the weights, or TRAINER_STATE."""
    artifact: Artifact
    condition: Condition
    """No record names it, and every stored file is there with its size ("here"), or not ("damaged"); a record says that
    it was retired, and files of it are still there ("leaving"), or none ("gone")."""

    @property
    def key(self) -> Key:
        return self.stage, self.step, self.role

    @property
    def bytes(self) -> int:
        """Of its stored files."""
        return stored_bytes(self.artifact)

    @property
    def place(self) -> str:
        """Where it lies, for people."""
        return f"{layout.stage_folder(self.stage, self.step)} {self.role}"


@dataclass(slots=True)
class Survey:
    """What a run holds; kept up to date by the process that alone changes it."""

    items: dict[Key, Item]
    named: set[int]
    """Steps whose policy an evaluation or an export names."""
    bytes: int
    """Of everything below the run."""
    doubtful: set[str] = field(default_factory=set)
    """Folders of trainer states that were read back and are not whole."""

    def of(self, stage: str, role: str) -> list[Item]:
        """Return the items of a stage under one role, newest first."""
        found = [item for item in self.items.values() if (item.stage, item.role) == (stage, role)]
        return sorted(found, key=lambda item: -item.step)

    def add(self, manifest: Manifest) -> None:
        """Take note of a manifest that was committed since."""
        for role, artifact in by_role(manifest).items():
            self.bytes += stored_bytes(artifact)
            if manifest.step is not None and role in _roles(manifest.stage):
                item = Item(stage=manifest.stage, step=manifest.step, role=role, artifact=artifact, condition="here")
                self.items[item.key] = item
        self.bytes += len(manifest.to_json())
        if manifest.stage in NAMING and manifest.step is not None:
            self.named.add(manifest.step)

    def change(self, item: Item, condition: Condition) -> None:
        """Take note of what became of an item."""
        self.items[item.key] = replace(item, condition=condition)
        self.bytes -= item.bytes if condition == "gone" else 0


def survey(run: Run, *, with_weights: bool) -> Survey:
    """List a run and read the manifests of what may be due; without weights, of trainer states alone."""
    reader = Run(run.root, run.run_id)
    objects = {info.key: info.size for info in reader.store.list_objects("")}
    records = {place for key in objects if (place := layout.parse_retired(key))}
    # What was recorded is finished, whatever is asked for now.
    with_weights = with_weights or any(role != TRAINER_STATE for _, role in records)
    with_state = {"/".join(key.split("/")[:2]) for key in objects if f"/{TRAINER_STATE}/" in key}
    names = {key.partition("/")[0] for key in objects}
    steps = sorted(step for name in names if (step := layout.parse_step_folder(name)) is not None)
    wanted = [
        (stage, step)
        for step in steps
        for stage in WEIGHTS
        if layout.manifest(stage, step) in objects and (with_weights or layout.stage_folder(stage, step) in with_state)
    ]
    found = Survey({}, set(), sum(objects.values()))
    found.named |= {step for step in steps for stage in NAMING if layout.manifest(stage, step) in objects}
    with ThreadPoolExecutor(_READERS) as pool:
        for manifest in pool.map(lambda place: reader.require(*place), wanted):
            found.items |= {item.key: item for item in _items(manifest, records, objects)}
    return found


def stored_bytes(artifact: Artifact) -> int:
    """Return how many bytes of an artifact lie in storage."""
    return sum(entry.bytes for entry in artifact.stored[1])


def _items(manifest: Manifest, records: set[tuple[str, str]], objects: Mapping[str, int]) -> Iterator[Item]:
    assert manifest.step is not None
    place = layout.stage_folder(manifest.stage, manifest.step)
    for role, artifact in by_role(manifest).items():
        if role not in _roles(manifest.stage):
            continue
        folder, entries = artifact.stored
        sizes = [objects.get(f"{folder}/{entry.path}") for entry in entries]
        condition: Condition = "here" if sizes == [entry.bytes for entry in entries] else "damaged"
        if (place, role) in records:
            condition = "leaving" if any(size is not None for size in sizes) else "gone"
        yield Item(stage=manifest.stage, step=manifest.step, role=role, artifact=artifact, condition=condition)


def _roles(stage: str) -> tuple[str, ...]:
    return (WEIGHTS[stage], TRAINER_STATE) if stage in WEIGHTS else ()
