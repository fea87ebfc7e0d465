"""How much a run does: its steps, the tokens of each, and the tasks and pods of its pipeline."""

from dataclasses import dataclass

import numpy as np

from ratchet.config import RunConfig
from ratchet.grains.loop import MAX_SEGMENTS, MAX_STEPS_AT_STAGE_GRAIN
from ratchet.grains.plan.facts import Facts

POD_SECONDS = 10.0
"""Of a pod beside its work, on an untouched controller of Argo (docs/operations.md, "Seconds of pods")."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Tokens of a whole run. What is expected is None where nothing says how long completions are."""

    prompt: int
    """Of the prompts, once for each completion that is trained on; exact."""
    completion_bound: int
    completion_expected: float | None
    evaluated_rows: int
    """Completions, or examples, of all evaluations."""
    evaluated_bound: int
    """Prompt and completion tokens of evaluations."""
    evaluated_expected: float | None
    rows: int
    """Completions, or examples, that are trained on."""
    longest_step: int
    """The step that has the most tokens."""

    @property
    def trained_bound(self) -> int:
        """`perf/total_num_tokens` of all steps, at most."""
        return self.prompt + self.completion_bound

    @property
    def trained_expected(self) -> float | None:
        """The same, as it is expected."""
        return None if self.completion_expected is None else self.prompt + self.completion_expected


@dataclass(frozen=True, kw_only=True, slots=True)
class Tasks:
    """What the pipeline starts; a task is two pods, its driver and itself."""

    iterations: int
    """Of the loop: segments or steps."""
    per_iteration: int
    total: int
    """Tasks of a whole run in one pipeline run."""
    pods: int
    """Of them, with the drivers of tasks, loops and nested pipelines."""
    overhead_seconds: float
    """Time that passes beside the work: pods one after another, at `POD_SECONDS` each."""
    most_iterations: int
    """That one pipeline run may have."""


def evaluations(config: RunConfig, steps: int) -> list[int]:
    """Return the steps whose policy is evaluated; 0 is version 0."""
    trainer = config.trainer
    if not config.data.val_files:
        return []
    between = range(trainer.test_freq, steps + 1, trainer.test_freq) if trainer.test_freq > 0 else ()
    return sorted({*([0] if trainer.val_before_train else []), *between, steps})


def count_tokens(config: RunConfig, facts: Facts, steps: int, mean_completion: float | None) -> Tokens:
    """Add the tokens of all steps up; `mean_completion` is tokens of a completion, where that is known."""
    group = 1 if config.is_offline else config.actor_rollout_ref.rollout.n
    limit = config.data.max_response_length
    mean = float(limit) if config.actor_rollout_ref.rollout.ignore_eos else mean_completion
    prompt = completions = rows = 0
    longest, most = 1, -1
    train = facts.train
    for step in range(1, steps + 1):
        positions = facts.positions(config, step)
        of_prompts = int(train.prompts[positions].sum()) * group * train.sides
        of_completions = len(positions) * group * limit
        if train.completions is not None:
            of_completions = int(train.completions[positions].sum())
        prompt, completions, rows = prompt + of_prompts, completions + of_completions, rows + len(positions) * group
        if of_prompts + of_completions > most:
            longest, most = step, of_prompts + of_completions
    expected = float(completions) if train.completions is not None else None if mean is None else mean * rows
    num_evaluated, evaluated = _evaluated(config, facts, steps)
    of_val = evaluated + num_evaluated * limit
    evaluated_expected = None if mean is None else evaluated + num_evaluated * mean
    if config.is_offline:
        of_val, evaluated_expected = evaluated, float(evaluated)
    return Tokens(
        prompt=prompt,
        completion_bound=completions,
        completion_expected=expected,
        evaluated_rows=num_evaluated,
        evaluated_bound=of_val,
        evaluated_expected=evaluated_expected if num_evaluated else 0.0,
        rows=rows,
        longest_step=longest,
    )


def count_tasks(config: RunConfig, steps: int) -> Tasks:
    """Count the tasks and pods of a run that begins at its first step."""
    grain = config.trainer.grain
    if grain == "stage":
        # rollout, reward beside scores, advantage, [critic_update], policy_update; of examples scores and update.
        chain = 2 if config.is_offline else 4 + config.critic_is_needed
        per_iteration, iterations, most = chain + (not config.is_offline), steps, MAX_STEPS_AT_STAGE_GRAIN
    else:
        size = config.trainer.steps_per_segment if grain == "segment" else 1
        chain, per_iteration, iterations, most = 1, 1, -(-steps // size), MAX_SEGMENTS
    before = 4 if grain == "stage" else 3
    after = 3
    # Drivers of the pipeline, the condition, the loop, each iteration and what is nested in it, and the ending.
    outer = 3 + (grain == "stage") + 1
    chained = 2 * before + 2 * after + outer + iterations * (2 + 2 * chain)
    total = before + iterations * per_iteration + after
    return Tasks(
        iterations=iterations,
        per_iteration=per_iteration,
        total=total,
        pods=2 * total + outer + 2 * iterations,
        overhead_seconds=POD_SECONDS * chained,
        most_iterations=most,
    )


def _evaluated(config: RunConfig, facts: Facts, steps: int) -> tuple[int, int]:
    """Return the completions of all evaluations, and the prompt tokens of these; of examples all tokens."""
    count = len(evaluations(config, steps))
    if not count:
        return 0, 0
    val = facts.splits["val"]
    if val.completions is not None:
        return count * len(val.ids), count * int(np.sum(val.prompts * val.sides + val.completions))
    samples = config.actor_rollout_ref.rollout.val_kwargs.n
    return count * samples * len(val.ids), count * samples * int(val.prompts.sum())
