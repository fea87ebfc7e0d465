"""A run as lines of text, read from its chain of manifests alone."""

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from ratchet.data import schemas
from ratchet.data.join import align
from ratchet.data.parquet import read_table
from ratchet.errors import NotCommittedError
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.tracking.metrics import step_line


def step_lines(run: Run, *, as_json: bool = False) -> Iterator[str]:
    """Yield a line for each step that has committed something, with the metrics of all its stages."""
    for step in run.steps():
        manifests = run.step_manifests(step)
        metrics: dict[str, float] = {}
        for manifest in manifests:
            metrics |= manifest.provenance.metrics
        stages = [manifest.content.stage for manifest in manifests]
        if as_json:
            yield json.dumps({"step": step, "stages": stages, "metrics": metrics})
        elif manifests:
            yield step_line(step, metrics) if metrics else f"step: {step} | {', '.join(stages)}"


def completion_lines(run: Run, step: int) -> Iterator[str]:
    """Yield the best and the worst graded completion of a step."""
    graded = graded_completions(run, step)
    best, worst = max(graded, key=lambda row: row["reward"]), min(graded, key=lambda row: row["reward"])
    for title, row in (("best", best), ("worst", worst)):
        place = f"{row['group_id']} sample {row['sample_index']}"
        yield f"{title}: {place}, reward {row['reward']:g}, answer {row['extracted']}"
        yield from (f"  {line}" for line in row["completion"].splitlines() or [""])


def graded_completions(run: Run, step: int) -> list[dict[str, Any]]:
    """Return the step's rollouts that were graded, each with its reward's columns, without its tokens and log-probs."""
    if run.manifest("rollout", step) is None:
        update = run.manifest(POLICY_UPDATE, step)
        if update is not None and "examples" in update.content.inputs:
            raise NotCommittedError(
                f"run {run.uri} learns from examples and samples nothing: there are no completions of step {step} to "
                f"show; ratchet show {run.uri} shows its metrics"
            )
        raise NotCommittedError(f"run {run.uri} has no committed rollouts of step {step}")
    rollouts = read_table(run.store, run.require("rollout", step).output("rollouts"), schemas.ROLLOUTS)
    rewards = read_table(run.store, run.require("reward", step).output("rewards"), schemas.REWARDS)
    words = rollouts.drop_columns([field.name for field in rollouts.schema if pa.types.is_list(field.type)])
    rows = align(rollouts, rewards, "rewards")
    pairs = zip(words.to_pylist(), rows, strict=True)
    return [rollout | reward for rollout, reward in pairs if reward["reward"] is not None]
