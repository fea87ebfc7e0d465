"""The paths that verl users type."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ratchet.errors import EngineError
from ratchet.store.artifacts import read_folder
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.trainer import main_ppo
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


def _main_ppo(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ratchet.trainer.main_ppo", *arguments],
        cwd=CONFIGS.parent,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_main_ppo_is_ratchet_train() -> None:
    done = _main_ppo("data.train_batchsize=4")
    assert done.returncode == 2
    assert "the nearest is data.train_batch_size" in done.stderr


TWO = "trainer.n_gpus_per_node x trainer.nnodes is 2, and trainer.grain is segment"


def test_num_gpus_is_the_number_of_trainer_processes(tmp_path: Path) -> None:
    (tmp_path / "eight.yaml").write_text("trainer: {n_gpus_per_node: 8}")
    done = _main_ppo("--num_gpus", "2", "--config", str(tmp_path / "eight.yaml"))
    assert done.returncode == 2
    assert TWO in done.stderr
    done = _main_ppo("trainer.n_gpus_per_node=8", "--num_gpus", "2")
    assert done.returncode == 2
    assert "trainer.n_gpus_per_node is 8 and trainer.num_gpus is 2" in done.stderr


def test_of_torchruns_processes_the_first_trains_and_knows_how_many_there_are() -> None:
    first = _main_ppo(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    assert first.returncode == 2
    assert TWO in first.stderr
    second = _main_ppo("no such argument", RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")


def test_resume_path_goes_on_with_the_run_at_that_place(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = write_problems(tmp_path / "t.jsonl", 2)
    run = train_tiny(tmp_path, "run", tiny_config(tiny_model, problems, **{"trainer.total_training_steps": 1}))
    values = tiny_config(tiny_model, problems, **{"trainer.total_training_steps": 2}).model_dump(mode="json")
    (tmp_path / "longer.yaml").write_text(json.dumps(values))
    longer = ["main_ppo", "--config", str(tmp_path / "longer.yaml"), "trainer.resume_mode=resume_path"]

    monkeypatch.setattr("sys.argv", [*longer, f"trainer.resume_from_path={tmp_path}/absent"])
    with pytest.raises(SystemExit, match="2"):
        main_ppo.main()
    assert "no run at" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", [*longer, f"trainer.resume_from_path={tmp_path}/run", "--run-id", "other"])
    with pytest.raises(SystemExit, match="2"):
        main_ppo.main()
    assert "name one run" in capsys.readouterr().err

    monkeypatch.setattr("sys.argv", [*longer, f"trainer.resume_from_path={tmp_path}/run/"])
    with pytest.raises(SystemExit, match="0"):
        main_ppo.main()
    assert capsys.readouterr().out.splitlines()[-1] == f"run: {run.uri}"
    assert Run(str(tmp_path), "run").last_step() == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["longer.yaml", "prepared", "run", "t.jsonl"]
