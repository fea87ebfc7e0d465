"""The completions of a report: the best, the worst, the most improved, and those in which no answer could be read.

Traps: reading every table of a long run would take minutes, so a few steps stand for it; and a prompt seldom comes
twice in training, so that what improved is told by held-out prompts where these were evaluated twice.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa

from ratchet.data import schemas
from ratchet.data.parquet import read_table
from ratchet.store.run import Run
from ratchet.tracking.show import graded_completions

STEPS_READ = 6
"""Whose rollouts are read."""
EXAMPLES = 3
"""Completions of each kind."""
_READERS = 6
_EVALUATION = ["prompt_id", "sample_index", "completion", "finish_reason", "reward", "extracted", "is_parseable"]

Row = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One completion with its reward.

    Example: Example(step=12, name="train-0000007, sample 3", prompt="Ann has ..", completion="#### 3", reward=0.0,
    parts={"gsm8k": 0.0}, extracted="3", wanted="5", finish_reason="stop", error="").
    """

    step: int
    name: str
    """Prompt and sample, as the tables name them."""
    prompt: str
    completion: str
    reward: float
    parts: dict[str, float]
    """Reward's parts by name, where there are several."""
    extracted: str | None
    wanted: str
    """Ground truth; empty where there is none."""
    finish_reason: str
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Improved:
    """A prompt before and after training on it, or of the same kind."""

    before: Example
    """Its worst completion at the earlier step."""
    after: Example
    """Its best one at the later step."""
    was: float
    """Mean reward of its completions at the earlier step."""
    now: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreadable:
    """Completions of one step in which no answer could be read."""

    step: int
    count: int
    total: int
    cut: int
    """Those among them that ended at the longest length allowed."""
    errors: dict[str, int]
    """What graders said -> how often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """What is shown of a run's completions."""

    steps: list[int] = field(default_factory=list)
    """Whose rollouts were read."""
    best: list[Example] = field(default_factory=list)
    worst: list[Example] = field(default_factory=list)
    improved: list[Improved] = field(default_factory=list)
    improved_of: str = ""
    """What `improved` compares, in words."""
    unreadable: list[Unreadable] = field(default_factory=list)
    unreadable_examples: list[Example] = field(default_factory=list)


def evenly(found: Sequence[T], most: int) -> list[T]:
    """Return at most `most` (2 or more) of what is found, the first and the last among them, evenly spread."""
    if len(found) <= most:
        return list(found)
    return [found[round(place * (len(found) - 1) / (most - 1))] for place in range(most)]


def read_examples(run: Run, graded: Sequence[int], evaluated: Sequence[int]) -> Examples:
    """Read what is to be shown. `graded` are the steps with rewards, `evaluated` those with an evaluation, in order."""
    steps = evenly(graded, STEPS_READ)
    evaluations = [evaluated[0], evaluated[-1]] if len(evaluated) > 1 else []
    with ThreadPoolExecutor(_READERS) as pool:
        tables = pool.map(lambda step: graded_rows(run, step), steps)
        measured = pool.map(lambda step: evaluated_rows(run, step), evaluations)
        rows = dict(zip(steps, tables, strict=True))
        held_out = dict(zip(evaluations, measured, strict=True))
    train, val = Prompts(run, "train"), Prompts(run, "val")
    last = rows[steps[-1]] if steps else []
    # Of rewards that are not finite neither best nor worst can be said.
    ranked = sorted((row for row in last if math.isfinite(row["reward"])), key=lambda row: (-row["reward"], _key(row)))
    best = _of_different_prompts(ranked)
    worst = [row for row in _of_different_prompts(ranked[::-1]) if row not in best]
    improved, of = _most_improved(held_out), "held-out prompts"
    prompts = val
    if not improved:
        improved, of, prompts = _most_improved(rows), "training prompts that both steps sampled", train
    failed = [row for row in last if not row["is_parseable"]]
    return Examples(
        steps=steps,
        best=[train.example(row) for row in best],
        worst=[train.example(row) for row in worst],
        improved=[
            Improved(before=prompts.example(before), after=prompts.example(after), was=was, now=now)
            for before, after, was, now in improved
        ],
        improved_of=of,
        unreadable=[_unreadable(step, table) for step, table in rows.items()],
        unreadable_examples=[train.example(row) for row in _of_different_prompts(failed)],
    )


