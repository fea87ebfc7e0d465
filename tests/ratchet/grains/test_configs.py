"""Each algorithm's config in configs/ trains: here a step of a tiny model, on two prompts."""

from pathlib import Path

import pytest

from ratchet.config import load_config
from tests.runs import CONFIGS, train_tiny

SMALL = [
    "data.train_files=ratchet/word-problems?level=1&size=8&instruction=short",
    "data.val_files=null",
    "data.max_prompt_length=256",
    "data.max_response_length=8",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.rollout.n=2",
    "trainer.total_training_steps=1",
    "trainer.device=cpu",
    "trainer.logger=[]",
]


@pytest.mark.parametrize("name", ["grpo", "ppo", "rloo", "dr_grpo", "dapo", "gspo"])
def test_the_config_of_an_algorithm_trains(name: str, tmp_path: Path, tiny_model: Path) -> None:
    critic = ["critic.ppo_mini_batch_size=1"] if name == "ppo" else []
    config = load_config(CONFIGS / f"{name}.yaml", [*SMALL, *critic, f"actor_rollout_ref.model.path={tiny_model}"])
    run = train_tiny(tmp_path, name, config)
    assert run.last_step() == 1
    assert run.manifest("checkpoint_export", 1) is not None
