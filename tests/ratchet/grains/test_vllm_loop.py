"""The loop with vLLM as the sampler: the only setting that changes."""

import importlib.util
from pathlib import Path

import pytest

from ratchet.store.run import POLICY_UPDATE
from tests.runs import tiny_config, train_tiny, write_problems

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.mark.parametrize("grain", ["segment", "step"])
def test_the_sampler_follows_the_trainer_at_every_step(grain: str, tiny_model: Path, tmp_path: Path) -> None:
    config = tiny_config(
        tiny_model,
        write_problems(tmp_path / "train.jsonl", 4),
        **{
            "actor_rollout_ref.rollout.name": "vllm",
            "actor_rollout_ref.rollout.gpu_memory_utilization": 0.1,
            "actor_rollout_ref.rollout.enforce_eager": True,
            "trainer.grain": grain,
            "trainer.total_training_steps": 3,
        },
    )
    run = train_tiny(tmp_path / "runs", grain, config)
    for step in (1, 2, 3):
        metrics = run.require(POLICY_UPDATE, step).provenance.metrics
        # Stale weights in the sampler would show here: the learning rate moves log-probs far more than this.
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
    policies = [run.require(POLICY_UPDATE, step).content.outputs["policy"] for step in (0, 1, 2, 3)]
    assert len(set(policies)) == 4