class Prompts:
    """What was asked, looked up when it is shown; empty where the table of prompts has more than `most_bytes`."""

    def __init__(self, run: Run, split: str, *, most_bytes: float = math.inf) -> None:
        self._run, self._split, self._most_bytes = run, split, most_bytes
        self._table: pa.Table | None = None

    def example(self, row: Mapping[str, Any]) -> Example:
        asked = self._row(row["prompt_id"])
        parts = dict(row.get("reward_breakdown") or ())
        return Example(
            step=row["step"],
            name=f"{row['prompt_id']}, sample {row['sample_index']}",
            prompt="\n\n".join(message["content"] for message in asked.get("prompt") or ()),
            completion=row["completion"],
            reward=row["reward"],
            parts=parts if len(parts) > 1 else {},
            extracted=row["extracted"],
            wanted=(asked.get("reward_model") or {}).get("ground_truth") or "",
            finish_reason=row["finish_reason"],
            error=row.get("error") or "",
        )

    def _row(self, prompt_id: str) -> Row:
        if self._table is None:
            manifest = self._run.require(f"preprocess/{self._split}", None)
            prompts = manifest.output("prompts")
            is_small = sum(entry.bytes for entry in prompts.files) <= self._most_bytes
            self._table = (
                read_table(self._run.store, prompts, schemas.PROMPTS) if is_small else schemas.PROMPTS.empty_table()
            )
        place = self._table["prompt_id"].index(prompt_id).as_py()
        return {} if place < 0 else dict(self._table.slice(place, 1).to_pylist()[0])


def graded_rows(run: Run, step: int) -> list[Row]:
    """Return the step's completions that were graded, each with its reward's columns."""
    return [{**row, "step": step} for row in graded_completions(run, step)]


def evaluated_rows(run: Run, step: int) -> list[Row]:
    """Return the held-out completions that the step's evaluation sampled, each with its reward."""
    table = read_table(run.store, run.require("evaluate", step).output("evaluations"), schemas.EVALUATIONS)
    return [{**row, "step": step} for row in table.select(_EVALUATION).to_pylist()]


def _key(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["prompt_id"], row["sample_index"]


def _of_different_prompts(rows: Sequence[Row]) -> list[Row]:
    """Return the first rows, one a prompt; then of any, where there are fewer prompts."""
    firsts = {row["prompt_id"]: row for row in reversed(rows)}
    leaders = [row for row in rows if firsts[row["prompt_id"]] is row]
    return (leaders + [row for row in rows if firsts[row["prompt_id"]] is not row])[:EXAMPLES]


def _most_improved(rows: Mapping[int, Sequence[Row]]) -> list[tuple[Row, Row, float, float]]:
    """Return (worst row before, best row after, mean before, mean after) of the prompts that gained most.

    Each prompt is compared at the first and the last of the steps that hold it.
    """
    by_prompt: dict[str, dict[int, list[Row]]] = {}
    for step in sorted(rows):
        for row in rows[step]:
            by_prompt.setdefault(row["prompt_id"], {}).setdefault(step, []).append(row)
    found = []
    for prompt_id, steps in by_prompt.items():
        before, after = steps[min(steps)], steps[max(steps)]
        was, now = _mean(before), _mean(after)
        if now > was:
            worst = min(before, key=lambda row: (row["reward"], row["sample_index"]))
            best = max(after, key=lambda row: (row["reward"], -row["sample_index"]))
            found.append((now - was, prompt_id, (worst, best, was, now)))
    found.sort(key=lambda one: (-one[0], one[1]))
    return [one[2] for one in found[:EXAMPLES]]


def _mean(rows: Sequence[Row]) -> float:
    return math.fsum(row["reward"] for row in rows) / len(rows)


def _unreadable(step: int, rows: Sequence[Row]) -> Unreadable:
    failed = [row for row in rows if not row["is_parseable"]]
    errors: dict[str, int] = {}
    for row in rows:
        if row["error"]:
            errors[row["error"]] = errors.get(row["error"], 0) + 1
    return Unreadable(
        step=step,
        count=len(failed),
        total=len(rows),
        cut=sum(row["finish_reason"] == "length" for row in failed),
        errors=dict(sorted(errors.items(), key=lambda item: (-item[1], item[0]))[:EXAMPLES]),
    )
