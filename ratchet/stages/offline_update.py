"""Train on examples alone: the update of the objectives sft, dpo and reward_model."""

from typing import Any

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.parquet import read_table
from ratchet.stages.base import Input, step_inputs
from ratchet.stages.example_rows import (
    EXAMPLES_OF_STEP,
    examples_of,
    pair_rows,
    reference_of,
    sft_rows,
    step_examples,
)
from ratchet.stages.recovery import Learner
from ratchet.stages.settings import offline_settings
from ratchet.stages.updates import PolicyStage, policy_dtype
from ratchet.store.run import POLICY_UPDATE, Run

_REFERENCE = "reference_scores"


class OfflineUpdate(PolicyStage):
    """But for DPO's reference the step's only stage."""

    config_keys = (
        *EXAMPLES_OF_STEP,
        "actor_rollout_ref.actor",
        "actor_rollout_ref.model.lora_rank",
        "actor_rollout_ref.model.lora_alpha",
        "actor_rollout_ref.model.target_modules",
        "actor_rollout_ref.rollout.dtype",
        "algorithm.objective",
        "algorithm.dpo",
        "trainer.total_epochs",
        "trainer.total_training_steps",
    )

    @property
    def learner(self) -> Learner:
        return Learner("policy", self.name, _open, offline_settings, policy_dtype, _update)

    def needs(self, config: RunConfig) -> tuple[str, ...]:
        return (_REFERENCE,) if config.reference_is_needed else ()

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        assert step is not None
        return {
            "examples": examples_of(run, "train"),
            **step_inputs(run, self.needs(config), step),
            "policy": Input(run.require(POLICY_UPDATE, step - 1), "policy"),
        }


def training_rows(run: Run, config: RunConfig, step: int) -> list[Any]:
    """Return the step's examples, in order, as the objective's trainer takes them."""
    examples = step_examples(run.store, examples_of(run, "train"), config, step)
    if not config.needs_pairs:
        return list(sft_rows(examples))
    if not config.reference_is_needed:
        return list(pair_rows(examples))
    scores = run.require(_REFERENCE, step).output(_REFERENCE)
    table = read_table(run.store, scores, schemas.scores("reference"))
    return list(pair_rows(examples, reference_of(examples, table, step)))


def _open(model_folder: Any, settings: Any, **options: Any) -> Any:
    """Open the trainer whose settings these are."""
    from ratchet.engines.dpo_trainer import DPOSettings, DPOTrainer
    from ratchet.engines.reward_trainer import RewardModelTrainer
    from ratchet.engines.sft_trainer import SFTSettings, SFTTrainer

    if isinstance(settings, SFTSettings):
        return SFTTrainer.from_folder(model_folder, settings, **options)
    if isinstance(settings, DPOSettings):
        return DPOTrainer.from_folder(model_folder, settings, **options)
    return RewardModelTrainer.from_folder(model_folder, settings, **options)


def _update(trainer: Any, run: Run, config: RunConfig, step: int) -> dict[str, float]:
    metrics: dict[str, float] = trainer.update(training_rows(run, config, step), step=step)
    return metrics
