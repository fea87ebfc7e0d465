"""The record that something was deleted on purpose: what it was, why, and under which claim.

It is put create-only, before the first file is deleted. Trap: a record is final. What it names may be gone at any time,
so nobody reads it any more, whatever is still there.
"""

import functools
import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ratchet.errors import RetiredError, StoreError
from ratchet.store import layout
from ratchet.store.manifest import Artifact, Manifest, canonical_json
from ratchet.store.objects import ObjectNotFoundError, ObjectStore
from ratchet.store.run import CRITIC_UPDATE, POLICY_UPDATE

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FORMAT = 1
TRAINER_STATE = "trainer_state"
"""What a trainer's state is called beside the roles of a stage's outputs."""
WEIGHTS = {POLICY_UPDATE: "policy", CRITIC_UPDATE: "critic"}
"""Stage -> the role of the weights that it publishes. These and their trainers' states are all that may be retired."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retired:
    """One artifact that retention has given up.

    Example: Retired(stage="policy_update", step=3, role="policy", digest="9f..", stored_bytes=269060552,
    folder="step-000003/policy_update/0001-a1/policy", reason="trainer.keep_policies=2", epoch=1, time=1796031144.6).
    """

    stage: str
    step: int
    role: str
    digest: str
    """Of the artifact, as its manifest has it."""
    folder: str
    """Key of the folder that its stored files lie in."""
    stored_bytes: int
    """Of these files."""
    reason: str
    """The rule that let it go."""
    epoch: int
    """Claim under which it was retired; 0 where `ratchet gc` did it."""
    time: float
    """Unix seconds."""

    @property
    def place(self) -> tuple[str, str]:
        """The stage's folder and the role."""
        return layout.stage_folder(self.stage, self.step), self.role

    @property
    def key(self) -> str:
        """Where the record lies."""
        return layout.retired(self.stage, self.step, self.role)

    def is_about(self, artifact: Artifact) -> bool:
        """Whether it is this very artifact that was retired."""
        return (self.digest, self.folder) == (artifact.digest, artifact.stored[0])

    def to_json(self) -> bytes:
        """Return the record's bytes: canonical, so that reading and writing again changes nothing."""
        return canonical_json({"format": FORMAT, "retired": asdict(self)})

    @classmethod
    def from_json(cls, data: bytes, *, place: str) -> "Retired":
        """Read a record; StoreError, with `place`, for one that is damaged or of another format."""
        try:
            raw = json.loads(data)
            if raw["format"] != FORMAT:
                raise StoreError(f"{place}: format {raw['format']!r}, but this version of Ratchet reads {FORMAT}")
            record: Retired = _adapter().validate_json(json.dumps(raw["retired"]), strict=True)
            is_canonical = record.to_json() == data
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{place} is not a record of what was retired: {error!r}") from error
        if not is_canonical:
            raise StoreError(f"{place} is not as it was written: its bytes are not a record's canonical JSON")
        return record

    def __str__(self) -> str:
        day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.time))
        by = f"under claim {self.epoch}" if self.epoch else "by ratchet gc"
        return f"{self.role} of {self.stage} of step {self.step} was deleted on purpose ({self.reason}; {day}, {by})"


def by_role(manifest: Manifest) -> dict[str, Artifact]:
    """Return everything that a stage has written, its trainer's state among it."""
    state = manifest.provenance.trainer_state
    return manifest.provenance.artifacts | ({} if state is None else {TRAINER_STATE: state})


def describe(stage: str, step: int, role: str, artifact: Artifact, *, reason: str, epoch: int) -> Retired:
    """Return the record to be put about an artifact that is about to be deleted."""
    folder, entries = artifact.stored
    return Retired(
        stage=stage,
        step=step,
        role=role,
        digest=artifact.digest,
        folder=folder,
        stored_bytes=sum(entry.bytes for entry in entries),
        reason=reason,
        epoch=epoch,
        time=time.time(),
    )


def find(store: ObjectStore, stage: str, step: int, role: str) -> Retired | None:
    """Return the record about an artifact, or None if it was not retired."""
    key = layout.retired(stage, step, role)
    try:
        return Retired.from_json(store.get(key), place=f"{store.uri}/{key}")
    except ObjectNotFoundError:
        return None


def refuse_retired(store: ObjectStore, stage: str, step: int | None, role: str) -> None:
    """Raise RetiredError, with the record, where an artifact was retired."""
    record = find(store, stage, step, role) if step else None
    if record is not None:
        raise RetiredError(f"{record}; its record is {store.uri}/{record.key}")


@functools.cache
def _adapter() -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(Retired)
