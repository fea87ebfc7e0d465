"""The manifest of an artifact: what was made from what (`content`), and how (`provenance`).

`content_digest` is what grains, replays and resumed runs are compared by; nothing that differs between two equal
computations (time, attempt, run, place) may enter `content`.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.errors import StoreError
from ratchet.store.objects import check_key

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FORMAT = 1
_BLOCK_BYTES = 16 * 2**20
_HASHERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of an artifact."""

    path: str
    """Relative to the artifact's folder."""
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """What is stored of an artifact that is kept as its difference from an earlier one."""

    base: str
    """Digest of the artifact that it builds on."""
    step: int
    """Whose artifact that is, of the same stage and role."""
    folder: str
    """Key of the folder, relative to the run."""
    files: tuple[FileEntry, ...]
    """`<path>.delta` (`ratchet.store.deltas`) of every file that changed; the others are the base's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """Files that one attempt wrote under one role."""

    folder: str
    """Key of the folder, relative to the run."""
    files: tuple[FileEntry, ...]
    rows: int | None = None
    """Rows of the table, or None if it is none."""
    delta: Delta | None = None
    """Where it is set, `files` are not stored but made of the base's: `ratchet.store.weights` reads them."""

    @property
    def stored(self) -> tuple[str, tuple[FileEntry, ...]]:
        """Folder and entries of what lies in storage."""
        return (self.folder, self.files) if self.delta is None else (self.delta.folder, self.delta.files)

    @property
    def digest(self) -> str:
        """sha256 over the sorted (path, sha256) pairs: equal files give equal digests, wherever they lie."""
        return digest_of({entry.path: entry.sha256 for entry in self.files})


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What was made from what.

    Example: Content(step=3, stage="reward", policy_version=2, inputs={"rollouts": "9f..", "prompts": "41.."},
    outputs={"rewards": "c0.."}, config="77..").
    """

    step: int | None
    stage: str
    policy_version: int | None
    """The policy that the stage read, or for policy_update the one it published."""
    inputs: dict[str, str]
    """Role -> digest."""
    outputs: dict[str, str]
    """Role -> digest."""
    config: str
    """Digest of the config keys that the stage reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """How it was made; never compared across runs."""

    run_id: str
    attempt: str
    epoch: int
    artifacts: dict[str, Artifact]
    """Role -> files, for every role of `content.outputs`."""
    previous: dict[str, str]
    """`<step folder>/<stage>` -> sha256 of the whole manifest of each stage that this one read from."""
    started: float
    """Unix seconds."""
    ended: float
    device: str
    """The accelerator's name (NVIDIA H200), or cpu; the oldest manifests say cuda for any GPU."""
    gpu_seconds: float
    """Seconds times the accelerators that the process's engines held."""
    code_revision: str
    image: str
    metrics: dict[str, float] = field(default_factory=dict)
    """verl's metric names; finite values only."""
    trainer_state: Artifact | None = None
    """Where the trainer's state of this step was written. Not content: how often it is written is a matter of grain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The commit point of one stage."""

    content: Content
    provenance: Provenance

    @property
    def stage(self) -> str:
        """The stage that this is the commit point of."""
        return self.content.stage

    @property
    def step(self) -> int | None:
        """Its step; None for a stage that belongs to none."""
        return self.content.step

    @property
    def policy_version(self) -> int | None:
        """See `Content.policy_version`."""
        return self.content.policy_version

    @property
    def metrics(self) -> dict[str, float]:
        """See `Provenance.metrics`."""
        return self.provenance.metrics

    @property
    def started(self) -> float:
        """When the stage began, in Unix seconds."""
        return self.provenance.started

    @property
    def seconds(self) -> float:
        """How long the stage took."""
        return self.provenance.ended - self.provenance.started

    @property
    def device(self) -> str:
        """See `Provenance.device`."""
        return self.provenance.device

    @property
    def gpu_seconds(self) -> float:
        """See `Provenance.gpu_seconds`."""
        return self.provenance.gpu_seconds

    def committed(self) -> "Manifest":
        """Return the published manifest: this one, or for one that is under way, what it becomes."""
        return self

    def has(self, role: str) -> bool:
        """Whether the stage has an output of that role."""
        return role in self.content.outputs

    @property
    def content_digest(self) -> str:
        """sha256 of the content alone."""
        return digest_of(asdict(self.content))

    @property
    def sha256(self) -> str:
        """sha256 of the whole manifest, as the next ones record it in `previous`."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def output(self, role: str) -> Artifact:
        """Return the files of `role`."""
        try:
            return self.provenance.artifacts[role]
        except KeyError:
            have = ", ".join(sorted(self.provenance.artifacts))
            raise StoreError(f"stage {self.content.stage} has no output {role!r}; it has: {have}") from None

    def to_json(self) -> bytes:
        """Return the manifest's bytes: canonical, so that reading and writing again changes nothing."""
        content, provenance = as_record(self.content), as_record(self.provenance)
        return canonical_json({"format": FORMAT, "content": content, "provenance": provenance})

    @classmethod
    def from_json(cls, data: bytes, *, key: str, is_proven: bool = False) -> "Manifest":
        """Read a manifest; StoreError, with `key`, for one that is damaged or of another format.

        Bytes that are not the canonical ones are refused: `sha256` is computed from the values, and must be the file's.
        So are folders and paths that could lead out of the run. `is_proven` says that another manifest has named the
        bytes' sha256, so that their form need not be looked at: that takes most of the time.
        """
        try:
            raw = json.loads(data)
            if raw["format"] != FORMAT:
                raise StoreError(f"{key}: format {raw['format']}, but this version of Ratchet reads format {FORMAT}")
            provenance = dict(raw["provenance"])
            provenance["artifacts"] = {role: _artifact(value) for role, value in provenance["artifacts"].items()}
            if provenance["trainer_state"] is not None:
                provenance["trainer_state"] = _artifact(provenance["trainer_state"])
            manifest = cls(content=Content(**raw["content"]), provenance=Provenance(**provenance))
            is_canonical = is_proven or manifest.to_json() == data
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"{key} is not a manifest: {error!r:.500}") from error
        if not is_canonical:
            raise StoreError(f"{key} is not as it was written: its bytes are not a manifest's canonical JSON")
        return manifest


