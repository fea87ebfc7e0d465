"""Bringing a trainer to a committed policy version: from memory, from its last written state, or by replay.

Committed rollouts are never sampled again: steps after the last written state are replayed through the update. Where
the replayed policy is not the committed one (GPU arithmetic), a `recovery` manifest records both digests and the drift.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.errors import CommitConflictError, ConfigError
from ratchet.stages.base import Input, describe_attempt
from ratchet.stages.residents import Residents
from ratchet.stages.settings import trainer_settings
from ratchet.store import artifacts
from ratchet.store.manifest import Artifact, Content, Manifest, digest_of
from ratchet.store.run import POLICY_UPDATE, Run

if TYPE_CHECKING:
    from ratchet.engines.trainer import Trainer, TrainRow

logger = logging.getLogger(__name__)

RECOVERY = "recovery"


def trainer_at(residents: Residents, version: int, rows_of: "Callable[[int], Sequence[TrainRow]]") -> "Trainer":
    """Return the resident trainer at policy version `version`, opening or recovering it where it is not there."""
    if residents.trainer is not None and residents.trainer.policy_version == version:
        return residents.trainer
    if residents.trainer is not None:
        residents.trainer.close()
        residents.trainer = None
    trainer = _open(residents)
    start, state = _last_state(residents.run, version)
    if state is not None:
        with artifacts.scratch() as folder:
            artifacts.read_folder(residents.run.store, state, folder)
            trainer.load_state(folder)
    if start < version:
        _replay(residents, trainer, range(start + 1, version + 1), rows_of)
    residents.trainer = trainer
    return trainer


def _open(residents: Residents) -> "Trainer":
    from ratchet.engines.trainer import Trainer

    config = residents.config.trainer
    if config.nnodes > 1:
        raise ConfigError(f"trainer.nnodes is {config.nnodes}: this version trains on one node")
    return Trainer.from_folder(
        residents.base_folder(),
        trainer_settings(residents.run, residents.config),
        world_size=config.n_gpus_per_node * config.nnodes,
        device=residents.torch_device(),
    )


def _last_state(run: Run, version: int) -> tuple[int, Artifact | None]:
    for step in range(version, 0, -1):
        state = run.require(POLICY_UPDATE, step).provenance.trainer_state
        if state is not None and artifacts.is_present(run.store, state):
            return step, state
    return 0, None


def _replay(
    residents: Residents, trainer: "Trainer", steps: range, rows_of: "Callable[[int], Sequence[TrainRow]]"
) -> None:
    logger.info("replaying committed rollouts of steps %d to %d through the update", steps[0], steps[-1])
    for step in steps:
        trainer.update(rows_of(step), step=step)
    weights = trainer.export_weights(residents.config.actor_rollout_ref.rollout.dtype)
    if residents.is_main:
        _compare(residents, steps[-1], weights)


def _compare(residents: Residents, version: int, weights: dict[str, Any]) -> None:
    """Compare the replayed policy with the committed one, and commit a `recovery` manifest where they differ."""
    run = residents.run
    committed = Input(run.require(POLICY_UPDATE, version), "policy")
    replayed = _digest_of_weights(weights)
    if replayed == committed.digest:
        logger.info("the replayed policy %d is the committed one, bit for bit", version)
        return
    drift = max(
        float((weights[name].float() - tensor.float()).abs().max()) for name, tensor in residents.weights(committed)
    )
    logger.warning(
        "the replayed policy %d differs from the committed one by at most %g; going on from it", version, drift
    )
    # A run that is only read is replayed for comparison: nothing is published then.
    if run.owner is None or run.manifest(RECOVERY, version) is not None:
        return
    content = Content(
        step=version,
        stage=RECOVERY,
        policy_version=version,
        inputs={"policy": committed.digest},
        outputs={"policy": replayed},
        config=digest_of({}),
    )
    provenance = describe_attempt(
        run,
        run.new_attempt(),
        started=time.time(),
        device=residents.torch_device(),
        read=[committed.manifest],
        artifacts={},
        metrics={"recovery/max_weight_drift": drift},
    )
    try:
        run.commit(Manifest(content=content, provenance=provenance))
    except CommitConflictError:
        logger.warning("another attempt has recorded its drift from policy %d already", version)


def save_policy(weights: dict[str, Any], folder: Path) -> None:
    """Write weights as the files of a policy; equal weights give equal bytes."""
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _digest_of_weights(weights: dict[str, Any]) -> str:
    with artifacts.scratch() as folder:
        save_policy(weights, folder)
        return artifacts.describe_folder("", folder).digest
