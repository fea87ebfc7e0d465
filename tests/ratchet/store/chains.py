"""Runs for tests of a whole chain: a few small files in each stage, committed as stages commit."""

from collections.abc import Iterable, Mapping
from typing import Any

from ratchet.store import layout
from ratchet.store.artifacts import write_bytes
from ratchet.store.manifest import Content, Manifest, Provenance
from ratchet.store.run import Run


def new_run(root: str, run_id: str = "run") -> Run:
    """A claimed run without a stage."""
    run = Run(root, run_id)
    run.create_or_check({"trainer": {"seed": 1}})
    run.claim({"submission_id": None})
    return run


def commit(
    run: Run,
    stage: str,
    step: int | None,
    files: Mapping[str, bytes],
    read: Iterable[Manifest] = (),
    **provenance: Any,
) -> Manifest:
    """Commit `files` as the stage's output of its own name, made from every output of `read`."""
    attempt = run.new_attempt()
    artifact = write_bytes(run.store, f"{layout.attempt_folder(stage, step, attempt)}/{stage}", files)
    inputs = {role: digest for one in read for role, digest in one.content.outputs.items()}
    content = Content(
        step=step, stage=stage, policy_version=step, inputs=inputs, outputs={stage: artifact.digest}, config="c" * 64
    )
    fields: dict[str, Any] = {
        "run_id": run.run_id,
        "attempt": attempt,
        "epoch": run.check_ownership().epoch,
        "artifacts": {stage: artifact},
        "previous": {layout.stage_folder(one.stage, one.step): one.sha256 for one in read},
        "started": 1.0,
        "ended": 2.0,
        "device": "cpu",
        "gpu_seconds": 0.0,
        "code_revision": "r",
        "image": "",
    }
    return run.commit(Manifest(content=content, provenance=Provenance(**{**fields, **provenance})))
