"""Held-out accuracy of one policy version, with its confidence interval."""

from typing import Any

from ratchet.algorithms.statistics import wilson_interval
from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.order import sample_seed
from ratchet.data.parquet import read_table, table_from_rows, write_table
from ratchet.errors import ConfigError
from ratchet.stages.base import Context, Input, Result, Stage
from ratchet.stages.reward import REWARD_KEYS, grade_row, grade_rows, reward_sources
from ratchet.stages.settings import validation_params
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.tracking.work import VAL_TOKENS


class Evaluate(Stage):
    """Sample the held-out prompts with the validation settings and grade them. Step k evaluates policy version k."""

    name = "evaluate"
    timing = "testing"
    config_keys = (
        "data.max_response_length",
        "actor_rollout_ref.rollout.name",
        "actor_rollout_ref.rollout.dtype",
        "actor_rollout_ref.rollout.val_kwargs",
        *REWARD_KEYS,
        "trainer.seed",
    )

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        if not config.data.val_files:
            raise ConfigError("data.val_files is not set: there are no held-out prompts to evaluate on")
        return {
            "prompts": Input(run.require("preprocess/val", None), "prompts"),
            "policy": Input(run.require(POLICY_UPDATE, step), "policy"),
        }

    def outside_inputs(self, config: RunConfig) -> dict[str, str] | None:
        return reward_sources(config)

    def compute(self, context: Context) -> Result:
        from ratchet.engines.model import chat_prompts_ids
        from ratchet.engines.sampler import SampleRequest

        step, config = context.step, context.config
        assert step is not None
        prompts = read_table(context.run.store, context.inputs["prompts"].artifact, schemas.PROMPTS).to_pylist()
        tokenizer = context.residents.tokenizer()
        samples = [
            (prompt, sample_index, token_ids)
            for prompt, token_ids in zip(
                prompts, chat_prompts_ids(tokenizer, [prompt["prompt"] for prompt in prompts]), strict=True
            )
            for sample_index in range(config.actor_rollout_ref.rollout.val_kwargs.n)
        ]
        # The seed leaves the step out: every policy version meets the same noise.
        requests = [
            SampleRequest(token_ids, sample_seed(config.trainer.seed, 0, prompt["prompt_id"], sample_index))
            for prompt, sample_index, token_ids in samples
        ]
        sampler = context.residents.sampler(context.inputs["policy"])
        completions = sampler.sample(requests, validation_params(config))
        rows: list[dict[str, Any]] = [
            {
                "prompt_id": prompt["prompt_id"],
                "sample_index": sample_index,
                "data_source": prompt["data_source"],
                "prompt_token_ids": token_ids,
                "completion_token_ids": completion.token_ids,
                "completion": completion.text,
                "finish_reason": completion.finish_reason,
            }
            for (prompt, sample_index, token_ids), completion in zip(samples, completions, strict=True)
        ]
        wanted = [
            grade_row(prompt, row, where=f"prompt {row['prompt_id']}, sample {row['sample_index']}")
            for (prompt, _, _), row in zip(samples, rows, strict=True)
        ]
        for row, graded in zip(rows, grade_rows(context, wanted, shaping=False), strict=True):
            row |= {"reward": graded.reward, "extracted": graded.extracted, "is_parseable": graded.is_parseable}
        artifact = write_table(
            context.store, f"{context.folder}/evaluations", table_from_rows(rows, schemas.EVALUATIONS)
        )
        num_tokens = sum(len(row[f"{part}_token_ids"]) for row in rows for part in ("prompt", "completion"))
        metrics = accuracy_metrics(rows) | {VAL_TOKENS: float(num_tokens)}
        return Result(outputs={"evaluations": artifact}, policy_version=step, metrics=metrics)


def accuracy_metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean reward of each data source under verl's names, with a 95% interval over prompts (rewards in [0, 1])."""
    metrics: dict[str, float] = {}
    for source in sorted({row["data_source"] for row in rows}):
        by_prompt: dict[str, list[float]] = {}
        for row in rows:
            if row["data_source"] == source:
                by_prompt.setdefault(row["prompt_id"], []).append(row["reward"])
        samples = max(len(values) for values in by_prompt.values())
        means = [sum(values) / len(values) for values in by_prompt.values()]
        metrics[f"val-core/{source}/acc/mean@{samples}"] = sum(means) / len(means)
        metrics[f"val-aux/{source}/parseable_ratio"] = sum(
            row["is_parseable"] for row in rows if row["data_source"] == source
        ) / sum(row["data_source"] == source for row in rows)
        if all(0 <= value <= 1 for value in means):
            low, high = wilson_interval(sum(means), len(means))
            metrics[f"val-aux/{source}/acc/ci95_low@{samples}"] = low
            metrics[f"val-aux/{source}/acc/ci95_high@{samples}"] = high
    return metrics
