"""Draw a group of completions for every prompt of the step."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.order import batch_positions, refill_positions, sample_seed
from ratchet.data.parquet import write_table
from ratchet.errors import EngineError
from ratchet.stages.base import Context, Input, Result, Stage
from ratchet.stages.reward import REWARD_KEYS, reward_sources
from ratchet.stages.rounds import sample_in_rounds
from ratchet.stages.run_tables import run_table
from ratchet.stages.settings import greedy_params, rollout_version, sampling_params
from ratchet.store.manifest import Artifact
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.tracking.metrics import summary

GREEDY = -1
"""sample_index of the greedy completion that ReMax compares with."""
PROBE = "training/probe_log_prob_diff"
"""Mean difference, in nats, of sampler and trainer on a fixed prompt, when the sampler was given these weights."""
_DRAWS = 1 << 32
"""Values of a row's draw."""


class Rollout(Stage):
    """Sample `n` completions a prompt from the policy before the step, or with `trainer.async_level` one further back.

    Committed rollouts are never sampled again.
    """

    name = "rollout"
    timing = "gen"
    config_keys = (
        "data.train_batch_size",
        "data.max_response_length",
        "data.shuffle",
        "actor_rollout_ref.rollout",
        "trainer.async_level",
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
            "policy": Input(run.require(POLICY_UPDATE, rollout_version(config, step)), "policy"),
        }

    def outside_inputs(self, config: RunConfig) -> dict[str, str] | None:
        return reward_sources(config) if config.algorithm.filter_groups.enable else {}

    def compute(self, context: Context) -> Result:
        step, config = context.step, context.config
        assert step is not None
        prompts = run_table(context.run.store, context.inputs["prompts"].artifact, schemas.PROMPTS)
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
        version = rollout_version(config, step)
        if context.residents.drift is not None:
            metrics[PROBE] = context.residents.drift
        return Result(outputs=outputs, policy_version=version, metrics=_metrics(table) | metrics)


def sample_groups(context: Context, prompts: pa.Table, positions: list[int], *, is_greedy: bool = False) -> pa.Table:
    """Sample a group for each prompt at `positions`; one greedy completion each with `is_greedy`."""
    from ratchet.engines.model import chat_prompts_ids
    from ratchet.engines.sampler import SampleRequest

    step, config = context.step, context.config
    assert step is not None
    tokenizer = context.residents.tokenizer()
    chosen = prompts.select(["prompt_id", "prompt"]).take(positions)
    prompt_ids: list[str] = chosen["prompt_id"].to_pylist()
    # Once a prompt, not once a completion.
    token_ids = chat_prompts_ids(tokenizer, chosen["prompt"].to_pylist())
    indices = [GREEDY] if is_greedy else range(config.actor_rollout_ref.rollout.n)
    rows = [(place, index) for place in range(len(prompt_ids)) for index in indices]
    seeds = [sample_seed(config.trainer.seed, step, prompt_ids[place], index) for place, index in rows]
    requests = [
        SampleRequest(token_ids[place], seed, with_log_probs=is_asked)
        for (place, _), seed, is_asked in zip(rows, seeds, _asked(config, seeds), strict=True)
    ]
    params = greedy_params(config) if is_greedy else sampling_params(config)
    completions = context.residents.sampler(context.inputs["policy"]).sample(requests, params)
    if len(completions) != len(requests):
        raise EngineError(f"the sampler returned {len(completions)} completions for {len(requests)} requests")
    columns: dict[str, list[Any]] = {
        "group_id": [f"{step:06d}/{prompt_ids[place]}" for place, _ in rows],
        "sample_index": [index for _, index in rows],
        "prompt_id": [prompt_ids[place] for place, _ in rows],
        "prompt_token_ids": [request.prompt_token_ids for request in requests],
        "completion_token_ids": [completion.token_ids for completion in completions],
        "completion": [completion.text for completion in completions],
        "sampler_log_probs": [completion.log_probs for completion in completions],
        "finish_reason": [completion.finish_reason for completion in completions],
        "policy_version": [rollout_version(config, step)] * len(rows),
        "seed": seeds,
    }
    return pa.table(columns, schema=schemas.ROLLOUTS)


def _asked(config: RunConfig, seeds: list[int]) -> list[bool]:
    """Which rows the sampler reports log-probs of: all, or a share that their own seeds draw, at least one."""
    rollout = config.actor_rollout_ref.rollout
    # The low bits, so that what is watched is no range of seeds.
    draws = [seed % _DRAWS for seed in seeds]
    limit = _DRAWS if rollout.calculate_log_probs else rollout.log_probs_share * _DRAWS
    limit = max(limit, min(draws, default=0) + 1)
    return [draw < limit for draw in draws]


def _metrics(table: pa.Table) -> dict[str, float]:
    lengths, prompt_lengths = (
        pc.list_value_length(table[f"{part}_token_ids"]).to_pylist() for part in ("completion", "prompt")
    )
    truncated = [reason == "length" for reason in table["finish_reason"].to_pylist()]
    return {
        **summary("response_length", lengths),
        "response_length/clip_ratio": sum(truncated) / len(truncated),
        **summary("prompt_length", prompt_lengths),
    }
