"""Manifests for tests, small but complete."""

from typing import Any

from ratchet.store import layout
from ratchet.store.manifest import Artifact, Content, FileEntry, Manifest, Provenance


def make_manifest(*, step: int | None, stage: str, **provenance: Any) -> Manifest:
    """Return a manifest of one table; keyword arguments replace fields of its provenance."""
    attempt = provenance.get("attempt", "0001-a")
    files = (FileEntry(path="part-00000.parquet", bytes=3, sha256="a" * 64),)
    artifact = Artifact(folder=layout.attempt_folder(stage, step, attempt), files=files, rows=1)
    fields: dict[str, Any] = {
        "run_id": "run",
        "attempt": attempt,
        "epoch": 1,
        "artifacts": {"rewards": artifact},
        "previous": {"step-000001/rollout": "b" * 64},
        "started": 1.0,
        "ended": 2.5,
        "device": "cpu 1",
        "gpu_seconds": 0.0,
        "code_revision": "r",
        "image": "i",
    }
    content = Content(
        step=step,
        stage=stage,
        policy_version=None if step is None else step - 1,
        inputs={"rollouts": "9" * 64},
        outputs={"rewards": artifact.digest},
        config="d" * 64,
    )
    return Manifest(content=content, provenance=Provenance(**{**fields, **provenance}))
