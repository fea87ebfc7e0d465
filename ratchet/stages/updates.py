"""What the updates of policy and critic have in common: train one step, publish the next version.

Trap: with several processes every rank runs `compute`, since the trainers' calls are collective; only rank 0 writes.
"""

import time
from abc import abstractmethod
from concurrent.futures import Future
from typing import Any

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.join import aligned
from ratchet.data.order import steps_per_epoch
from ratchet.data.parquet import read_table
from ratchet.data.ragged import list_column
from ratchet.stages.base import Context, Input, Result, Stage
from ratchet.stages.recovery import Learner, trainer_at
from ratchet.stages.settings import data_role
from ratchet.store.artifacts import scratch, write_folder
from ratchet.store.manifest import Artifact
from ratchet.store.run import CRITIC_UPDATE, POLICY_UPDATE, Run
from ratchet.store.writer import direct
from ratchet.tracking.cost import step_metrics
from ratchet.tracking.work import NUM_TOKENS, Work, replay_metric

_EARLIER = ("rollout", "reward", "policy_scores", "reference_scores", "values", "advantage", CRITIC_UPDATE)


class Update(Stage):
    """Consume version step - 1 and publish version step: safetensors, and the trainer's state beside them."""

    @property
    @abstractmethod
    def learner(self) -> Learner:
        """The model that is trained."""

    def compute(self, context: Context) -> Result:
        step, residents, learner = context.step, context.residents, self.learner
        assert step is not None
        residents.rest_sampler()
        trainer = trainer_at(residents, learner, step - 1)
        replayed = residents.replay_seconds.pop(learner.role, None)
        metrics = dict(learner.update(trainer, context.run, context.config, step))
        if replayed is not None:
            metrics[replay_metric(self.name)] = replayed
        weights = trainer.export_weights(learner.dtype(context.config), device="own")
        state = _trainer_state(context, trainer)
        if not residents.is_main:
            return Result(outputs={})
        artifact = residents.publish((self.name, step, learner.role), context, weights)
        return Result(outputs={learner.role: artifact}, policy_version=step, metrics=metrics, trainer_state=state)


class PolicyStage(Update):
    """A step's last stage: a step is done when its policy is committed."""

    name = POLICY_UPDATE
    timing = "update_actor"

    def compute(self, context: Context) -> Result:
        started = time.time()
        result = super().compute(context)
        if context.residents.is_main:
            if NUM_TOKENS not in result.metrics:
                # The critic alone was trained.
                columns = columns_of(context.run, context.inputs, {})
                result.metrics[NUM_TOKENS] = float(sum(len(ids) for column in columns.values() for ids in column))
            result.metrics |= _step_metrics(context, started, result.metrics[NUM_TOKENS])
        return result


def policy_dtype(config: RunConfig) -> str:
    """Return the dtype of the policies that are published."""
    return config.actor_rollout_ref.rollout.dtype


def _trainer_state(context: Context, trainer: Any) -> "Artifact | Future[Artifact] | None":
    if not context.keep_trainer_state:
        return None
    residents, place = context.residents, f"{context.folder}/trainer_state"
    if residents.shared_folder is not None:
        trainer.save_state(residents.shared_folder)
        return write_folder(context.store, place, residents.shared_folder) if residents.is_main else None
    staged = trainer.stage_state()

    def write() -> Artifact:
        with scratch() as folder:
            staged.write(folder)
            return write_folder(direct(context.store), place, folder, is_given=True)

    return context.writer.submit(write)


def columns_of(run: Run, inputs: dict[str, Input], wanted: dict[str, tuple[str, Any]]) -> dict[str, list[Any]]:
    """Return column -> its values in the rollouts' order; `wanted` is column -> (role, schema) of the table it is in.

    The rollouts' own token ids come with them. A column whose table is not among the inputs is None in every row.
    """
    rollouts = read_table(run.store, inputs["rollouts"].artifact, schemas.ROLLOUTS)
    columns = {name: list_column(rollouts[name]) for name in ("prompt_token_ids", "completion_token_ids")}
    tables: dict[str, Any] = {"rollouts": rollouts}
    for column, (role, schema) in wanted.items():
        if role not in inputs:
            columns[column] = [None] * rollouts.num_rows
            continue
        if role not in tables:
            tables[role] = aligned(rollouts, read_table(run.store, inputs[role].artifact, schema), role)
        columns[column] = list_column(tables[role][column])
    return columns


def _step_metrics(context: Context, started: float, num_tokens: float) -> dict[str, float]:
    """Return counts, seconds and cost of the whole step, of which this update is the last stage, as verl names them."""
    run, config, step = context.run, context.config, context.step
    assert step is not None
    own_seconds, held = time.time() - started, context.residents.held
    own = Work(
        stage=POLICY_UPDATE,
        step=step,
        started=started,
        seconds=own_seconds,
        device=held.device,
        gpu_seconds=held.gpu_seconds(own_seconds),
    )
    stages = [own, *_earlier(run, step)]
    seconds = sum(one.seconds for one in stages)
    # Only rollouts that are sampled ahead ran beside the step before.
    before = _earlier(run, step - 1, POLICY_UPDATE) if config.trainer.async_level and step > 1 else []
    rows = run.require("preprocess/train", None).output(data_role(config)).rows or 1
    per_epoch = steps_per_epoch(rows, config.data.train_batch_size)
    processes = config.trainer.n_gpus_per_node * config.trainer.nnodes
    return {
        "training/global_step": float(step),
        "training/epoch": float((step - 1) // per_epoch),
        "timing_s/step": seconds,
        "perf/time_per_step": seconds,
        NUM_TOKENS: num_tokens,
        "perf/throughput": num_tokens / seconds / processes,
        **step_metrics(stages, before, config.trainer.prices),
    }


def _earlier(run: Run, step: int, *more: str) -> list[Work]:
    """Return what the stages of a step took that are made before its policy update."""
    found = [run.manifest(name, step) for name in (*_EARLIER, *more)]
    return [Work.of(one) for one in found if one is not None]
