"""Publish a policy version as a Hugging Face folder, after reloading it and comparing log-probs or scores."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.parquet import read_table
from ratchet.stages.base import Context, Input, Result, Stage
from ratchet.stages.mlmodel import mlmodel
from ratchet.stages.settings import data_role
from ratchet.store.artifacts import scratch, write_bytes, write_folder
from ratchet.store.run import POLICY_UPDATE, Run

_PROOF_PROMPTS = 4
_TOLERANCE = 1e-3
_SHOWN = ("prompt_token_ids", "chosen_token_ids")


class CheckpointExport(Stage):
    """Export policy version k at step k."""

    name = "checkpoint_export"
    timing = "save_checkpoint"
    config_keys = ("actor_rollout_ref.rollout.dtype",)

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        role = data_role(config)
        return {
            role: Input(run.require("preprocess/train", None), role),
            "policy": Input(run.require(POLICY_UPDATE, step), "policy"),
        }

    def compute(self, context: Context) -> Result:
        from ratchet.engines.export import prove_classifier_export, prove_export, write_export

        step, policy = context.step, context.inputs["policy"]
        sequences = self._sequences(context)
        prove: Any = prove_export
        expect: Callable[[Context, list[list[int]]], list[Any]] = _expected_log_probs
        name = "export/max_log_prob_difference"
        is_classifier = context.config.algorithm.objective == "reward_model"
        if is_classifier:
            prove, expect, name = prove_classifier_export, _expected_scores, "export/max_score_difference"
        expected = expect(context, sequences)
        with scratch() as folder:
            write_export(
                context.residents.model_folder(policy), folder, dtype=context.config.actor_rollout_ref.rollout.dtype
            )
            difference = prove(folder, sequences, expected, tolerance=_TOLERANCE)
            artifact = write_folder(context.store, f"{context.folder}/export", folder)
        outputs = {
            "export": artifact,
            "mlmodel": write_bytes(context.store, artifact.folder, mlmodel(is_classifier=is_classifier)),
        }
        return Result(outputs=outputs, policy_version=step, metrics={name: difference})

    def _sequences(self, context: Context) -> list[list[int]]:
        """Texts to compare: prompts, or whole examples."""
        store = context.run.store
        if context.config.is_offline:
            examples = read_table(store, context.inputs["examples"].artifact, schemas.EXAMPLES)
            columns = (examples[name].slice(0, _PROOF_PROMPTS).to_pylist() for name in _SHOWN)
            return [[*prompt, *chosen] for prompt, chosen in zip(*columns, strict=True)]
        from ratchet.engines.model import chat_prompts_ids

        prompts = read_table(store, context.inputs["prompts"].artifact, schemas.PROMPTS)
        tokenizer = context.residents.tokenizer()
        return chat_prompts_ids(tokenizer, [row["prompt"] for row in prompts.slice(0, _PROOF_PROMPTS).to_pylist()])


def _expected_log_probs(context: Context, sequences: list[list[int]]) -> list[list[float]]:
    """Log-probs by the trainer's own forward pass over the committed weights, in float32."""
    from ratchet.engines.scorer import Scorer

    with _committed(context, Scorer.from_folder, temperature=1.0) as scorer:
        log_probs: list[list[float]] = scorer.log_probs([ids[:1] for ids in sequences], [ids[1:] for ids in sequences])
    return log_probs


def _expected_scores(context: Context, sequences: list[list[int]]) -> list[float]:
    """A reward model's scores of the committed weights, in float32."""
    from ratchet.engines.reward_model import RewardModel

    with _committed(context, RewardModel.from_folder) as scorer:
        scores: list[float] = scorer.token_scores(sequences)
    return scores


@contextmanager
def _committed(context: Context, open_: Callable[..., Any], **options: Any) -> Iterator[Any]:
    """Yield the committed policy, opened on the CPU."""
    from ratchet.engines.model import torch_dtype
    from ratchet.engines.value_model import HEADS

    residents, policy, config = context.residents, context.inputs["policy"], context.config
    dtype = torch_dtype(config.actor_rollout_ref.rollout.dtype)
    scorer = open_(
        residents.model_folder(policy),
        compute_dtype="float32",
        max_tokens_per_micro_batch=config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu,
        device="cpu",
        **options,
    )
    try:
        if context.step == 0:
            # The base may come in a wider dtype than the run exports; a head is exported as it is.
            scorer.load_weights(
                (name, tensor if name.startswith(HEADS) else tensor.to(dtype))
                for name, tensor in residents.weights(policy)
            )
        yield scorer
    finally:
        scorer.close()
