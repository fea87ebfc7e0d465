"""Publish a policy version as a Hugging Face folder, after reloading it and comparing log-probs."""

from typing import Any

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.parquet import read_table
from ratchet.stages.base import Context, Input, Result, Stage
from ratchet.store.artifacts import scratch, write_folder
from ratchet.store.run import POLICY_UPDATE, Run

_PROOF_PROMPTS = 4
_TOLERANCE_NATS = 1e-3


class CheckpointExport(Stage):
    """Export policy version k at step k."""

    name = "checkpoint_export"
    timing = "save_checkpoint"
    config_keys = ("actor_rollout_ref.rollout.dtype",)

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        return {
            "prompts": Input(run.require("preprocess/train", None), "prompts"),
            "policy": Input(run.require(POLICY_UPDATE, step), "policy"),
        }

    def compute(self, context: Context) -> Result:
        from ratchet.engines.export import prove_export, write_export

        step, policy = context.step, context.inputs["policy"]
        sequences = self._sequences(context)
        expected = self._expected(context, sequences)
        with scratch() as folder:
            write_export(
                context.residents.model_folder(policy), folder, dtype=context.config.actor_rollout_ref.rollout.dtype
            )
            difference = prove_export(folder, sequences, expected, tolerance=_TOLERANCE_NATS)
            artifact = write_folder(context.store, f"{context.folder}/export", folder)
        return Result(
            outputs={"export": artifact}, policy_version=step, metrics={"export/max_log_prob_difference": difference}
        )

    def _sequences(self, context: Context) -> list[list[int]]:
        from ratchet.engines.model import chat_prompts_ids

        prompts = read_table(context.run.store, context.inputs["prompts"].artifact, schemas.PROMPTS)
        tokenizer = context.residents.tokenizer()
        return chat_prompts_ids(tokenizer, [row["prompt"] for row in prompts.slice(0, _PROOF_PROMPTS).to_pylist()])

    def _expected(self, context: Context, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs by the trainer's own forward pass over the committed weights, in float32."""
        from ratchet.engines.model import torch_dtype
        from ratchet.engines.scorer import Scorer

        residents, policy = context.residents, context.inputs["policy"]
        dtype = torch_dtype(context.config.actor_rollout_ref.rollout.dtype)
        scorer: Any = Scorer.from_folder(
            residents.model_folder(policy),
            compute_dtype="float32",
            temperature=1.0,
            max_tokens_per_micro_batch=context.config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu,
            device="cpu",
        )
        try:
            if context.step == 0:
                # The base may come in a wider dtype than the run exports.
                scorer.load_weights((name, tensor.to(dtype)) for name, tensor in residents.weights(policy))
            log_probs: list[list[float]] = scorer.log_probs(
                [ids[:1] for ids in sequences], [ids[1:] for ids in sequences]
            )
        finally:
            scorer.close()
        return log_probs
