"""Train the policy on the step's trajectories and publish the next policy version."""

from typing import Any

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.stages.advantage import PROBABILITY_DIFFERENCE
from ratchet.stages.base import Input, optional_inputs, step_inputs
from ratchet.stages.example_rows import examples_of, imitated_examples, sft_rows
from ratchet.stages.recovery import Learner
from ratchet.stages.settings import trainer_settings
from ratchet.stages.updates import PolicyStage, columns_of, policy_dtype
from ratchet.store.run import CRITIC_UPDATE, POLICY_UPDATE, Run

_COLUMNS = {
    "advantages": ("trajectories", schemas.TRAJECTORIES),
    "behaviour_log_probs": ("trajectories", schemas.TRAJECTORIES),
    "loss_mask": ("trajectories", schemas.TRAJECTORIES),
    "reference_log_probs": ("reference_scores", schemas.scores("reference")),
    "importance_weights": ("importance_weights", schemas.IMPORTANCE_WEIGHTS),
}
_OF_SAMPLER = {"sampler_log_probs": ("rollouts", schemas.ROLLOUTS)}
"""What the update compares its own log-probs with, where these are the behaviour's."""
_MIXING_KEYS = ("algorithm.objective", "algorithm.hybrid")
_WEIGHING_KEYS = tuple(f"algorithm.rollout_correction.{name}" for name in ("rollout_is", "rollout_is_threshold"))
_IMITATED = "sft_examples"


class PolicyUpdate(PolicyStage):
    """Learn from the step's trajectories, and in a hybrid run from examples beside them."""

    config_keys = (
        "data.train_batch_size",
        "data.max_response_length",
        "actor_rollout_ref.actor",
        "actor_rollout_ref.model.lora_rank",
        "actor_rollout_ref.model.lora_alpha",
        "actor_rollout_ref.model.target_modules",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.rollout.dtype",
        "actor_rollout_ref.rollout.temperature",
        "algorithm.compat",
        "code",
        "trainer.critic_warmup",
        "trainer.seed",
        "trainer.total_epochs",
        "trainer.total_training_steps",
    )

    def keys(self, config: RunConfig) -> tuple[str, ...]:
        weighing = _WEIGHING_KEYS if config.behaviour_source == "update" else ()
        return (*self.config_keys, *weighing, *(_MIXING_KEYS if _is_hybrid(config) else ()))

    @property
    def learner(self) -> Learner:
        from ratchet.engines.trainer import Trainer

        return Learner("policy", self.name, Trainer.from_folder, trainer_settings, policy_dtype, _update)

    def needs(self, config: RunConfig) -> tuple[str, ...]:
        return (*_read(config), *((CRITIC_UPDATE,) if config.critic_is_needed else ()))

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        assert step is not None
        if config.critic_is_needed:
            run.require(CRITIC_UPDATE, step)
        return _inputs(run, config, step) | {"policy": Input(run.require(POLICY_UPDATE, step - 1), "policy")}


def _read(config: RunConfig) -> tuple[str, ...]:
    in_loss = config.reference_is_needed and config.actor_rollout_ref.actor.use_kl_loss
    return ("rollout", "advantage", *(("reference_scores",) if in_loss else ()))


def _inputs(run: Run, config: RunConfig, step: int) -> dict[str, Input]:
    found = step_inputs(run, _read(config), step)
    if _is_hybrid(config):
        found[_IMITATED] = examples_of(run, "sft")
    return found | optional_inputs(run, "advantage", step, ("importance_weights",))


def training_rows(run: Run, config: RunConfig, step: int) -> list[Any]:
    """Return one TrainRow for each rollout of `step`, in the rollouts' order."""
    from ratchet.engines.trainer import TrainRow

    wanted = {**_COLUMNS, **_OF_SAMPLER} if config.behaviour_source == "update" else _COLUMNS
    columns = columns_of(run, _inputs(run, config, step), wanted)
    return [TrainRow(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]


def _is_hybrid(config: RunConfig) -> bool:
    return config.algorithm.objective == "hybrid"


def _update(trainer: Any, run: Run, config: RunConfig, step: int) -> dict[str, float]:
    if config.critic_is_needed and step <= config.trainer.critic_warmup:
        trainer.skip(step)
        return {}
    rows = training_rows(run, config, step)
    imitated: list[Any] = []
    if _is_hybrid(config):
        num_tokens = sum(int(row.loss_mask.sum()) for row in rows)
        imitated = sft_rows(imitated_examples(run.store, examples_of(run, "sft"), config, step, num_tokens))
    metrics: dict[str, float] = trainer.update(rows, step=step, sft_rows=imitated)
    if config.behaviour_source == "policy":
        # Against the policy's own log-probs the difference is 0; the advantage stage knows the sampler's.
        metrics = {name: value for name, value in metrics.items() if not name.startswith(PROBABILITY_DIFFERENCE)}
    return metrics
