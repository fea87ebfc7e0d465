"""An audit as a tree of text: what decided on it at the top, what it came from below.

Steps that were made alike (same claim, code, image and device) are one branch; `--json` has every stage of each.
Trap: names come from people; what a terminal would take for a command is left out.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from ratchet.grains.audit.records import Audit, Data, StageRecord, Submission
from ratchet.grains.status.screen import one_line
from ratchet.store.decision import Decision
from ratchet.store.usage import readable
from ratchet.tracking.show_champions import accuracy_text, decision_line
from ratchet.tracking.show_cost import cost_in_short, cost_sentences, row_text

_SHORT = 12
"""Hexadecimal digits of a digest that are shown."""


@dataclass(slots=True)
class Node:
    """One line, and what is below it."""

    text: str
    below: list["Node"] = field(default_factory=list)


def tree_lines(audit: Audit) -> list[str]:
    """Return the audit as lines of text."""
    return list(_drawn(Node(_title(audit), list(_branches(audit)))))


def _drawn(node: Node, first: str = "", rest: str = "") -> Iterator[str]:
    yield one_line(first + node.text).rstrip()
    for number, child in enumerate(node.below, start=1):
        is_last = number == len(node.below)
        yield from _drawn(child, rest + ("`- " if is_last else "|- "), rest + ("   " if is_last else "|  "))


def _leaves(*texts: str) -> list[Node]:
    return [Node(text) for text in texts if text]


def _title(audit: Audit) -> str:
    if audit.model is not None:
        aliases = "".join(f" @{alias}" for alias in audit.model.aliases)
        return f"models:/{audit.model.name}/{audit.model.version}{aliases}"
    return audit.asked


def _branches(audit: Audit) -> Iterator[Node]:
    if audit.model is not None:
        model = audit.model
        source, logged = f"source {model.source}", f"MLflow run {model.mlflow_run_id}" if model.mlflow_run_id else ""
        yield Node(f"MLflow mirrors decision {model.decision} of {model.name}", _leaves(source, logged))
    for decision in audit.decisions:
        yield _decision(decision, audit)
    if not audit.decisions:
        yield Node("nobody has decided on it")
    for one in audit.exports:
        yield Node(f"export of step {one.step}", _stage_leaves(one, audit.run))
    yield Node(f"run {audit.run}", list(_run(audit)))
    for fault in audit.faults:
        yield Node(f"fault: {fault}")
    if not audit.faults:
        yield Node("every manifest is the one that was read; ratchet verify hashes the files, too")


def _decision(decision: Decision, audit: Audit) -> Node:
    serves = ", and serves now" if decision in audit.serving else ""
    by = f"by {decision.by or 'nobody known'}, {_when(decision.time)}"
    bars, found = decision.bars, decision.improvement
    compared = "lower ends of 95% intervals" if bars.significant else "means"
    return Node(
        f"{decision.name} decision {decision_line(decision)}{serves}",
        _leaves(
            by + (f", submission {decision.submission_id}" if decision.submission_id else ""),
            *decision.reasons,
            f"had to reach {bars.min_accuracy:g}, and to exceed the champion by {bars.min_improvement:g} ({compared})",
            f"accuracy {accuracy_text(decision)}, table {decision.evaluation.table[:_SHORT]}",
            f"champion's accuracy {found.champion_accuracy:.4f}, measured in {found.measured_in}" if found else "",
            f"about the export {decision.export.digest[:_SHORT]} at {decision.export.uri}",
        ),
    )


def _run(audit: Audit) -> Iterator[Node]:
    yield Node(f"config {audit.config_digest[:_SHORT]}, seed {audit.seed}")
    for claim in audit.submissions:
        yield Node(_submission(claim), _leaves(*(f"{pod}: {asked}" for pod, asked in claim.accelerators.items())))
    yield _cost(audit)
    yield Node(f"{len(audit.steps)} steps, {audit.rollouts} rollouts", list(_steps(audit)))
    if audit.evaluations:
        yield Node("evaluations", [Node(_line(one)) for one in audit.evaluations])
    if audit.recoveries:
        lines = [f"step {one.step}, {one.stage}: {_made(one)}" for one in audit.recoveries]
        yield Node("a trainer was rebuilt, and went on from other weights than those committed", _leaves(*lines))
    for data in audit.data:
        yield _prompts(data, audit.run)
    for one in audit.base:
        yield Node(f"version 0 from {audit.base_model or 'a model that is not known'}", _stage_leaves(one, audit.run))


def _submission(one: Submission) -> str:
    parts = [
        f"submission {one.epoch}: {one.stages} stages",
        f"pipeline run {one.submission_id}" if one.submission_id else "" if one.is_damaged else "outside a pipeline",
        "damaged" if one.is_damaged else "",
        f"from {one.host}" if one.host else "",
        f"grain {one.grain}" if one.grain else "",
        f"version {one.version}" if one.version else "",
        f"image {one.image}" if one.image else "",
    ]
    return ", ".join(part for part in parts if part)


def _cost(audit: Audit) -> Node:
    by_stage = (
        f"{stage}: {row_text(used)}" for stage, used in audit.cost.by_stage.items() if used.seconds or used.gpu_seconds
    )
    return Node(cost_in_short(audit.cost), _leaves(*by_stage, *cost_sentences(audit.cost)))


def _steps(audit: Audit) -> Iterator[Node]:
    made = [(_made_alike(stages), stages) for stages in audit.steps]
    start = 1
    for alike, group in itertools.groupby(made, key=lambda one: one[0]):
        steps = [stages for _, stages in group]
        stop = start + len(steps) - 1
        span = f"step {start}" if start == stop else f"steps {start} to {stop}"
        scores = [one.score for stages in steps for one in stages if one.score is not None]
        score = f", mean reward {scores[0]:.4g} to {scores[-1]:.4g}" if scores else ""
        rows = sum(one.rows for stages in steps for one in stages)
        yield Node(f"{span}: {rows} rollouts{score}", _leaves(*alike))
        start = stop + 1
    if audit.steps:
        last = audit.steps[-1]
        yield Node(f"step {len(audit.steps)} in full", [Node(_line(one), _files(one)) for one in reversed(last)])


def _made_alike(stages: Sequence[StageRecord]) -> tuple[str, ...]:
    return tuple(sorted({_made(one) for one in stages}))


def _made(one: StageRecord) -> str:
    image = f", image {one.image}" if one.image else ""
    return f"submission {one.epoch}, code {one.code_revision or 'unknown'}{image}, {one.device}"


def _line(one: StageRecord) -> str:
    score = "" if one.score is None else f", mean reward {one.score:.4g}"
    version = f", policy version {one.policy_version}" if one.policy_version is not None else ""
    return f"step {one.step} {one.stage}{version}{score}, manifest {one.manifest_sha256[:_SHORT]}"


def _files(one: StageRecord) -> list[Node]:
    read = f"reads {', '.join(f'{role} {digest[:_SHORT]}' for role, digest in sorted(one.inputs.items()))}"
    return _leaves(read if one.inputs else "", *_written(one))


def _written(one: StageRecord) -> Iterator[str]:
    for role, output in sorted(one.outputs.items()):
        size = f"{output.rows} rows" if output.rows is not None else f"{output.files} files"
        yield f"writes {role} {output.digest[:_SHORT]}: {size}, {readable(output.bytes)}"


def _stage_leaves(one: StageRecord, run: str) -> list[Node]:
    folders = dict.fromkeys(f"in {run}/{output.folder}" for output in one.outputs.values())
    done = f"{_made(one)}, {_when(one.ended)}"
    return [Node(f"manifest {one.manifest_sha256[:_SHORT]}"), *_files(one), *_leaves(*folders, done)]


def _prompts(data: Data, run: str) -> Node:
    rows = f"the rows of {data.source or 'a source that is not known'}, digest {data.source_digest[:_SHORT]}"
    node = Node(f"{data.split} {' and '.join(data.prompts.outputs)}", _stage_leaves(data.prompts, run))
    node.below.append(Node(f"made from {rows}", _leaves(f"row 12, counted from 0, is {data.split}-0000012")))
    return node


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
