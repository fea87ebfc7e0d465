"""Draw a group of completions for every prompt of the step."""

from typing import Any

import pyarrow as pa

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.order import batch_positions, refill_positions, sample_seed
from ratchet.data.parquet import read_table, table_from_rows, write_table
from ratchet.errors import EngineError
from ratchet.stages.base import Context, Input, Result, Stage
from ratchet.stages.reward import REWARD_KEYS, reward_sources
from ratchet.stages.rounds import sample_in_rounds
from ratchet.stages.settings import greedy_params, sampling_params
from ratchet.store.manifest import Artifact
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.tracking.metrics import summary

GREEDY = -1
"""sample_index of the greedy completion that ReMax compares with."""


class Rollout(Stage):
    """Sample `n` completions a prompt from policy version step - 1. Committed rollouts are never sampled again."""

    name = "rollout"
    timing = "gen"
    config_keys = (
        "data.train_batch_size",
        "data.max_response_length",
        "data.shuffle",
        "actor_rollout_ref.rollout",
        "trainer.seed",
    )

    def keys(self, config: RunConfig) -> tuple[str, ...]:
        more: tuple[str, ...] = ()
        if config.algorithm.filter_groups.enable:
            more = ("algorithm.filter_groups", "algorithm.compat", *REWARD_KEYS)
        if "greedy_rewards" in config.advantage_needs:
            more = (*more, "algorithm.adv_estimator")
        return tuple(dict.fromkeys((*self.config_keys, *more)))

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        assert step is not None
        return {
            "prompts": Input(run.require("preprocess/train", None), "prompts"),
            "policy": Input(run.require(POLICY_UPDATE, step - 1), "policy"),
        }

    def outside_inputs(self, config: RunConfig) -> dict[str, str] | None:
        return reward_sources(config) if config.algorithm.filter_groups.enable else {}

    def compute(self, context: Context) -> Result:
        step, config = context.step, context.config
        assert step is not None
        prompts = read_table(context.run.store, context.inputs["prompts"].artifact, schemas.PROMPTS)
        prompt_ids: list[str] = prompts["prompt_id"].to_pylist()
        positions = batch_positions(
            step, prompt_ids, config.data.train_batch_size, seed=config.trainer.seed, shuffle=config.data.shuffle
        )
        outputs: dict[str, Artifact] = {}
        metrics: dict[str, float] = {}
        if config.algorithm.filter_groups.enable:
            spare = refill_positions(step, prompt_ids, positions, seed=config.trainer.seed)
            kept, metrics = sample_in_rounds(context, prompts, positions, spare, sample_groups)
            table = kept.rollouts
            outputs["graded"] = write_table(context.store, f"{context.folder}/graded", kept.rewards)
            if kept.token_rewards is not None:
                artifact = write_table(context.store, f"{context.folder}/graded_tokens", kept.token_rewards)
                outputs["graded_tokens"] = artifact
        else:
            table = sample_groups(context, prompts, positions)
        outputs["rollouts"] = write_table(context.store, f"{context.folder}/rollouts", table)
        if "greedy_rewards" in config.advantage_needs:
            # The prompts that are trained on, in the order of their groups.
            ids = dict.fromkeys(table["prompt_id"].to_pylist())
            place = {prompt_id: position for position, prompt_id in enumerate(prompt_ids)}
            greedy = sample_groups(context, prompts, [place[prompt_id] for prompt_id in ids], is_greedy=True)
            outputs["greedy_rollouts"] = write_table(context.store, f"{context.folder}/greedy_rollouts", greedy)
        return Result(outputs=outputs, policy_version=step - 1, metrics=_metrics(table) | metrics)


def sample_groups(context: Context, prompts: pa.Table, positions: list[int], *, is_greedy: bool = False) -> pa.Table:
    """Sample a group for each prompt at `positions`; one greedy completion each with `is_greedy`."""
    from ratchet.engines.model import chat_prompt_ids
    from ratchet.engines.sampler import SampleRequest

    step, config = context.step, context.config
    assert step is not None
    tokenizer = context.residents.tokenizer()
    rows: list[dict[str, Any]] = []
    for prompt in prompts.take(positions).to_pylist():
        token_ids = chat_prompt_ids(tokenizer, prompt["prompt"])
        for sample_index in [GREEDY] if is_greedy else range(config.actor_rollout_ref.rollout.n):
            rows.append(
                {
                    "group_id": f"{step:06d}/{prompt['prompt_id']}",
                    "sample_index": sample_index,
                    "prompt_id": prompt["prompt_id"],
                    "prompt_token_ids": token_ids,
                    "policy_version": step - 1,
                    "seed": sample_seed(config.trainer.seed, step, prompt["prompt_id"], sample_index),
                }
            )
    requests = [SampleRequest(row["prompt_token_ids"], row["seed"]) for row in rows]
    params = greedy_params(config) if is_greedy else sampling_params(config)
    completions = context.residents.sampler(context.inputs["policy"]).sample(requests, params)
    if len(completions) != len(rows):
        raise EngineError(f"the sampler returned {len(completions)} completions for {len(rows)} requests")
    for row, completion in zip(rows, completions, strict=True):
        row["completion_token_ids"] = completion.token_ids
        row["completion"] = completion.text
        row["sampler_log_probs"] = completion.log_probs
        row["finish_reason"] = completion.finish_reason
    return table_from_rows(rows, schemas.ROLLOUTS)


def _metrics(table: pa.Table) -> dict[str, float]:
    lengths = [len(ids) for ids in table["completion_token_ids"].to_pylist()]
    truncated = [reason == "length" for reason in table["finish_reason"].to_pylist()]
    return {
        **summary("response_length", lengths),
        "response_length/clip_ratio": sum(truncated) / len(truncated),
        **summary("prompt_length", [len(ids) for ids in table["prompt_token_ids"].to_pylist()]),
    }
