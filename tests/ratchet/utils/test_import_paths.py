"""The paths that verl users type."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ratchet.errors import EngineError
from ratchet.store.artifacts import read_folder
from ratchet.store.run import POLICY_UPDATE
from ratchet.utils.fsdp_utils import load_fsdp_checkpoint
from tests.runs import CONFIGS, tiny_config, train_tiny, write_problems


def test_a_sharded_checkpoint_gives_the_full_weights_of_its_policy(tiny_model: Path, tmp_path: Path) -> None:
    options = {"trainer.total_training_steps": 1}
    run = train_tiny(tmp_path, "run", tiny_config(tiny_model, write_problems(tmp_path / "t.jsonl", 2), **options))
    update = run.require(POLICY_UPDATE, 1)
    state = update.provenance.trainer_state
    assert state is not None
    read_folder(run.store, state, tmp_path / "state")
    read_folder(run.store, update.output("policy"), tmp_path / "policy")
    weights, policy = load_fsdp_checkpoint(tmp_path / "state"), load_file(tmp_path / "policy" / "model.safetensors")
    assert weights.keys() == policy.keys()
    # configs/tiny.yaml publishes float32, so the policy is the master weights themselves.
    assert all(torch.equal(weights[name], policy[name]) for name in policy)


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="expected a trainer state in"):
        load_fsdp_checkpoint(tmp_path)


def test_main_ppo_is_ratchet_train(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ratchet.trainer.main_ppo", "data.train_batchsize=4"],
        cwd=CONFIGS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "the nearest is data.train_batch_size" in done.stderr
