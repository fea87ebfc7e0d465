"""PPO with a critic: the same run at every grain, and wherever it is interrupted."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.store.artifacts import scratch
from ratchet.store.run import CRITIC_UPDATE, POLICY_UPDATE, Run
from ratchet.store.weights import read_weights
from tests.runs import Stopped, content_digests, stop_at, table_rows, tiny_config, train_tiny, write_problems


def _config(tmp_path: Path, model: Path, **options: Any) -> RunConfig:
    problems = write_problems(tmp_path / "problems.jsonl", 4)
    # A random model answers nothing; what it says must earn something for a critic to learn.
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) / 10\n"
    )
    return tiny_config(
        model,
        problems,
        **{
            "algorithm.adv_estimator": "gae",
            "algorithm.lam": 0.9,
            "custom_reward_function.path": str(reward),
            "critic.fsdp_config.dtype": "float32",
            "critic.model.enable_gradient_checkpointing": False,
            "critic.optim.lr": 1e-2,
            "trainer.total_training_steps": 2,
            **options,
        },
    )


def _weights(run: Run, stage: str, role: str, step: int) -> dict[str, torch.Tensor]:
    with scratch() as folder:
        read_weights(run, run.require(stage, step), role, folder)
        return load_file(folder / "model.safetensors")


@pytest.mark.slow
def test_ppo_is_the_same_at_every_grain(tmp_path: Path, tiny_model: Path) -> None:
    digests = {
        grain: content_digests(train_tiny(tmp_path, grain, _config(tmp_path, tiny_model, **{"trainer.grain": grain})))
        for grain in ("segment", "step", "stage")
    }
    assert digests["segment"] == digests["step"] == digests["stage"]
    assert {"2/values", "2/critic_update", "0/critic_update"} <= digests["segment"].keys()


@pytest.mark.parametrize("is_committed", [False, True])
def test_ppo_goes_on_where_it_was_stopped_at_the_critics_update(
    is_committed: bool, tmp_path: Path, tiny_model: Path
) -> None:
    config = _config(tmp_path, tiny_model)
    uninterrupted = content_digests(train_tiny(tmp_path, "whole", config))
    with pytest.raises(Stopped):
        train_tiny(tmp_path, "stopped", config, stop_at("step-000002/critic_update", is_committed=is_committed))
    assert content_digests(train_tiny(tmp_path, "stopped", config)) == uninterrupted


def test_advantages_are_returns_minus_values(tmp_path: Path, tiny_model: Path) -> None:
    run = train_tiny(tmp_path, "run", _config(tmp_path, tiny_model))
    # Without a head the first values are 0; after a step the critic expects something.
    for step in (1, 2):
        values = table_rows(run, "values", "values", schemas.VALUES, step)
        rows = table_rows(run, "advantage", "trajectories", schemas.TRAJECTORIES, step)
        assert any(any(row["values"]) for row in values) == (step == 2)
        for value, row in zip(values, rows, strict=True):
            pairs = zip(row["returns"], value["values"], strict=True)
            assert row["advantages"] == pytest.approx([ret - one for ret, one in pairs], abs=1e-5)
    metrics = run.require(CRITIC_UPDATE, 2).provenance.metrics
    assert {"critic/vf_loss", "critic/vf_clipfrac", "critic/grad_norm", "critic/lr"} <= metrics.keys()


def test_in_the_warm_up_only_the_critic_learns(tmp_path: Path, tiny_model: Path) -> None:
    run = train_tiny(tmp_path, "run", _config(tmp_path, tiny_model, **{"trainer.critic_warmup": 1}))
    policies = [_weights(run, POLICY_UPDATE, "policy", step) for step in range(3)]
    critics = [_weights(run, CRITIC_UPDATE, "critic", step) for step in range(3)]
    moved = [
        any(not torch.equal(before[name], after[name]) for name in after if name in before)
        for before, after in pairwise(policies)
    ]
    assert moved == [False, True]
    assert "score.weight" not in critics[0]
    assert not torch.equal(critics[1]["score.weight"], critics[2]["score.weight"])
