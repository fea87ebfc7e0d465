"""Held-out loss of one policy version under an offline objective, and how often it prefers what people chose.

Trap: what is measured is the published version, in the dtype that it is published in, and not the master weights that a
trainer may hold of it: so every grain measures the same.
"""

import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.parquet import read_table, table_from_rows, write_table
from ratchet.errors import ConfigError
from ratchet.stages.base import Context, Input, Result, Stage
from ratchet.stages.evaluate import Evaluate
from ratchet.stages.example_rows import examples_of, pair_rows, pair_sides, sft_rows
from ratchet.stages.settings import offline_settings, total_steps
from ratchet.store.run import POLICY_UPDATE, Run

TABLE = "evaluations_offline"


class EvaluateOffline(Stage):
    """Score the held-out examples, without training on them. Step k evaluates policy version k."""

    name = Evaluate.name
    timing = Evaluate.timing
    config_keys = ("actor_rollout_ref.actor.fsdp_config.dtype", "algorithm.objective", "algorithm.dpo")

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        if not config.data.val_files:
            raise ConfigError("data.val_files is not set: there are no held-out examples to evaluate on")
        found = {"examples": examples_of(run, "val"), "policy": Input(run.require(POLICY_UPDATE, step), "policy")}
        if config.reference_is_needed:
            found["reference"] = Input(run.require(POLICY_UPDATE, 0), "policy")
        return found

    def compute(self, context: Context) -> Result:
        assert context.step is not None
        examples = read_table(context.run.store, context.inputs["examples"].artifact, schemas.EXAMPLES)
        measured = _measure(context, examples)
        rows: list[dict[str, Any]] = [
            {
                **keys,
                "loss": one["loss"],
                "num_tokens": int(one["tokens"]),
                "margin": one.get("margin"),
                "accuracy": one.get("accuracy"),
            }
            for keys, one in zip(examples.select(["example_id", "data_source"]).to_pylist(), measured, strict=True)
        ]
        table = table_from_rows(rows, schemas.EVALUATIONS_OFFLINE)
        artifact = write_table(context.store, f"{context.folder}/{TABLE}", table)
        return Result(outputs={TABLE: artifact}, policy_version=context.step, metrics=held_out_metrics(rows))


def _measure(context: Context, examples: pa.Table) -> list[dict[str, float]]:
    """Loss of each example, and margin and accuracy of each pair."""
    from ratchet.engines.dpo_trainer import DPOSettings, dpo_outcomes
    from ratchet.engines.reward_trainer import bradley_terry_outcomes
    from ratchet.engines.sft_trainer import imitation_outcomes

    config, residents, policy = context.config, context.residents, context.inputs["policy"]
    if config.algorithm.objective == "reward_model":
        texts = [[*prompt, *completion] for prompt, completion in zip(*pair_sides(examples), strict=True)]
        return bradley_terry_outcomes(pair_rows(examples), residents.judge(policy).token_scores(texts))
    if config.algorithm.objective == "sft":
        rows = sft_rows(examples)
        prompts: list[Any] = [row.prompt_token_ids for row in rows]
        completions: list[Any] = [row.completion_token_ids for row in rows]
        return imitation_outcomes(rows, residents.scorer("policy", policy).log_probs(prompts, completions))
    sides = pair_sides(examples)
    reference: Sequence[Any] | None = None
    if config.reference_is_needed:
        reference = residents.scorer("reference", context.inputs["reference"]).log_probs(*sides)
    settings = offline_settings(config, total_steps(context.run, config))
    assert isinstance(settings, DPOSettings)
    log_probs = residents.scorer("policy", policy).log_probs(*sides)
    return dpo_outcomes(pair_rows(examples, reference), log_probs, settings)


def held_out_metrics(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means of each data source: of pairs over pairs; of SFT's loss over tokens, with its perplexity."""
    from ratchet.engines.sft_trainer import perplexity

    metrics: dict[str, float] = {}
    for source in sorted({row["data_source"] for row in rows}):
        found = [row for row in rows if row["data_source"] == source]
        prefix = f"val-core/{source}"
        if found[0]["accuracy"] is None:
            num_tokens = sum(row["num_tokens"] for row in found)
            loss = math.fsum(row["loss"] * row["num_tokens"] for row in found) / max(num_tokens, 1)
            metrics |= {f"{prefix}/loss": loss, f"{prefix}/perplexity": perplexity(loss)}
        else:
            for name in ("loss", "accuracy", "margin"):
                metrics[f"{prefix}/{name}"] = math.fsum(row[name] for row in found) / len(found)
    return metrics
