"""What each component of a pipeline runs: a record of what it is told in, plain values and small reports out.

The same functions run on a cluster and here. Trap: state passes through the run in object storage alone; a component is
told where the run is, and which submission it belongs to (the pipeline run's id), since KFP hands no data from one
iteration to the next.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ratchet.config import RunConfig, parse_text, read_config_text, semantic
from ratchet.errors import ConfigError
from ratchet.grains import loop, outputs, pages, placement, program
from ratchet.grains.outputs import Output
from ratchet.grains.session import Session, join_submission, open_session, submit
from ratchet.grains.tasks import (
    EvaluateTask,
    ExportTask,
    PlanTask,
    PreflightTask,
    PreprocessTask,
    PromoteTask,
    RunTask,
    SegmentTask,
    StageTask,
    StepTask,
)
from ratchet.stages.base import Context, Stage, as_future
from ratchet.stages.graph import evaluation, step_stage, step_stages
from ratchet.stages.residents import Residents
from ratchet.stages.settings import data_role, total_steps
from ratchet.store import layout
from ratchet.store.artifacts import scratch
from ratchet.store.manifest import Artifact, Manifest
from ratchet.store.objects import ObjectStore, open_store
from ratchet.store.run import POLICY_UPDATE, Run

logger = logging.getLogger(__name__)

TRAIN, FINISHED, UNCHANGED = "train", "finished", "unchanged"
"""What preflight decides: there is work; the run is complete; the data are those of the last decision."""


def preflight(task: PreflightTask, *, report: Output | None = None) -> tuple[Any, ...]:
    """Decide whether there is work; then refuse what cannot work, and create or find the run and claim it.

    Returns the decision, and what evaluation and export ask for (`placement.kfp_values`), in this order.
    """
    from ratchet.grains import preflight as checks

    run = Run(task.root, task.name)
    is_old = run.store.size(layout.RUN) is not None
    config = placement.with_images(_config(task, run, is_old), task.images)
    where = tuple(placement.kfp_values(config.device_map.evaluate).values())
    decision, why = _decide(task, run, is_old, config)
    if decision == TRAIN:
        findings = checks.check(config, root=task.root, run_id=task.name, facts=_facts(task, config))
        table = checks.report_markdown(findings)
        # KFP shows no report of a task that failed.
        logger.info("%s", table)
        outputs.write_report(report, [table])
        checks.refuse(findings)
        submit(task.root, task.name, config, submission_id=task.submission_id, is_checked=True)
    else:
        outputs.write_report(report, [f"### {task.name}", "", why])
        program.say(why)
    return (decision, *where)


def preprocess(task: PreprocessTask, *, metrics: Output | None = None) -> str:
    """Commit policy version 0, and the prompts or examples."""
    with _session(task) as session:
        loop.prepare(session)
        manifest = session.store_run.require("preprocess/train", None)
        rows = manifest.output(data_role(session.config)).rows or 0
        outputs.write_metrics(metrics, manifest.provenance.metrics | {"rows": float(rows)})
        return manifest.content_digest


def plan(task: PlanTask) -> list[dict[str, Any]]:
    """Return the iterations that are still to run: a segment each, or a step at the other grains."""
    with _session(task) as session:
        trainer, total = session.config.trainer, session.total_steps()
        if trainer.grain == "stage":
            starts = loop.plan(session, total, 1, most=loop.MAX_STEPS_AT_STAGE_GRAIN)
        else:
            starts = loop.plan(session, total, trainer.steps_per_segment if trainer.grain == "segment" else 1)
        return [placement.iteration(session.config, start) for start in starts]


def segment(
    task: SegmentTask, *, metrics: Output | None = None, report: Output | None = None, page: Output | None = None
) -> str:
    """Run the segment of steps that begins with `start`. Returns the content digest of its last policy update."""
    with _session(task, "segment") as session:
        stop = min(task.start + session.config.trainer.steps_per_segment, session.total_steps() + 1)
        digest = _run_steps(session, task.start, stop, metrics, report)
        pages.show_segment(session, task.start, stop, page)
        return digest


def step(task: StepTask, *, metrics: Output | None = None, report: Output | None = None) -> str:
    """Run every stage of one step. Returns the content digest of its policy update."""
    with _session(task, "segment") as session:
        return _run_steps(session, task.step, task.step + 1, metrics, report)


def stage(task: StageTask, *, name: str, metrics: Output | None = None, report: Output | None = None) -> str:
    """Run one stage of one step. Returns its content digest, or "" where this config's step does without it."""
    with _session(task, placement.PLACE_OF_STAGE.get(name, "")) as session:
        found = step_stage(name, session.config)
        if found is None:
            known = ", ".join(item.name for item in step_stages(session.config))
            program.say(f"step {task.step} does without {name}; its stages are {known}")
            return ""
        if found.name == step_stages(session.config)[0].name:
            session.storage.make_room()
        manifest = session.run(found, task.step)
        outputs.write_metrics(metrics, manifest.provenance.metrics)
        if report is not None:
            outputs.write_report(report, outputs.steps_report(session.store_run, [task.step]))
        return manifest.content_digest


