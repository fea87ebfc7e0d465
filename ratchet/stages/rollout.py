"""Draw a group of completions for every prompt of the step."""

from typing import Any

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.order import batch_positions, sample_seed
from ratchet.data.parquet import read_table, table_from_rows, write_table
from ratchet.errors import EngineError
from ratchet.stages.base import Context, Input, Result, Stage
from ratchet.stages.settings import sampling_params
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.tracking.metrics import summary


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

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        assert step is not None
        return {
            "prompts": Input(run.require("preprocess/train", None), "prompts"),
            "policy": Input(run.require(POLICY_UPDATE, step - 1), "policy"),
        }

    def compute(self, context: Context) -> Result:
        from ratchet.engines.model import chat_prompt_ids
        from ratchet.engines.sampler import SampleRequest

        step, config = context.step, context.config
        assert step is not None
        prompts = read_table(context.run.store, context.inputs["prompts"].artifact, schemas.PROMPTS)
        prompt_ids: list[str] = prompts["prompt_id"].to_pylist()
        positions = batch_positions(
            step, prompt_ids, config.data.train_batch_size, seed=config.trainer.seed, shuffle=config.data.shuffle
        )
        batch = prompts.take(positions).to_pylist()
        tokenizer = context.residents.tokenizer()
        policy_version = step - 1
        rows: list[dict[str, Any]] = []
        for prompt in batch:
            token_ids = chat_prompt_ids(tokenizer, prompt["prompt"])
            for sample_index in range(config.actor_rollout_ref.rollout.n):
                rows.append(
                    {
                        "group_id": f"{step:06d}/{prompt['prompt_id']}",
                        "sample_index": sample_index,
                        "prompt_id": prompt["prompt_id"],
                        "prompt_token_ids": token_ids,
                        "policy_version": policy_version,
                        "seed": sample_seed(config.trainer.seed, step, prompt["prompt_id"], sample_index),
                    }
                )
        requests = [SampleRequest(row["prompt_token_ids"], row["seed"]) for row in rows]
        completions = context.residents.sampler(context.inputs["policy"]).sample(requests, sampling_params(config))
        if len(completions) != len(rows):
            raise EngineError(f"the sampler returned {len(completions)} completions for {len(rows)} requests")
        for row, completion in zip(rows, completions, strict=True):
            row["completion_token_ids"] = completion.token_ids
            row["completion"] = completion.text
            row["sampler_log_probs"] = completion.log_probs
            row["finish_reason"] = completion.finish_reason
        artifact = write_table(context.store, f"{context.folder}/rollouts", table_from_rows(rows, schemas.ROLLOUTS))
        return Result(outputs={"rollouts": artifact}, policy_version=policy_version, metrics=_metrics(rows))


def _metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    lengths = [len(row["completion_token_ids"]) for row in rows]
    truncated = [row["finish_reason"] == "length" for row in rows]
    return {
        **summary("response_length", lengths),
        "response_length/clip_ratio": sum(truncated) / len(rows),
        **summary("prompt_length", [len(row["prompt_token_ids"]) for row in rows]),
    }
