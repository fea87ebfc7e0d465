"""What each component of a pipeline runs: plain functions of strings and integers, the same on a cluster and here.

Trap: state passes through the run in object storage alone; a component is told where the run is, and which submission
it belongs to (the pipeline run's id), since KFP hands no data from one iteration to the next.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ratchet.config import RunConfig, load_config, parse_text
from ratchet.environment import set_defaults
from ratchet.errors import ConfigError
from ratchet.grains import loop
from ratchet.grains.session import Session, join_submission, open_session, submit
from ratchet.stages.base import Context, Stage
from ratchet.stages.evaluate import Evaluate
from ratchet.stages.graph import step_stage, step_stages
from ratchet.stages.residents import Residents
from ratchet.stages.settings import total_steps
from ratchet.store.artifacts import scratch
from ratchet.store.manifest import Manifest
from ratchet.store.objects import open_store
from ratchet.store.run import POLICY_UPDATE, Run

logger = logging.getLogger(__name__)


def preflight(
    root: str, run_id: str, submission_id: str, config: str, overrides: list[str], *, has_critic: bool = True
) -> str:
    """Check what can be checked in seconds, create or find the run, and claim it. Returns the run's place.

    `has_critic` says whether the pipeline has a task for the critic's update.
    """
    _start_program()
    is_text = "\n" in config or ":" in config.replace("://", "")
    if config.startswith("s3://"):
        folder, _, name = config.rpartition("/")
        parsed = parse_text(open_store(folder).get(name).decode(), overrides, source=config)
    elif is_text:
        parsed = parse_text(config, overrides, source="the parameter config")
    else:
        parsed = load_config(config or None, overrides)
    if parsed.critic_is_needed and not has_critic:
        raise ConfigError(
            f"algorithm.adv_estimator={parsed.algorithm.adv_estimator} needs a critic, and this pipeline has no task "
            "that trains one: use the pipeline ratchet-ppo-stages"
        )
    return submit(root, run_id, parsed, submission_id=submission_id).uri


def preprocess(root: str, run_id: str, submission_id: str) -> str:
    """Commit policy version 0 and the prompts."""
    with _session(root, run_id, submission_id) as session:
        loop.prepare(session)
        return session.store_run.require("preprocess/train", None).content_digest


def plan(root: str, run_id: str, submission_id: str) -> list[int]:
    """Return the first step of every segment (at stage grain: every step) that is still to run."""
    with _session(root, run_id, submission_id) as session:
        trainer, total = session.config.trainer, session.total_steps()
        if trainer.grain == "stage":
            return loop.plan(session, total, 1, most=loop.MAX_STEPS_AT_STAGE_GRAIN)
        return loop.plan(session, total, trainer.steps_per_segment)


def segment(root: str, run_id: str, submission_id: str, start: int) -> str:
    """Run the segment of steps that begins with `start`. Returns the content digest of its last policy update."""
    with _session(root, run_id, submission_id) as session:
        # The fence: nothing of this segment may run before the one before it is done.
        session.store_run.require(POLICY_UPDATE, start - 1)
        if start == 1:
            loop.evaluate_base(session)
        stop = min(start + session.config.trainer.steps_per_segment, session.total_steps() + 1)
        loop.run_segment(session, start, stop)
        return session.store_run.require(POLICY_UPDATE, stop - 1).content_digest


def stage(name: str, root: str, run_id: str, submission_id: str, step: int) -> str:
    """Run one stage of one step. Returns its content digest, or "" where this config's step does without it."""
    with _session(root, run_id, submission_id) as session:
        found = step_stage(name, session.config)
        if found is None:
            known = ", ".join(item.name for item in step_stages(session.config))
            logger.info("step %d does without %s; its stages are %s", step, name, known)
            return ""
        return session.run(found, step).content_digest


def scores(root: str, run_id: str, submission_id: str, step: int) -> str:
    """Run whatever scores this config's step needs; none is fine."""
    digests = [
        stage(name, root, run_id, submission_id, step) for name in ("policy_scores", "reference_scores", "values")
    ]
    return ",".join(digest for digest in digests if digest)


def evaluate(root: str, run_id: str, submission_id: str, version: str) -> str:
    """Evaluate policy `version`: "base", "last", or a step."""
    with _session(root, run_id, submission_id) as session:
        if not session.config.data.val_files:
            logger.info("no data.val_files: nothing is evaluated")
            return ""
        if version == "base":
            loop.evaluate_base(session)
            return ""
        manifest: Manifest = session.run(Evaluate(), session.total_steps() if version == "last" else _number(version))
        return manifest.content_digest


def checkpoint_export(root: str, run_id: str, submission_id: str) -> str:
    """Export the last policy. Returns where the Hugging Face folder is."""
    with _session(root, run_id, submission_id, is_last=True) as session:
        artifact = loop.export_last(session).output("export")
        return f"{session.store_run.uri}/{artifact.folder}"


def take_over(found: Stage, run: Run, config: RunConfig, step: int) -> Manifest:
    """Claim an existing run for this process and commit one stage; whoever ran it before may commit nothing more.

    A stage whose inputs are not committed is a NotCommittedError, and the run stays its owner's.
    """
    found.inputs(run, config, step)
    # What a training run may refuse, a single stage of it may do: the run exists, and that is the point.
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"resume_mode": "auto"})})
    is_last = run.last_step() >= total_steps(run, config)
    with open_session(submit(run.root, run.run_id, config), config, is_last=is_last) as session:
        return session.run(found, step)


def replay_stage(found: Stage, run: Run, config: RunConfig, step: int) -> dict[str, tuple[str, str]]:
    """Compute a committed stage again from its inputs. Returns role -> (committed digest, computed digest)."""
    committed = run.require(found.name, step)
    residents = Residents(run, config)
    with scratch() as folder:
        context = Context(
            run=run,
            config=config,
            step=step,
            inputs=found.inputs(run, config, step),
            folder="replay",
            store=open_store(str(folder)),
            residents=residents,
            keep_trainer_state=False,
        )
        try:
            result = found.compute(context)
        finally:
            residents.close()
    return {role: (committed.content.outputs[role], artifact.digest) for role, artifact in result.outputs.items()}


@contextmanager
def _session(root: str, run_id: str, submission_id: str, *, is_last: bool = False) -> Iterator[Session]:
    _start_program()
    run, config = join_submission(root, run_id, submission_id)
    with open_session(run, config, is_last=is_last) as session:
        yield session


def _number(version: str) -> int:
    if not version.isdecimal():
        raise ConfigError(f'version {version!r}: expected "base", "last" or a step')
    return int(version)


def _start_program() -> None:
    """Components are programs: their log goes to the pod's log, unless a host program has set logging up."""
    set_defaults()
    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get("RATCHET_LOG_LEVEL", "INFO"),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