def scores(task: StageTask, *, metrics: Output | None = None) -> str:
    """Run whatever scores this config's step needs; none is fine."""
    with _session(task, "scores") as session:
        wanted = [step_stage(name, session.config) for name in ("policy_scores", "reference_scores", "values")]
        manifests = [session.run(found, task.step) for found in wanted if found is not None]
        for manifest in manifests:
            outputs.write_metrics(metrics, manifest.provenance.metrics)
        if not manifests:
            program.say(f"step {task.step} reads no scores")
        return ",".join(manifest.content_digest for manifest in manifests)


def evaluate(task: EvaluateTask, *, metrics: Output | None = None, report: Output | None = None) -> str:
    """Evaluate policy `version`: "base", "last", or a step."""
    with _session(task, "evaluate") as session:
        config = session.config
        if not config.data.val_files:
            program.say("no data.val_files: nothing is evaluated")
            return ""
        if task.version == "base" and not config.trainer.val_before_train:
            program.say("trainer.val_before_train is false: the base is not evaluated")
            return ""
        at = {"base": 0, "last": session.total_steps()}.get(task.version)
        manifest: Manifest = session.run(evaluation(config), _number(task.version) if at is None else at)
        outputs.write_metrics(metrics, manifest.provenance.metrics)
        outputs.write_report(report, outputs.evaluation_report(session.store_run, manifest))
        return manifest.content_digest


def checkpoint_export(
    task: ExportTask,
    *,
    metrics: Output | None = None,
    report: Output | None = None,
    page: Output | None = None,
    model: Output | None = None,
) -> str:
    """Export the last policy. Returns where the Hugging Face folder is."""
    with _session(task, "evaluate") as session:
        manifest = loop.export_last(session)
        artifact = manifest.output("export")
        uri = f"{session.store_run.uri}/{artifact.folder}"
        outputs.write_metrics(metrics, manifest.provenance.metrics)
        outputs.write_model(model, uri=uri, artifact=artifact, manifest=manifest)
        pages.show_run(session, page=page, report=report)
        return uri


def promote(
    task: PromoteTask, *, metrics: Output | None = None, report: Output | None = None, model: Output | None = None
) -> str:
    """Decide on the last policy as the champion of promotion.name. Returns the verdict, "" where none is named."""
    from ratchet.grains import promotion

    with _session(task, is_last=True) as session:
        run = session.store_run
        decision = promotion.promote(run, session.config, submission_id=task.submission_id)
        if decision is None:
            program.say("no promotion.name (the parameter champion): nothing is promoted")
            return ""
        program.say(promotion.sentence(decision))
        outputs.write_metrics(metrics, promotion.numbers(decision))
        outputs.write_report(report, promotion.report(decision))
        manifest = run.require("checkpoint_export", session.total_steps())
        artifact = manifest.output("export")
        uri = f"{run.uri}/{artifact.folder}"
        outputs.write_model(
            model, uri=uri, artifact=artifact, manifest=manifest, champion=decision.name, verdict=decision.verdict
        )
        return decision.verdict


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


def replay_stage(
    found: Stage,
    run: Run,
    config: RunConfig,
    step: int,
    *,
    look: Callable[[ObjectStore, str, Artifact], None] = lambda store, role, artifact: None,
) -> dict[str, tuple[str, str]]:
    """Compute a committed stage again from its inputs. Returns role -> (committed digest, computed digest).

    `look` is shown each output that was computed, with the store that holds it until this returns.
    """
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
        computed = {role: as_future(artifact).result() for role, artifact in result.outputs.items()}
        for role, artifact in computed.items():
            look(context.store, role, artifact)
    return {role: (committed.content.outputs[role], artifact.digest) for role, artifact in computed.items()}


