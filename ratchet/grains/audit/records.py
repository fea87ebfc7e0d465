"""What an audit says, as data: the lineage of a model or a run, from the decision on it to the rows that it came from.

Every digest is a sha256 in hexadecimal; times are Unix seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratchet.grains.audit.subject import ModelVersion
from ratchet.store import layout
from ratchet.store.chain import Fault
from ratchet.store.decision import Decision
from ratchet.store.manifest import Manifest
from ratchet.tracking.cost import Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputRecord:
    """One artifact that a stage wrote."""

    digest: str
    folder: str
    """Key relative to the run."""
    bytes: int
    """Of its files, were they all stored in full."""
    files: int
    rows: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRecord:
    """One committed stage: what it was made from, how, and where."""

    place: str
    """Its folder in the run."""
    stage: str
    step: int | None
    policy_version: int | None
    manifest_sha256: str
    content_digest: str
    config: str
    """Digest of the config keys that it read."""
    inputs: Mapping[str, str]
    """Role -> digest."""
    outputs: Mapping[str, OutputRecord]
    previous: tuple[str, ...]
    """Folders of the stages that it read."""
    epoch: int
    attempt: str
    started: float
    ended: float
    device: str
    gpu_seconds: float
    code_revision: str
    image: str
    score: float | None
    """Mean reward, where it graded."""

    @classmethod
    def of(cls, manifest: Manifest, sha256: str) -> "StageRecord":
        """Describe a manifest whose bytes have this sha256."""
        content, provenance = manifest.content, manifest.provenance
        outputs = {
            role: OutputRecord(
                digest=content.outputs.get(role, ""),
                folder=artifact.folder,
                bytes=sum(entry.bytes for entry in artifact.files),
                files=len(artifact.files),
                rows=artifact.rows,
            )
            for role, artifact in provenance.artifacts.items()
        }
        return cls(
            place=layout.stage_folder(content.stage, content.step),
            stage=content.stage,
            step=content.step,
            policy_version=content.policy_version,
            manifest_sha256=sha256,
            content_digest=manifest.content_digest,
            config=content.config,
            inputs=content.inputs,
            outputs=outputs,
            previous=tuple(provenance.previous),
            epoch=provenance.epoch,
            attempt=provenance.attempt,
            started=provenance.started,
            ended=provenance.ended,
            device=provenance.device,
            gpu_seconds=provenance.gpu_seconds,
            code_revision=provenance.code_revision,
            image=provenance.image,
            score=provenance.metrics.get("critic/score/mean"),
        )

    @property
    def rows(self) -> int:
        """Rows of its rollouts; 0 of another stage."""
        rollouts = self.outputs.get("rollouts")
        return (rollouts.rows or 0) if rollouts is not None else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A claim of the run under which something of the lineage was committed."""

    epoch: int
    submission_id: str
    """The pipeline run; empty outside a pipeline."""
    host: str
    grain: str
    version: str
    image: str
    accelerators: Mapping[str, str]
    """Stage's pod -> what it asked for: 4 nvidia.com/gpu."""
    stages: int
    """Stages of the lineage that were committed under it."""
    is_damaged: bool = False
    """Whether what was submitted cannot be read; the fields that it would fill are empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Prompts and the rows that they were made from."""

    split: str
    source: str
    """As the config names it."""
    source_digest: str
    """Of the rows at the source."""
    prompts: StageRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """The lineage of a model or a run."""

    asked: str
    run: str
    step: int
    """The last step of the lineage."""
    model: ModelVersion | None
    decisions: tuple[Decision, ...]
    """On this policy, rollbacks to it among them; of a run, on any of its policies."""
    serving: tuple[Decision, ...]
    """Those of them by which one of these policies serves now."""
    exports: tuple[StageRecord, ...]
    config: Mapping[str, Any]
    """The semantic config."""
    config_digest: str
    seed: int | None
    base_model: str
    """As the config names it; its digest is that of `base`'s output."""
    submissions: tuple[Submission, ...]
    base: tuple[StageRecord, ...]
    """Version 0 of the policy, and of the critic where there is one."""
    data: tuple[Data, ...]
    steps: tuple[tuple[StageRecord, ...], ...]
    """Stages of each step, in the order in which they ended; `steps[k - 1]` are those of step k."""
    evaluations: tuple[StageRecord, ...]
    recoveries: tuple[StageRecord, ...]
    """Where a trainer was rebuilt and its weights differed from those committed."""
    rollouts: int
    """Completions that it was trained on."""
    cost: Cost
    """Of the whole lineage: evaluations, export, data and version 0 are among it."""
    faults: tuple[Fault, ...]
    """What contradicts the chain; empty where every manifest is the one that was read."""
