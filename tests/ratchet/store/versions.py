"""Runs whose updates publish a few bytes, whole or as deltas, with trainer states; and storage that dies in between."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ratchet.errors import StoreError
from ratchet.store import layout
from ratchet.store.artifacts import read_folder, scratch, write_bytes
from ratchet.store.local import LocalStore
from ratchet.store.manifest import Artifact, Content, Manifest, Provenance
from ratchet.store.retired import WEIGHTS
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.store.weights import read_weights, write_delta
from tests.ratchet.store.chains import commit

FILE = "model.safetensors"
WRITING = ("put", "put_create", "delete", "upload_file")


def weights_of(step: int, stage: str = POLICY_UPDATE) -> bytes:
    return random.Random(f"{stage} {step}").randbytes(48)


def publish(
    run: Run, step: int, *, is_delta: bool = False, has_state: bool = True, stage: str = POLICY_UPDATE
) -> Manifest:
    """Commit version `step`, made from the one before it; each step has weights and a state of its own."""
    attempt, role = run.new_attempt(), WEIGHTS[stage]
    folder, data = layout.attempt_folder(stage, step, attempt), weights_of(step, stage)
    before = run.require(stage, step - 1) if step else None
    artifact = write_bytes(run.store, f"{folder}/{role}", {} if is_delta else {FILE: data})
    if is_delta:
        assert before is not None
        (entry,) = write_bytes(_Nowhere(run.store), f"{folder}/{role}", {FILE: data}).files
        base = before.output(role)
        artifact = write_delta(run.store, f"{folder}/{role}", base, step - 1, entry, weights_of(step - 1, stage), data)
    state = write_bytes(run.store, f"{folder}/trainer_state", state_of(step)) if has_state and step else None
    inputs, read = ({}, {}) if before is None else ({role: before.output(role).digest}, {_place(before): before.sha256})
    content = Content(
        step=step, stage=stage, policy_version=step, inputs=inputs, outputs={role: artifact.digest}, config="c" * 64
    )
    provenance = Provenance(
        run_id=run.run_id,
        attempt=attempt,
        epoch=run.check_ownership().epoch,
        artifacts={role: artifact},
        previous=read,
        started=1.0,
        ended=2.0,
        device="cpu",
        gpu_seconds=0.0,
        code_revision="r",
        image="",
        trainer_state=state,
    )
    return run.commit(Manifest(content=content, provenance=provenance))


def state_of(step: int) -> dict[str, bytes]:
    """Three files, so that a deletion can be cut short."""
    return {f"part-{number}": f"state {step} part {number}".encode() for number in range(3)}


def name(run: Run, stage: str, step: int) -> Manifest:
    """Commit an evaluation or an export of the policy of `step`."""
    return commit(run, stage, step, {"part": f"{stage} {step}".encode()}, [run.require(POLICY_UPDATE, step)])


def readable(run: Run, stage: str = POLICY_UPDATE) -> list[int]:
    """The steps whose weights can be read and are what they were."""
    return [step for step in Run(run.root, run.run_id).steps() if _reads(run, stage, step)]


def loadable(run: Run, stage: str = POLICY_UPDATE) -> list[int]:
    """The steps whose trainer state can be read, every digest compared."""
    fresh = Run(run.root, run.run_id)
    found = []
    for step in fresh.steps():
        manifest = fresh.manifest(stage, step)
        state = manifest.provenance.trainer_state if manifest is not None else None
        if state is not None and _loads(fresh, state):
            found.append(step)
    return found


class Killed(BaseException):
    """What ends a process without any of its `except Exception` running."""


@contextmanager
def killed_at(number: int) -> Iterator[list[int]]:
    """Let `number` operations that write or delete happen, and none after it. Yields what counts them."""
    done = [0]
    with pytest.MonkeyPatch.context() as patch:
        for method in WRITING:
            patch.setattr(LocalStore, method, _mortal(getattr(LocalStore, method), number, done))
        yield done


def _mortal(method: Any, number: int, done: list[int]) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        if done[0] >= number:
            raise Killed
        done[0] += 1
        return method(*arguments, **options)

    return call


class _Nowhere(LocalStore):
    """Takes what is described and not stored."""

    def __init__(self, inner: Any) -> None:
        super().__init__(Path(inner.uri))

    def put(self, key: str, data: Any) -> None:
        """Store nothing."""


def _place(manifest: Manifest) -> str:
    return layout.stage_folder(manifest.stage, manifest.step)


def _reads(run: Run, stage: str, step: int) -> bool:
    fresh = Run(run.root, run.run_id)
    manifest = fresh.manifest(stage, step)
    if manifest is None:
        return False
    with scratch() as folder:
        try:
            read_weights(fresh, manifest, WEIGHTS[stage], folder)
        except StoreError:
            return False
        return (folder / FILE).read_bytes() == weights_of(step, stage)


def _loads(run: Run, state: Artifact) -> bool:
    with scratch() as folder:
        try:
            read_folder(run.store, state, folder)
        except StoreError:
            return False
    return True
