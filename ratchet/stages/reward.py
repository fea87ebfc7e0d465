"""Grade every completion of the step, one reward each, joined by key."""

import json
import math
from typing import Any

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.join import prompts_by_id
from ratchet.data.parquet import read_table, table_from_rows, write_table
from ratchet.errors import DataError, NumericsError
from ratchet.rewards.registry import RewardResult, reward_for
from ratchet.stages.base import Context, Input, Result, Stage, step_inputs
from ratchet.store.run import Run
from ratchet.tracking.metrics import summary


class Reward(Stage):
    """Grade rollouts by their prompt's data source. An unparseable answer is told apart from a wrong one."""

    name = "reward"
    timing = "reward"
    config_keys = ("reward_model",)

    def needs(self, config: RunConfig) -> tuple[str, ...]:
        return ("rollout",)

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        return {
            "prompts": Input(run.require("preprocess/train", None), "prompts"),
            **step_inputs(run, self.needs(config), step),
        }

    def compute(self, context: Context) -> Result:
        store = context.run.store
        rollouts = read_table(store, context.inputs["rollouts"].artifact, schemas.ROLLOUTS)
        columns = ["group_id", "sample_index", "prompt_id", "completion"]
        samples = rollouts.select(columns).to_pylist()
        prompts = read_table(store, context.inputs["prompts"].artifact, schemas.PROMPTS)
        by_id = prompts_by_id(prompts, [sample["prompt_id"] for sample in samples])
        rows = []
        for sample in samples:
            where = f"rollout {sample['group_id']}, sample {sample['sample_index']}"
            graded = grade(by_id[sample["prompt_id"]], sample["completion"], context.config, where=where)
            rows.append(
                {
                    "group_id": sample["group_id"],
                    "sample_index": sample["sample_index"],
                    "reward": graded.reward,
                    "reward_breakdown": sorted(graded.breakdown.items()),
                    "extracted": graded.extracted,
                    "is_parseable": graded.is_parseable,
                    "error": None,
                }
            )
        artifact = write_table(context.store, f"{context.folder}/rewards", table_from_rows(rows, schemas.REWARDS))
        metrics = {
            **summary("critic/score", [row["reward"] for row in rows]),
            "reward/parseable_ratio": sum(row["is_parseable"] for row in rows) / len(rows),
        }
        return Result(outputs={"rewards": artifact}, metrics=metrics)


def grade(prompt: dict[str, Any], completion: str, config: RunConfig, *, where: str) -> RewardResult:
    """Grade one completion; an error names `where`. A reward that is not finite is a NumericsError."""
    ground_truth = prompt["reward_model"]["ground_truth"]
    if ground_truth is None:
        raise DataError(f"{where}: prompt {prompt['prompt_id']} has no reward_model.ground_truth to grade against")
    try:
        function = reward_for(prompt["data_source"], gsm8k_mode=config.reward_model.gsm8k_mode)
        graded = function(prompt["data_source"], completion, ground_truth, json.loads(prompt["extra_info"]))
    except (DataError, NumericsError) as error:
        raise type(error)(f"{where}: {error}") from error
    if not math.isfinite(graded.reward):
        raise NumericsError(f"{where}: the reward is {graded.reward}, expected a finite number")
    return graded
