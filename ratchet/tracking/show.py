"""A run as lines of text, read from its chain of manifests alone."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from ratchet.data import schemas
from ratchet.data.join import align
from ratchet.data.parquet import read_table
from ratchet.errors import NotCommittedError
from ratchet.store.manifest import Manifest
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.store.status import read_statuses
from ratchet.tracking.cost import Prices, before_steps, cost, prices_of
from ratchet.tracking.metrics import step_line
from ratchet.tracking.show_cost import cost_lines
from ratchet.tracking.work import Work


def step_lines(run: Run, *, as_json: bool = False) -> Iterator[str]:
    """Yield a line for each step that has committed something, with the metrics of all its stages."""
    for step, manifests in _steps(run):
        yield from _line(step, manifests, as_json)


def run_lines(run: Run, given: Prices, *, as_json: bool = False) -> Iterator[str]:
    """Yield `step_lines`, and then what the run used and cost, at its own prices and at those that are `given`.

    As JSON, that is a last object {"cost": ...}.
    """
    works = [Work.of(manifest) for manifest in before_steps(run)]
    for step, manifests in _steps(run):
        works += [Work.of(manifest) for manifest in manifests]
        yield from _line(step, manifests, as_json)
    newest = next(run.submissions(), {})
    found = cost(works, prices_of(newest.get("config") or {}, given), read_statuses(run.store))
    if as_json:
        yield json.dumps({"cost": asdict(found)})
    else:
        yield from ["", *cost_lines(found)]


def _steps(run: Run) -> Iterator[tuple[int, list[Manifest]]]:
    return ((step, run.step_manifests(step)) for step in run.steps())


def _line(step: int, manifests: Sequence[Manifest], as_json: bool) -> Iterator[str]:
    metrics: dict[str, float] = {}
    for manifest in manifests:
        metrics |= manifest.provenance.metrics
    stages = [manifest.content.stage for manifest in manifests]
    if as_json:
        yield json.dumps({"step": step, "stages": stages, "metrics": metrics})
    elif manifests:
        yield step_line(step, metrics) if metrics else f"step: {step} | {', '.join(stages)}"


def completion_lines(run: Run, step: int) -> Iterator[str]:
    """Yield the best and the worst graded completion of a step, by the ids that `ratchet sample` takes."""
    graded = graded_completions(run, step)
    best, worst = max(graded, key=lambda row: row["reward"]), min(graded, key=lambda row: row["reward"])
    for title, row in (("best", best), ("worst", worst)):
        place = f"{row['group_id']}/{row['sample_index']}"
        yield f"{title}: {place}, reward {row['reward']:g}, answer {row['extracted']}"
        yield from (f"  {line}" for line in row["completion"].splitlines() or [""])


def graded_completions(run: Run, step: int) -> list[dict[str, Any]]:
    """Return the step's rollouts that were graded, each with its reward's columns, without its tokens and log-probs."""
    if run.manifest("rollout", step) is None:
        raise no_rollouts(run, step)
    rollouts = read_table(run.store, run.require("rollout", step).output("rollouts"), schemas.ROLLOUTS)
    rewards = read_table(run.store, run.require("reward", step).output("rewards"), schemas.REWARDS)
    words = rollouts.drop_columns([field.name for field in rollouts.schema if pa.types.is_list(field.type)])
    rows = align(rollouts, rewards, "rewards")
    pairs = zip(words.to_pylist(), rows, strict=True)
    return [rollout | reward for rollout, reward in pairs if reward["reward"] is not None]


def no_rollouts(run: Run, step: int) -> NotCommittedError:
    """Return the error that says why there are no completions of a step."""
    update = run.manifest(POLICY_UPDATE, step)
    if update is not None and "examples" in update.content.inputs:
        return NotCommittedError(
            f"run {run.uri} learns from examples and samples nothing: there are no completions of step {step} to "
            f"show; ratchet show {run.uri} shows its metrics"
        )
    return NotCommittedError(f"run {run.uri} has no committed rollouts of step {step}")