def as_record(value: "DataclassInstance") -> dict[str, Any]:
    """Return the dataclass as JSON keeps it: `delta` is there only where it is set, as before there were any."""
    return asdict(
        value, dict_factory=lambda items: {key: item for key, item in items if (key, item) != ("delta", None)}
    )


def canonical_json(value: Any) -> bytes:
    """Return JSON with sorted keys and no spaces; equal values give equal bytes. NaN and infinity raise ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def digest_of(value: Any) -> str:
    """Return the sha256 of the value's canonical JSON."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sha256_files(paths: Sequence[Path]) -> dict[Path, str]:
    """Return each file with the sha256 of its bytes, in order; several are read at the same time."""
    with ThreadPoolExecutor(_HASHERS) as hashers:
        return dict(zip(paths, hashers.map(sha256_file, paths), strict=True))


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's bytes.

    In large blocks: beside a busy thread, each costs up to a switch interval before Python goes on.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        block = memoryview(bytearray(min(_BLOCK_BYTES, max(path.stat().st_size, 1))))
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the finite metrics; each dropped one is counted under `nonfinite/<name>`, so that it is not unseen."""
    finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
    return finite | {f"nonfinite/{name}": 1.0 for name in metrics if name not in finite}


def _artifact(raw: dict[str, Any]) -> Artifact:
    delta = raw.get("delta")
    if delta is not None:
        folder = check_key(delta["folder"])
        delta = Delta(base=delta["base"], step=delta["step"], folder=folder, files=_files(delta["files"]))
    return Artifact(folder=check_key(raw["folder"]), files=_files(raw["files"]), rows=raw["rows"], delta=delta)


def _files(raw: list[dict[str, Any]]) -> tuple[FileEntry, ...]:
    entries = tuple(FileEntry(**entry) for entry in raw)
    for entry in entries:
        check_key(entry.path)
    return entries
