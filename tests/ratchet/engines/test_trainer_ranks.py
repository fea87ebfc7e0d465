"""Two processes train as one does, with every loss, and their states can be exchanged."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from ratchet.algorithms.batch import LossOptions
from ratchet.engines.process_group import join_group, leave_group
from ratchet.engines.trainer import Trainer
from ratchet.errors import ConfigError
from tests.ratchet.engines.offline_cases import DPO, REWARD, SFT, pair_rows, sft_rows
from tests.ratchet.engines.trainer_cases import (
    CRITIC,
    OPTIONS,
    POLICY,
    POLICY_LOSS_NAMES,
    make_tiny_classifier,
    policy_rows,
    value_rows,
)
from tests.ratchet.engines.trainer_worker import Job
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[3]
# Mini-batches of 4, 4 and 1 rows: the last one leaves a rank without work.
SPLIT = {"mini_batch_size": 4, "max_tokens_per_micro_batch": 12}
OFFLINE = ["sft", "dpo", "reward", "hybrid"]
NAMES = ["several_mini_batches", "critic", *OFFLINE, *POLICY_LOSS_NAMES]


def jobs(folder: Path) -> list[Job]:
    model, classifier = make_tiny_model(folder / "model"), make_tiny_classifier(folder / "classifier")
    rows = policy_rows(model)
    policy = replace(POLICY, **SPLIT, kl_loss_coef=0.1, entropy_coeff=0.01)
    losses = [
        Job(
            name,
            "policy",
            str(model),
            replace(POLICY, policy_loss=name, loss_options=OPTIONS.get(name, LossOptions())),
            rows,
        )
        for name in POLICY_LOSS_NAMES
    ]
    hybrid = replace(policy, sft_weight=0.3, temperature=0.8)
    # Two mini-batches of 4 and 1 pairs.
    offline = [
        Job("sft", "sft", str(model), replace(SFT, **SPLIT), sft_rows(), num_steps=2),
        Job("dpo", "dpo", str(model), replace(DPO, **SPLIT), pair_rows(), num_steps=2),
        Job("reward", "reward", str(classifier), replace(REWARD, **SPLIT), pair_rows(), num_steps=2),
        Job("hybrid", "policy", str(model), hybrid, rows, sft_rows(), num_steps=2),
    ]
    return [
        Job("several_mini_batches", "policy", str(model), policy, rows, num_steps=2),
        Job("critic", "critic", str(classifier), replace(CRITIC, **SPLIT), value_rows(), num_steps=2),
        *offline,
        *losses,
    ]


@pytest.fixture(scope="module")
def runs_of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Job, Path]]:
    """Job name -> the job, and the folder with state/, weights.safetensors and found.json of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    todo = jobs(folder)
    jobs_file = folder / "jobs.json"
    jobs_file.write_text(json.dumps([job.as_json() for job in todo]))
    worker = Path(__file__).with_name("trainer_worker.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, str(worker), str(jobs_file), str(folder), "2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {job.name: (job, folder / job.name) for job in todo}


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_give_the_metrics_and_weights_of_one(name: str, runs_of_two: dict[str, tuple[Job, Path]]) -> None:
    job, of_two = runs_of_two[name]
    theirs = json.loads((of_two / "found.json").read_text())
    trainer = job.open()
    for ours, of_two_ranks in zip(job.scores(trainer), theirs["scores"], strict=True):
        assert ours == pytest.approx(of_two_ranks, abs=1e-5)
    for metrics, of_two_ranks in zip(job.train(trainer), theirs["metrics"], strict=True):
        assert metrics == pytest.approx(of_two_ranks, abs=1e-5, rel=1e-5)
    weights = trainer.export_weights("float32")
    trainer.close()
    expected = load_file(of_two / "weights.safetensors")
    assert weights.keys() == expected.keys()
    for weight, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[weight], atol=1e-5, rtol=0, msg=weight)


@pytest.mark.parametrize("name", ["several_mini_batches", "critic"])
def test_a_state_of_two_ranks_goes_on_in_one(name: str, runs_of_two: dict[str, tuple[Job, Path]]) -> None:
    job, of_two = runs_of_two[name]
    stopped, through = job.open(), job.open()
    stopped.load_state(of_two / "state")
    assert stopped.policy_version == 2
    expected = load_file(of_two / "weights.safetensors")
    for weight, tensor in stopped.export_weights("float32").items():
        assert torch.equal(tensor, expected[weight])
    job.train(through)
    assert stopped.update(job.rows, step=3) == pytest.approx(through.update(job.rows, step=3), abs=1e-5, rel=1e-4)
    weights = through.export_weights("float32")
    for weight, tensor in stopped.export_weights("float32").items():
        torch.testing.assert_close(tensor, weights[weight], atol=2e-5, rtol=0, msg=weight)
    stopped.close()
    through.close()


def test_a_world_size_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="world size of 2, got 1"):
        Trainer.from_folder(make_tiny_model(tmp_path), POLICY, world_size=2, device="cpu")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="world size of 1, got 4"):
        Trainer.from_folder(tmp_path, POLICY, device="cpu")


def test_a_device_mesh_that_exists_is_used_and_outlives_the_trainer(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    rows = policy_rows(folder)
    mesh = join_group(1, torch.device("cpu"))
    try:
        with_mesh, alone = (Trainer.from_folder(folder, POLICY, device="cpu", mesh=given) for given in (mesh, None))
        assert with_mesh.update(rows, step=1) == alone.update(rows, step=1)
        alone.close()
        with_mesh.close()
        assert distributed.is_initialized()
        for wrong, world_size in ((mesh, 2), (init_device_mesh("cpu", (1, 1)), 1)):
            with pytest.raises(ConfigError, match="one dimension"):
                Trainer.from_folder(folder, POLICY, world_size=world_size, device="cpu", mesh=wrong)
    finally:
        leave_group()
    assert not distributed.is_initialized()
