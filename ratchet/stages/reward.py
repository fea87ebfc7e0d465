"""Grade every completion of the step, one reward each, joined by key."""

import json
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.join import prompts_by_id
from ratchet.data.parquet import read_table, table_from_rows, write_table
from ratchet.stages.base import Context, Input, Result, Stage, optional_inputs, step_inputs
from ratchet.stages.base_models import model_digest
from ratchet.stages.run_tables import run_table
from ratchet.store.run import Run
from ratchet.tracking.metrics import summary

if TYPE_CHECKING:
    from ratchet.rewards.graders import GradeRow, RewardResult


@cache
def _reward_model_digest(path: str) -> str | None:
    # Once a process: a model has gigabytes, and every step asks.
    return model_digest(path)


def reward_sources(config: RunConfig) -> dict[str, str] | None:
    """Return the outside inputs of every stage that grades: the reward model, where there is one."""
    if "model" not in config.reward_weights:
        return {}
    digest = _reward_model_digest(config.reward_model.path)
    return None if digest is None else {"reward_model": digest}


REWARD_KEYS = ("reward_model", "custom_reward_function", "code")
"""Config keys that a reward depends on."""
_GRADED = [
    *schemas.ROLLOUT_KEY,
    *("prompt_id", "prompt_token_ids", "completion_token_ids", "completion", "finish_reason"),
]
"""Columns of a rollout that are read here."""


class Reward(Stage):
    """Grade rollouts. An unparseable answer is told apart from a wrong one."""

    name = "reward"
    timing = "reward"
    config_keys = REWARD_KEYS

    def keys(self, config: RunConfig) -> tuple[str, ...]:
        from ratchet.rewards.shaping import is_penalised_by_length

        # Penalties on length end at the limit.
        is_penalised = is_penalised_by_length(config)
        return (*self.config_keys, "data.max_response_length") if is_penalised else self.config_keys

    def needs(self, config: RunConfig) -> tuple[str, ...]:
        return ("rollout",)

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        return {
            "prompts": Input(run.require("preprocess/train", None), "prompts"),
            **step_inputs(run, self.needs(config), step),
            **optional_inputs(run, "rollout", step, ("greedy_rollouts", "graded", "graded_tokens")),
        }

    def outside_inputs(self, config: RunConfig) -> dict[str, str] | None:
        return reward_sources(config)

    def compute(self, context: Context) -> Result:
        store, inputs = context.run.store, context.inputs
        if "graded" in inputs:
            # Sampling in rounds had to grade what it sampled.
            table, per_token = read_table(store, inputs["graded"].artifact, schemas.REWARDS), None
            if "graded_tokens" in inputs:
                per_token = read_table(store, inputs["graded_tokens"].artifact, schemas.TOKEN_REWARDS)
        else:
            samples = read_table(store, inputs["rollouts"].artifact, schemas.ROLLOUTS)
            table, per_token = grade_samples(context, _prompts(context), samples)
            check_any_graded([table])
        outputs = {"rewards": write_table(context.store, f"{context.folder}/rewards", table)}
        if per_token is not None:
            outputs["token_rewards"] = write_table(context.store, f"{context.folder}/token_rewards", per_token)
        if "greedy_rollouts" in inputs:
            greedy_samples = read_table(store, inputs["greedy_rollouts"].artifact, schemas.ROLLOUTS)
            greedy, _ = grade_samples(context, _prompts(context), greedy_samples)
            # Without one of these no group has what it is compared with.
            check_any_graded([greedy])
            outputs["greedy_rewards"] = write_table(context.store, f"{context.folder}/greedy_rewards", greedy)
        metrics = _metrics(table)
        if context.config.reward_model.on_failure == "exclude":
            metrics["reward/excluded_ratio"] = table["reward"].null_count / table.num_rows
        return Result(outputs=outputs, metrics=metrics)


def _prompts(context: Context) -> pa.Table:
    return run_table(context.run.store, context.inputs["prompts"].artifact, schemas.PROMPTS)


def check_any_graded(tables: Sequence[pa.Table]) -> None:
    """EngineError where all of these rewards together hold none: a step without one would teach nothing."""
    num_rows = sum(table.num_rows for table in tables)
    num_failed = sum(table["reward"].null_count for table in tables)
    if num_rows and num_failed == num_rows:
        from ratchet.rewards.graders import ungraded_error

        first = next(table for table in tables if table.num_rows).slice(0, 1).to_pylist()[0]
        raise ungraded_error(num_failed, num_rows, f"{_place(first)}: {first['error']}")


def _place(row: dict[str, Any]) -> str:
    return f"rollout {row['group_id']}, sample {row['sample_index']}"


def grade_samples(context: Context, prompts: pa.Table, samples: pa.Table) -> tuple[pa.Table, pa.Table | None]:
    """Grade a table of rollouts: the table of their rewards, and of token rewards where the reward gives them."""
    rows = samples.select(_GRADED).to_pylist()
    by_id = prompts_by_id(prompts, [row["prompt_id"] for row in rows])
    graded = grade_rows(
        context,
        [grade_row(by_id[row["prompt_id"]], row, where=_place(row)) for row in rows],
    )
    keys = [{name: row[name] for name in schemas.ROLLOUT_KEY} for row in rows]
    table = table_from_rows(
        [
            key
            | {
                # Without one it is no reward of 0: the completion was not graded.
                "reward": None if result.is_failed else result.reward,
                "reward_breakdown": sorted(result.breakdown.items()),
                "extracted": result.extracted,
                "is_parseable": result.is_parseable,
                "error": result.error,
            }
            for key, result in zip(keys, graded, strict=True)
        ],
        schemas.REWARDS,
    )
    if all(result.token_rewards is None for result in graded):
        return table, None
    per_token = [key | {"token_rewards": result.token_rewards} for key, result in zip(keys, graded, strict=True)]
    return table, table_from_rows(per_token, schemas.TOKEN_REWARDS)


def grade_row(prompt: dict[str, Any], sample: dict[str, Any], *, where: str) -> "GradeRow":
    """Return what a grader is given: a prompt's row and a sample's; `where` names the sample in messages."""
    from ratchet.rewards.graders import GradeRow

    return GradeRow(
        where=where,
        data_source=prompt["data_source"],
        prompt=prompt["prompt"],
        ground_truth=prompt["reward_model"]["ground_truth"],
        extra_info=json.loads(prompt["extra_info"]),
        completion=sample["completion"],
        prompt_token_ids=sample["prompt_token_ids"],
        completion_token_ids=sample["completion_token_ids"],
        finish_reason=sample["finish_reason"],
    )


def grade_rows(context: Context, rows: "Sequence[GradeRow]", *, shaping: bool = True) -> "list[RewardResult]":
    """Grade with the config's reward, which stays open between the steps of a process.

    `shaping=False` leaves out what only steers training: the penalty on length.
    """
    return context.residents.grader().grade(rows, shaping=shaping)


def _metrics(table: pa.Table) -> dict[str, float]:
    """Summaries over the completions that were graded."""
    table = table.filter(pc.is_valid(table["reward"]))
    rewards, parseable = table["reward"].to_pylist(), table["is_parseable"].to_pylist()
    parts: dict[str, list[float]] = {}
    for breakdown in table["reward_breakdown"].to_pylist():
        for name, value in breakdown or ():
            parts.setdefault(name, []).append(value)
    several = {name: values for name, values in parts.items() if len(parts) > 1}
    return {
        **summary("critic/score", rewards),
        "reward/parseable_ratio": sum(parseable) / len(parseable),
        **{f"reward/{name}/mean": sum(values) / len(values) for name, values in several.items()},
    }
