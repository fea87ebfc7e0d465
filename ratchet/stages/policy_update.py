"""Train the policy on the step's trajectories and publish the next policy version.

Trap: with several processes every rank runs `compute`, since the trainer's calls are collective; only rank 0 writes.
"""

import time
from typing import Any

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.join import align
from ratchet.data.order import steps_per_epoch
from ratchet.data.parquet import read_table
from ratchet.stages.base import Context, Input, Result, Stage, step_inputs
from ratchet.stages.recovery import save_policy, trainer_at
from ratchet.store.artifacts import scratch, write_folder
from ratchet.store.manifest import Artifact
from ratchet.store.run import POLICY_UPDATE, Run


class PolicyUpdate(Stage):
    """Consume policy version step - 1 and publish version step: safetensors, and the trainer's state beside them."""

    name = POLICY_UPDATE
    timing = "update_actor"
    config_keys = (
        "data.train_batch_size",
        "data.max_response_length",
        "actor_rollout_ref.actor",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.rollout.dtype",
        "actor_rollout_ref.rollout.temperature",
        "trainer.seed",
        "trainer.total_epochs",
        "trainer.total_training_steps",
    )

    def needs(self, config: RunConfig) -> tuple[str, ...]:
        in_loss = config.reference_is_needed and config.actor_rollout_ref.actor.use_kl_loss
        return ("rollout", "advantage", *(("reference_scores",) if in_loss else ()))

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        assert step is not None
        return training_inputs(run, config, step) | {
            "policy": Input(run.require(POLICY_UPDATE, step - 1), "policy"),
        }

    def compute(self, context: Context) -> Result:
        step, run, residents = context.step, context.run, context.residents
        assert step is not None
        started = time.time()
        trainer = trainer_at(residents, step - 1, lambda past: training_rows(run, context.config, past))
        rows = training_rows(run, context.config, step)
        metrics = dict(trainer.update(rows, step=step))
        weights = trainer.export_weights(context.config.actor_rollout_ref.rollout.dtype)
        state = self._trainer_state(context, trainer)
        if not residents.is_main:
            return Result(outputs={})
        policy = _write_policy(context, weights)
        residents.publish(policy.digest, weights)
        metrics |= _step_metrics(context, rows, time.time() - started)
        return Result(outputs={"policy": policy}, policy_version=step, metrics=metrics, trainer_state=state)

    def _trainer_state(self, context: Context, trainer: Any) -> Artifact | None:
        if not context.keep_trainer_state:
            return None
        residents = context.residents
        with residents.state_folder() as folder:
            trainer.save_state(folder)
            if not residents.is_main:
                return None
            return write_folder(context.store, f"{context.folder}/trainer_state", folder)


def training_inputs(run: Run, config: RunConfig, step: int) -> dict[str, Input]:
    """The committed tables that the update of `step` reads."""
    return step_inputs(run, PolicyUpdate().needs(config), step)


def training_rows(run: Run, config: RunConfig, step: int) -> list[Any]:
    """Return one TrainRow for each rollout of `step`, in the rollouts' order."""
    from ratchet.engines.trainer import TrainRow

    inputs = training_inputs(run, config, step)
    rollouts = read_table(run.store, inputs["rollouts"].artifact, schemas.ROLLOUTS)
    trajectories = read_table(run.store, inputs["trajectories"].artifact, schemas.TRAJECTORIES)
    rows = align(rollouts, trajectories, "trajectories")
    reference: list[dict[str, Any]] = [{} for _ in rows]
    if "reference_scores" in inputs:
        table = read_table(run.store, inputs["reference_scores"].artifact, schemas.scores("reference"))
        reference = align(rollouts, table, "reference_scores")
    return [
        TrainRow(
            prompt_token_ids=rollout["prompt_token_ids"],
            completion_token_ids=rollout["completion_token_ids"],
            advantages=row["advantages"],
            behaviour_log_probs=row["behaviour_log_probs"],
            loss_mask=row["loss_mask"],
            reference_log_probs=scores.get("reference_log_probs"),
        )
        for rollout, row, scores in zip(rollouts.to_pylist(), rows, reference, strict=True)
    ]


def _write_policy(context: Context, weights: dict[str, Any]) -> Artifact:
    with scratch() as folder:
        save_policy(weights, folder)
        return write_folder(context.store, f"{context.folder}/policy", folder)


def _step_metrics(context: Context, rows: list[Any], own_seconds: float) -> dict[str, float]:
    """Counts and seconds of the whole step, as verl names them."""
    run, config, step = context.run, context.config, context.step
    assert step is not None
    earlier = [
        run.manifest(name, step) for name in ("rollout", "reward", "policy_scores", "reference_scores", "advantage")
    ]
    seconds = own_seconds + sum(item.provenance.ended - item.provenance.started for item in earlier if item)
    tokens = sum(len(row.prompt_token_ids) + len(row.completion_token_ids) for row in rows)
    prompts = run.require("preprocess/train", None).output("prompts").rows or 1
    per_epoch = steps_per_epoch(prompts, config.data.train_batch_size)
    processes = config.trainer.n_gpus_per_node * config.trainer.nnodes
    return {
        "training/global_step": float(step),
        "training/epoch": float((step - 1) // per_epoch),
        "timing_s/step": seconds,
        "perf/time_per_step": seconds,
        "perf/total_num_tokens": float(tokens),
        "perf/throughput": tokens / seconds / processes,
    }
