"""The gate of a promotion: what a run's last policy has shown, and whether that is enough for it to serve.

Trap: two accuracies can be compared only on the same prompts, sampled and graded the same way. Where the champion's
cannot be had, the policy is refused with what to do about it; nothing is compared that is not comparable.
"""

import dataclasses
import math
from dataclasses import dataclass

from ratchet.algorithms.statistics import paired_interval
from ratchet.config import RunConfig
from ratchet.errors import ConfigError, NotCommittedError, StoreError
from ratchet.stages.checkpoint_export import CheckpointExport
from ratchet.stages.evaluate import Evaluate
from ratchet.stages.measurement import Measurement, measurement, newest_config
from ratchet.stages.settings import data_role
from ratchet.store.artifacts import is_present
from ratchet.store.decision import Bars, BaseModel, Decision, Export, Improvement, TrainingData
from ratchet.store.manifest import digest_of
from ratchet.store.run import POLICY_UPDATE, Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A run's last policy, exported and measured."""

    run: Run
    step: int
    export: Export
    base: BaseModel
    measurement: Measurement
    data: TrainingData
    config_digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What the numbers say."""

    improvement: Improvement | None
    reasons: tuple[str, ...]
    """Why not; empty where the bars are cleared."""


def candidate(run: Run, config: RunConfig) -> Candidate:
    """Read a run's last policy.

    NotCommittedError where it is not evaluated or not exported; ConfigError where it cannot be evaluated, since there
    are no data.val_files.
    """
    step = run.last_step()
    evaluation = run.manifest(Evaluate.name, step)
    if evaluation is None and not config.data.val_files:
        raise ConfigError(
            f"run {run.uri}: a run without data.val_files has no held-out prompts to be measured on, so nothing can "
            "say whether its policy may serve"
        )
    if evaluation is None:
        raise NotCommittedError(
            f"run {run.uri}: the policy of step {step} is not evaluated, so nothing says whether it may serve; "
            f"ratchet evaluate {run.uri} --step {step}"
        )
    exported = run.manifest(CheckpointExport.name, step)
    if exported is None:
        raise NotCommittedError(
            f"run {run.uri}: the policy of step {step} is not exported; ratchet export {run.uri} --step {step} --to ..."
        )
    artifact = exported.output("export")
    if not is_present(run.store, artifact):
        raise StoreError(f"files of the export {run.uri}/{artifact.folder} are missing or cut short")
    train, base = run.require("preprocess/train", None), run.require(POLICY_UPDATE, 0)
    return Candidate(
        run=run,
        step=step,
        export=Export(uri=f"{run.uri}/{artifact.folder}", digest=artifact.digest),
        base=BaseModel(path=config.actor_rollout_ref.model.path, digest=base.output("policy").digest),
        measurement=measurement(run, config, evaluation),
        data=TrainingData(
            train=train.output(data_role(config)).digest,
            source=config.data.train_files or "",
            source_digest=train.content.inputs.get("source", ""),
        ),
        config_digest=digest_of(run.semantic()),
    )


def decide(
    found: Candidate,
    bars: Bars,
    champion: Decision | None,
    *,
    number: int,
    name: str,
    submission_id: str,
    by: str,
    time: float,
    baseline: Run | None = None,
) -> Decision:
    """Decide on a candidate against the champion of this moment.

    `baseline` is a run that started from the champion's export and whose step 0 measured it on the candidate's held-out
    prompts, for candidates and champions that were measured on different ones.
    """
    measured = found.measurement
    rival: Measurement | str | None = None
    if champion is not None and measured.are_shares:
        rival = champion_measurement(found, champion, baseline)
    if isinstance(rival, str):
        alone = judge(measured, bars)
        judgement = dataclasses.replace(alone, reasons=(*alone.reasons, rival))
    else:
        judgement = judge(measured, bars, rival, champion.number if champion is not None else None)
    is_promoted = not judgement.reasons
    return Decision(
        number=number,
        name=name,
        verdict="promoted" if is_promoted else "refused",
        run=found.run.uri,
        step=found.step,
        export=found.export,
        base=found.base,
        evaluation=measured.describe(),
        compared_with=champion.number if champion is not None else None,
        improvement=judgement.improvement,
        bars=bars,
        reasons=judgement.reasons,
        data=found.data,
        config_digest=found.config_digest,
        submission_id=submission_id,
        by=by,
        time=time,
        targets=number if is_promoted else champion.number if champion is not None else None,
    )


def judge(
    measured: Measurement, bars: Bars, rival: Measurement | None = None, rival_number: int | None = None
) -> Judgement:
    """Compare a measurement with the absolute bar and, prompt by prompt, with the champion's (`rival`) if there is one.

    Significant bars are cleared by the lower end of a 95% interval: Wilson's for the accuracy, Agresti and Min's for
    the paired improvement. The accuracy may equal its bar; the improvement must exceed its own.
    """
    if not measured.are_shares:
        return Judgement(
            improvement=None,
            reasons=(
                "some held-out rewards lie outside [0, 1], so that their mean is no accuracy and has no interval; "
                "evaluate with a reward from 0 to 1",
            ),
        )
    reasons = []
    shown = measured.describe()
    assert shown.low is not None
    assert shown.high is not None
    text = f"{shown.accuracy:.4f} [{shown.low:.4f}, {shown.high:.4f}]"
    if (shown.low if bars.significant else shown.accuracy) < bars.min_accuracy:
        what = "the lower end of its 95% interval" if bars.significant else "it"
        reasons.append(f"accuracy {text}: {what} is below promotion.min_accuracy={bars.min_accuracy:g}")
    improvement = None
    if rival is not None and not rival.are_shares:
        reasons.append(f"some rewards of champion {rival_number} in {rival.place} lie outside [0, 1]")
    elif rival is not None:
        improvement = compare(measured, rival)
        if (improvement.low if bars.significant else improvement.mean) <= bars.min_improvement:
            what = "the lower end of its 95% interval" if bars.significant else "it"
            text = f"{improvement.mean:+.4f} [{improvement.low:+.4f}, {improvement.high:+.4f}]"
            reasons.append(
                f"improvement over champion {rival_number} {text}: {what} does not exceed "
                f"promotion.min_improvement={bars.min_improvement:g}"
            )
    return Judgement(improvement=improvement, reasons=tuple(reasons))


def compare(measured: Measurement, rival: Measurement) -> Improvement:
    """Return the mean difference of accuracy over the prompts that both were measured on: all of them."""
    if measured.accuracies.keys() != rival.accuracies.keys():
        raise StoreError(
            f"{measured.place} and {rival.place} hold evaluations of the same held-out prompts, and yet of other ids"
        )
    differences = [value - rival.accuracies[prompt_id] for prompt_id, value in sorted(measured.accuracies.items())]
    low, high = paired_interval(differences)
    return Improvement(
        mean=math.fsum(differences) / max(len(differences), 1),
        low=low,
        high=high,
        champion_accuracy=rival.mean,
        champion_table=rival.table,
        measured_in=rival.place,
    )


def champion_measurement(found: Candidate, champion: Decision, baseline: Run | None) -> Measurement | str:
    """Return the champion's evaluation on the candidate's prompts, or why there is none and what to do.

    In this order: step 0 of the baseline run, where one is given; step 0 of the candidate's run, if that started from
    the champion's export; what the champion was promoted with, if that was on the same prompts.
    """
    if baseline is not None:
        return _baseline_measurement(found, champion, baseline)
    missing = []
    if found.base.digest == champion.export.digest:
        manifest = found.run.manifest(Evaluate.name, 0)
        if manifest is not None:
            return measurement(found.run, newest_config(found.run), manifest)
        missing.append(
            f"the run started from the champion's export, but its step 0 is not evaluated (ratchet evaluate "
            f"{found.run.uri} --step 0)"
        )
    own = champion.evaluation
    if own.held_out != found.measurement.held_out:
        missing.append("the champion was measured on other held-out prompts")
    elif own.settings != found.measurement.settings:
        missing.append("the champion's answers were sampled or graded with other settings")
    else:
        run = Run(found.run.root, champion.run_id)
        manifest = run.manifest(Evaluate.name, champion.step)
        if manifest is not None and manifest.content.outputs["evaluations"] == own.table:
            return measurement(run, newest_config(run), manifest)
        missing.append(f"the champion's evaluation is gone from {champion.run}")
    return (
        f"not comparable with champion {champion.number}: {'; '.join(missing)}. Measure the champion on the same "
        f"held-out prompts: evaluate step 0 of a run that starts from {champion.export.uri} with this run's "
        f"data.val_files and settings, then ratchet promote {found.run.uri} --again --baseline ROOT/RUN-ID"
    )


def _baseline_measurement(found: Candidate, champion: Decision, baseline: Run) -> Measurement:
    """Return what the baseline's step 0 measured; ConfigError where that says nothing about the champion."""
    base = baseline.require(POLICY_UPDATE, 0).output("policy").digest
    if base != champion.export.digest:
        raise ConfigError(
            f"baseline {baseline.uri} did not start from the export of champion {champion.number}: its base's digest "
            f"is {base}, the export's {champion.export.digest}"
        )
    measured = measurement(baseline, newest_config(baseline), baseline.require(Evaluate.name, 0))
    for what, have, want in (
        ("held-out prompts", measured.held_out, found.measurement.held_out),
        ("settings of sampling and grading", measured.settings, found.measurement.settings),
    ):
        if have != want:
            raise ConfigError(f"baseline {baseline.uri} has other {what} than run {found.run.uri}: {have}, not {want}")
    return measured
