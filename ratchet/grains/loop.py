"""How stages are composed in one process: what comes before training, a step, a segment of steps, a whole run."""

import gc
import logging
from contextlib import ExitStack

from ratchet.config import RunConfig
from ratchet.errors import CommitConflictError, ConfigError, NotCommittedError
from ratchet.grains import overlap, pages
from ratchet.grains.session import LostPutError, Session
from ratchet.stages.base_models import BaseCritic, BasePolicy
from ratchet.stages.checkpoint_export import CheckpointExport
from ratchet.stages.evaluate import Evaluate
from ratchet.stages.graph import data_stages, evaluation, step_stages
from ratchet.stages.settings import total_steps
from ratchet.store.manifest import Manifest
from ratchet.store.run import Run

logger = logging.getLogger(__name__)

_LOST_PUTS = 3
"""How often a segment loses a put and has committed nothing since the last one that it lost, before it gives up.

Of two processes of one submission at least one goes on: the other has published nothing that it could lose to.
"""

MAX_SEGMENTS = 40
"""Iterations of one KFP run: every further one costs 10 s when the run is terminated."""
MAX_STEPS_AT_STAGE_GRAIN = 20
"""At stage grain a step is five tasks of 20 s each on an untouched controller."""


def prepare(session: Session) -> None:
    """Commit version 0 of the policy (and of the critic, where there is one) and what the run learns from."""
    session.run(BasePolicy(), 0)
    if session.config.critic_is_needed:
        session.run(BaseCritic(), 0)
    for stage in data_stages(session.config):
        session.run(stage, None)


def evaluate_base(session: Session) -> None:
    """Evaluate policy version 0 if that is wanted."""
    if session.config.data.val_files and session.config.trainer.val_before_train:
        session.run(evaluation(session.config), 0)


def plan(session: Session, total: int, steps_per_segment: int, *, most: int = MAX_SEGMENTS) -> list[int]:
    """Return the first step of every segment that is still to run, in order."""
    starts = list(range(session.store_run.last_step() + 1, total + 1, steps_per_segment))
    if len(starts) > most:
        raise ConfigError(
            f"{total} steps in segments of {steps_per_segment} make {len(starts)} iterations, more than the {most} "
            "that one pipeline run should have; raise trainer.steps_per_segment, or run fewer steps and continue in "
            "a new run"
        )
    return starts


def run_segment(session: Session, start: int, stop: int) -> None:
    """Run the steps from `start` up to and without `stop`; engines stay in memory as the grain says.

    At segment grain commits follow behind the work, and are through when this returns.
    """
    if session.config.trainer.grain != "segment":
        # The process before may have ended between the last step and its evaluation.
        _evaluate_if_due(session, start - 1)
        for step in range(start, stop):
            session.storage.make_room()
            run_step(session, step)
            _evaluate_if_due(session, step)
            if session.config.trainer.grain == "step":
                session.residents.drop()
        return
    run, lost = session.store_run, 0
    while True:
        if start < stop:
            session.storage.make_room()
        # Whoever made the step before, this process or another, may have ended before its evaluation.
        _evaluate_if_due(session, start - 1)
        # What is there of the first steps was left by a process that did not finish them.
        own_from = max([start - 1, *run.steps()]) + 1
        before = session.num_committed
        try:
            with session.behind(own_from):
                reached = _run_resident(session, start, stop)
            # Not before: a put may turn out to be lost when everything has been computed.
            start = reached
            if start == stop:
                return
        except LostPutError as error:
            lost = 1 if session.num_committed > before else lost + 1
            if lost == _LOST_PUTS:
                raise CommitConflictError(f"{error}; {lost} times in a row: another process does this work") from error
            logger.warning("%s; starting again from the chain", error)
            # The trackers were told of nothing that the other one published.
            session.trackers.catch_up()
            start = max(start, run.last_step() + 1)


def _run_resident(session: Session, start: int, stop: int) -> int:
    """Run the steps up to `stop`, or as far as the storage budget goes; return the next one."""
    trainer = session.config.trainer
    with overlap.sampling_ahead(session, stop) as ahead, ExitStack() as at_end:
        for step in range(start, stop):
            session.wait_for_room()
            if session.storage.is_over():
                # Once everything is committed, it is seen what can go.
                return step
            is_last = step == stop - 1
            is_saved = trainer.save_freq > 0 and step % trainer.save_freq == 0
            is_due = is_last or is_saved or step % trainer.trainer_state_freq == 0
            ahead.begin(step)
            run_step(session, step, keep_trainer_state=is_due)
            if _is_evaluation_due(session, step):
                ahead.wait()
                _evaluate_if_due(session, step)
            if step == start:
                # What lives as long as the segment is not looked through again: a full collection takes half a second.
                gc.freeze()
                at_end.callback(gc.unfreeze)
    return stop


def _evaluate_if_due(session: Session, step: int) -> None:
    if _is_evaluation_due(session, step):
        session.run(evaluation(session.config), step)


def _is_evaluation_due(session: Session, step: int) -> bool:
    test_freq = session.config.trainer.test_freq
    return bool(session.config.data.val_files) and step > 0 and test_freq > 0 and step % test_freq == 0


def run_step(session: Session, step: int, *, keep_trainer_state: bool = True) -> None:
    """Run the stages of one step; outside a segment the trainer's state is always committed."""
    keep = keep_trainer_state or session.config.trainer.grain != "segment"
    for stage in step_stages(session.config):
        session.run(stage, step, keep_trainer_state=keep)


def evaluate_last(session: Session) -> Manifest | None:
    """Evaluate the policy that the last step published, if anything is held out."""
    return session.run(evaluation(session.config), session.total_steps()) if session.config.data.val_files else None


def export_last(session: Session) -> Manifest:
    """Export the policy that the last step published."""
    return session.run(CheckpointExport(), session.total_steps())


def is_finished(run: Run, config: RunConfig) -> bool:
    """Whether the run has everything that this config asks for: steps, evaluation, export, and a decision on it.

    `ratchet status` calls the same runs finished (`ratchet.grains.status.explaining`), without parsing their config.
    """
    last = run.last_step()
    try:
        # Fewer steps than are committed are refused: a run may grow, never shrink.
        if last == 0 or last != total_steps(run, config):
            return False
    except NotCommittedError:
        return False
    exported = run.manifest(CheckpointExport.name, last)
    if exported is None or (config.data.val_files and run.manifest(Evaluate.name, last) is None):
        return False
    if config.promotion.name:
        from ratchet.store import champions

        history = champions.decisions(run.root, config.promotion.name)
        return champions.decided(history, run.uri, last, exported.output("export").digest) is not None
    return True


def train(session: Session) -> None:
    """Run everything that is not committed yet, in this process."""
    prepare(session)
    evaluate_base(session)
    total, size = session.total_steps(), session.config.trainer.steps_per_segment
    for start in plan(session, total, size, most=total):
        run_segment(session, start, min(start + size, total + 1))
    evaluate_last(session)
    export_last(session)
    pages.show_run(session)
