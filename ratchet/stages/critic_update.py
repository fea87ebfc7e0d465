"""Train the critic on the step's returns and publish its next version."""

from typing import Any

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.stages.base import Input, step_inputs
from ratchet.stages.recovery import Learner
from ratchet.stages.settings import critic_settings
from ratchet.stages.updates import Update, columns_of
from ratchet.store.run import CRITIC_UPDATE, Run

_COLUMNS = {
    "returns": ("trajectories", schemas.TRAJECTORIES),
    "loss_mask": ("trajectories", schemas.TRAJECTORIES),
    "values": ("values", schemas.VALUES),
}
_READ = ("rollout", "values", "advantage")


class CriticUpdate(Update):
    """In the graph only where the advantage estimator reads values."""

    name = CRITIC_UPDATE
    timing = "update_critic"
    config_keys = (
        "data.train_batch_size",
        "data.max_response_length",
        "critic",
        "actor_rollout_ref.rollout.n",
        "trainer.seed",
        "trainer.total_epochs",
        "trainer.total_training_steps",
    )

    @property
    def learner(self) -> Learner:
        from ratchet.engines.critic import CriticTrainer

        return Learner("critic", self.name, CriticTrainer.from_folder, critic_settings, _dtype, _update)

    def needs(self, config: RunConfig) -> tuple[str, ...]:
        return _READ

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        assert step is not None
        return step_inputs(run, _READ, step) | {"critic": Input(run.require(CRITIC_UPDATE, step - 1), "critic")}


def value_rows(run: Run, step: int) -> list[Any]:
    """Return one ValueRow for each rollout of `step`, in the rollouts' order."""
    from ratchet.engines.critic import ValueRow

    columns = columns_of(run, step_inputs(run, _READ, step), _COLUMNS)
    return [ValueRow(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]


def _dtype(config: RunConfig) -> str:
    return config.critic.fsdp_config.dtype


def _update(trainer: Any, run: Run, config: RunConfig, step: int) -> dict[str, float]:
    metrics: dict[str, float] = trainer.update(value_rows(run, step), step=step)
    return metrics