@contextmanager
def _session(task: RunTask, place: str = "", *, is_last: bool = False) -> Iterator[Session]:
    """Open the run for this task; `place` is the entry of device_map that its pod runs by."""
    run, config = join_submission(task.root, task.name, task.submission_id)
    if place and (image := getattr(config.device_map, place).image):
        # Manifests record it, and a pod does not know its own.
        os.environ["RATCHET_IMAGE"] = image
    with open_session(run, config, is_last=is_last) as session:
        yield session


def _run_steps(session: Session, start: int, stop: int, metrics: Output | None, report: Output | None) -> str:
    run = session.store_run
    # The fence: nothing of this segment may run before the one before it is done.
    run.require(POLICY_UPDATE, start - 1)
    if start == 1:
        loop.evaluate_base(session)
    try:
        loop.run_segment(session, start, stop)
    finally:
        # What went wrong in the steps counts, whatever goes wrong in telling of them.
        with suppress(OSError):
            _show_steps(
                run, [step for step in range(start, stop) if run.manifest(POLICY_UPDATE, step)], metrics, report
            )
    return run.require(POLICY_UPDATE, stop - 1).content_digest


def _show_steps(run: Run, steps: list[int], metrics: Output | None, report: Output | None) -> None:
    if steps:
        outputs.write_metrics(metrics, outputs.step_metrics(run, steps[-1]))
        outputs.write_report(report, outputs.steps_report(run, steps))


def _config(task: PreflightTask, run: Run, is_old: bool) -> RunConfig:
    """Read the config that the pipeline was given, with what its other parameters say."""
    overrides = placement.config_overrides(
        total_steps=task.total_steps,
        steps_per_segment=task.steps_per_segment,
        grain=task.grain,
        device_map=task.device_map,
        champion=task.champion,
        min_accuracy=task.min_accuracy,
    )
    if task.config.startswith("s3://"):
        parsed = parse_text(placement.stored_text(task.config), overrides, source=task.config)
    else:
        parsed = read_config_text(task.config, overrides, name="the parameter config")
    return _from_champion(parsed, task, run, is_old) if task.from_champion else parsed


def _from_champion(config: RunConfig, task: PreflightTask, run: Run, is_old: bool) -> RunConfig:
    """Return the config with the champion's export as its model; the first champion starts from the config's."""
    from ratchet.store import champions

    if not config.promotion.name:
        raise ConfigError("this pipeline starts from a champion: give its name (the parameter champion)")
    submitted = run.newest_submission() if is_old else None
    if submitted is not None:
        # The champion of that day, whoever it is by now.
        path = run.config_of(submitted)["actor_rollout_ref"]["model"]["path"]
    else:
        champion = champions.champion(task.root, config.promotion.name)
        if champion is None:
            return config
        path = champion.export.uri
    actor = config.actor_rollout_ref
    model = actor.model.model_copy(update={"path": path})
    return config.model_copy(update={"actor_rollout_ref": actor.model_copy(update={"model": model})})


def _decide(task: PreflightTask, run: Run, is_old: bool, config: RunConfig) -> tuple[str, str]:
    """Return the decision and the reason for it."""
    if is_old:
        run.check(semantic(config))
        if loop.is_finished(run, config):
            return FINISHED, f"run {run.uri} is complete with {run.last_step()} steps: there is nothing to do"
    elif task.from_champion:
        from ratchet.stages.prepared import unchanged

        decided = unchanged(task.root, config.promotion.name, config)
        if decided is not None:
            return UNCHANGED, (
                f"the training data and the config are those of decision {decided.number} on "
                f"{config.promotion.name} (run {decided.run}): nothing is trained"
            )
    return TRAIN, ""


def _facts(task: PreflightTask, config: RunConfig) -> Any:
    from ratchet.grains.preflight import PipelineFacts

    return PipelineFacts(
        grain=config.trainer.grain,
        submission_id=task.submission_id,
        has_critic=task.has_critic,
        placements={stage: getattr(config.device_map, stage) for stage in (*placement.PLACED[task.grain], "evaluate")},
        in_pod=bool(os.environ.get("RATCHET_POD_NAME")),
        claim=os.environ.get("RATCHET_COMPILE_CACHE_CLAIM", ""),
    )


def _number(version: str) -> int:
    if not version.isdecimal():
        raise ConfigError(f'version {version!r}: expected "base", "last" or a step')
    return int(version)
