from typing import Any

import pytest

from ratchet.config import load_config, semantic
from ratchet.config.load import known_keys
from ratchet.config.semantics import EXTENT, OPERATIONAL, schedule_reads_extent, selected
from ratchet.stages.base_policy import BasePolicy
from ratchet.stages.checkpoint_export import CheckpointExport
from ratchet.stages.evaluate import Evaluate
from ratchet.stages.graph import step_stages
from ratchet.stages.preprocess import Preprocess

OPTIM = "actor_rollout_ref.actor.optim"


def _keys(tree: dict[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in tree.items():
        found |= _keys(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}"}
    return found


def test_every_operational_key_exists() -> None:
    assert not (OPERATIONAL | EXTENT) - set(known_keys())


def test_every_key_that_a_stage_reads_exists() -> None:
    everything = ["actor_rollout_ref.actor.use_kl_loss=true", "algorithm.rollout_correction.bypass_mode=false"]
    stages = [*step_stages(load_config(overrides=everything)), BasePolicy(), Preprocess("train"), Preprocess("val")]
    keys = set(known_keys())
    sections = {key.rsplit(".", depth)[0] for key in keys for depth in range(1, 4)}
    for stage in [*stages, Evaluate(), CheckpointExport()]:
        assert not set(stage.config_keys) - keys - sections, stage.name


def test_a_run_is_what_its_keys_say_without_the_operational_ones() -> None:
    assert _keys(semantic(load_config())) == set(known_keys()) - OPERATIONAL - EXTENT


@pytest.mark.parametrize(
    ("overrides", "reads_extent"),
    [
        ([], False),
        ([f"{OPTIM}.lr_warmup_steps=10"], False),
        ([f"{OPTIM}.lr_warmup_steps=10", f"{OPTIM}.lr_warmup_steps_ratio=0.1"], False),
        ([f"{OPTIM}.lr_warmup_steps_ratio=0.1"], True),
        ([f"{OPTIM}.lr_scheduler_type=cosine"], True),
        ([f"{OPTIM}.lr_scheduler_type=linear"], True),
    ],
)
def test_the_number_of_steps_is_semantic_only_where_the_learning_rate_reads_it(
    overrides: list[str], reads_extent: bool
) -> None:
    config = load_config(overrides=overrides)
    assert schedule_reads_extent(config) is reads_extent
    assert (_keys(semantic(config)) >= EXTENT) is reads_extent
    longer = load_config(overrides=[*overrides, "trainer.total_training_steps=99", "trainer.total_epochs=7"])
    assert (semantic(longer) != semantic(config)) is reads_extent


def test_how_and_where_a_run_runs_does_not_change_what_it_is() -> None:
    moved = ["trainer.grain=step", "trainer.device=cuda", "trainer.save_freq=5", "trainer.logger=[mlflow]"]
    assert semantic(load_config(overrides=moved)) == semantic(load_config())
    assert semantic(load_config(overrides=["trainer.seed=1"])) != semantic(load_config())


def test_a_stage_is_told_the_values_of_its_keys_and_sections() -> None:
    config = load_config(overrides=["trainer.total_training_steps=5", "trainer.seed=4"])
    found = selected(
        config, ["trainer.seed", "algorithm.kl_ctrl", "trainer.total_training_steps", "actor_rollout_ref.ref"]
    )
    assert found == {
        "trainer.seed": 4,
        "algorithm.kl_ctrl": {"type": "fixed", "kl_coef": 0.001},
        # Neither is semantic here: a section without semantic keys is empty, as a key that is left out is.
        "trainer.total_training_steps": {},
        "actor_rollout_ref.ref": {},
    }
    cosine = load_config(overrides=["trainer.total_training_steps=5", f"{OPTIM}.lr_scheduler_type=cosine"])
    assert selected(cosine, ["trainer.total_training_steps"]) == {"trainer.total_training_steps": 5}
