"""Bringing a trainer to a committed version: from memory, from its last written state, or by replay.

Committed rollouts are never sampled again: steps after the last written state are replayed through the update. Where
the replayed policy is not the committed one (GPU arithmetic), a `recovery` manifest records both digests and the drift.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ratchet.config import RunConfig
from ratchet.errors import CommitConflictError, ConfigError, DamagedError
from ratchet.stages.base import Input, describe_attempt
from ratchet.stages.held import accelerators
from ratchet.stages.publishing import digest_of_weights
from ratchet.stages.residents import Residents
from ratchet.stages.settings import total_steps
from ratchet.store import artifacts
from ratchet.store.manifest import Content, Manifest, digest_of
from ratchet.store.objects import ObjectNotFoundError
from ratchet.store.run import Run

logger = logging.getLogger(__name__)

RECOVERY = "recovery"


@dataclass(frozen=True, slots=True)
class Learner:
    """A model that is trained step by step: the policy or the critic."""

    role: str
    """Of its weights: "policy" or "critic"."""
    stage: str
    """That publishes its versions."""
    open: Callable[..., Any]
    """Makes its trainer at version 0: (model folder, settings, world_size=, device=, mesh=)."""
    settings: Callable[[RunConfig, int], Any]
    """What its trainer is told in a run of so many steps."""
    dtype: Callable[[RunConfig], str]
    """Of the weights that it publishes."""
    update: Callable[[Any, Run, RunConfig, int], dict[str, float]]
    """Trains one step from what is committed, and returns its metrics."""


def trainer_at(residents: Residents, learner: Learner, version: int) -> Any:
    """Return the learner's resident trainer at `version`, opening or recovering it where it is not there."""
    trainer = residents.trainers.get(learner.role)
    if trainer is not None and trainer.policy_version == version:
        return trainer
    if trainer is not None:
        residents.trainers.pop(learner.role).close()
    trainer = _open(residents, learner)
    start = _load_last_state(residents, learner.stage, trainer, version)
    if start < version:
        _replay(residents, learner, trainer, range(start + 1, version + 1))
    residents.trainers[learner.role] = trainer
    return trainer


def _open(residents: Residents, learner: Learner) -> Any:
    config = residents.config.trainer
    if config.nnodes > 1:
        raise ConfigError(f"trainer.nnodes is {config.nnodes}: this version trains on one node")
    return learner.open(
        residents.base_folder(learner.role),
        learner.settings(residents.config, total_steps(residents.run, residents.config)),
        world_size=config.n_gpus_per_node * config.nnodes,
        device=residents.torch_device(),
        mesh=residents.mesh,
    )


def _load_last_state(residents: Residents, stage: str, trainer: Any, version: int) -> int:
    """Give the trainer the newest state that is whole, and return its step; 0 where there is none.

    A damaged one only makes the replay longer: it is passed over with a warning, and `ratchet verify` names it. Where
    several processes train, each reads for itself, and they would part ways: there it is an error.
    """
    run, is_alone = residents.run, residents.config.trainer.n_gpus_per_node == 1
    passed_over = (DamagedError, ObjectNotFoundError) if is_alone else ()
    for step in range(version, 0, -1):
        state = run.require(stage, step).provenance.trainer_state
        if state is None or not artifacts.is_present(run.store, state):
            continue
        with artifacts.scratch() as folder:
            try:
                artifacts.read_folder(run.store, state, folder)
            except passed_over as error:
                logger.warning("%s; going back to an earlier trainer state", error)
                continue
            trainer.load_state(folder)
        residents.proven_states.add(state.folder)
        return step
    return 0


def _replay(residents: Residents, learner: Learner, trainer: Any, steps: range) -> None:
    logger.info("replaying committed steps %d to %d through %s", steps[0], steps[-1], learner.stage)
    started = time.perf_counter()
    for step in steps:
        learner.update(trainer, residents.run, residents.config, step)
    residents.replay_seconds[learner.role] = time.perf_counter() - started
    weights = trainer.export_weights(learner.dtype(residents.config))
    if residents.is_main:
        _compare(residents, learner, steps[-1], weights)


def _compare(residents: Residents, learner: Learner, version: int, weights: dict[str, Any]) -> None:
    """Compare the replayed weights with the committed ones, and commit a `recovery` manifest where they differ."""
    run, role = residents.run, learner.role
    committed = Input(run.require(learner.stage, version), role)
    replayed = digest_of_weights(weights)
    if replayed == committed.digest:
        logger.info("the replayed %s %d is the committed one, bit for bit", role, version)
        return
    drift = max(
        float((weights[name].float() - tensor.cpu().float()).abs().max())
        for name, tensor in residents.weights(committed)
    )
    logger.warning(
        "the replayed %s %d differs from the committed one by at most %g; going on from it", role, version, drift
    )
    # A run that is only read is replayed for comparison: nothing is published then.
    stage = RECOVERY if role == "policy" else f"{role}_{RECOVERY}"
    if run.owner is None or run.manifest(stage, version) is not None:
        return
    content = Content(
        step=version,
        stage=stage,
        policy_version=version,
        inputs={role: committed.digest},
        outputs={role: replayed},
        config=digest_of({}),
    )
    now = time.time()
    provenance = describe_attempt(
        run,
        run.new_attempt(),
        started=now,
        ended=now,
        held=accelerators(residents.torch_device(), 1),
        read=[committed.manifest],
        artifacts={},
        metrics={"recovery/max_weight_drift": drift},
    )
    try:
        run.commit(Manifest(content=content, provenance=provenance))
    except CommitConflictError:
        logger.warning("another attempt has recorded its drift from %s %d already", role, version)
