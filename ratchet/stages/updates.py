"""What the updates of policy and critic have in common: train one step, publish the next version.

Trap: with several processes every rank runs `compute`, since the trainers' calls are collective; only rank 0 writes.
"""

from abc import abstractmethod
from typing import Any

from ratchet.data import schemas
from ratchet.data.join import aligned
from ratchet.data.parquet import read_table
from ratchet.stages.base import Context, Input, Result, Stage
from ratchet.stages.recovery import Learner, save_weights, trainer_at
from ratchet.store.artifacts import scratch, write_folder
from ratchet.store.manifest import Artifact
from ratchet.store.run import Run


class Update(Stage):
    """Consume version step - 1 and publish version step: safetensors, and the trainer's state beside them."""

    @property
    @abstractmethod
    def learner(self) -> Learner:
        """The model that is trained."""

    def compute(self, context: Context) -> Result:
        step, residents, learner = context.step, context.residents, self.learner
        assert step is not None
        trainer = trainer_at(residents, learner, step - 1)
        metrics = learner.update(trainer, context.run, context.config, step)
        weights = trainer.export_weights(learner.dtype(context.config))
        state = _trainer_state(context, trainer)
        if not residents.is_main:
            return Result(outputs={})
        with scratch() as folder:
            save_weights(weights, folder)
            artifact = write_folder(context.store, f"{context.folder}/{learner.role}", folder)
        residents.publish(learner.role, artifact.digest, weights)
        return Result(outputs={learner.role: artifact}, policy_version=step, metrics=dict(metrics), trainer_state=state)


def _trainer_state(context: Context, trainer: Any) -> Artifact | None:
    if not context.keep_trainer_state:
        return None
    residents = context.residents
    with residents.state_folder() as folder:
        trainer.save_state(folder)
        if not residents.is_main:
            return None
        return write_folder(context.store, f"{context.folder}/trainer_state", folder)


def columns_of(run: Run, inputs: dict[str, Input], wanted: dict[str, tuple[str, Any]]) -> dict[str, list[Any]]:
    """Return column -> its values in the rollouts' order; `wanted` is column -> (role, schema) of the table it is in.

    The rollouts' own token ids come with them. A column whose table is not among the inputs is None in every row.
    """
    rollouts = read_table(run.store, inputs["rollouts"].artifact, schemas.ROLLOUTS)
    columns = {name: rollouts[name].to_pylist() for name in ("prompt_token_ids", "completion_token_ids")}
    tables: dict[str, Any] = {}
    for column, (role, schema) in wanted.items():
        if role not in inputs:
            columns[column] = [None] * rollouts.num_rows
            continue
        if role not in tables:
            tables[role] = aligned(rollouts, read_table(run.store, inputs[role].artifact, schema), role)
        columns[column] = tables[role][column].to_pylist()
    return columns
