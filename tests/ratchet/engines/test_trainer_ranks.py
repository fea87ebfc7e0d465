"""Two processes train as one does, and their states can be exchanged."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ratchet.engines.trainer import Trainer, TrainerSettings, TrainRow
from ratchet.errors import ConfigError
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = TrainerSettings(
    lr=1e-3,
    # Far above rounding: with a tiny epsilon, AdamW turns the sign of a rounding error into a whole step.
    adam_eps=1e-3,
    # Mini-batches of 4, 4 and 1 rows: the last one leaves a rank without work.
    mini_batch_size=4,
    max_tokens_per_micro_batch=12,
    kl_loss_coef=0.1,
    entropy_coeff=0.01,
    compute_dtype="float32",
)
LENGTHS = [3, 1, 0, 5, 2, 2, 7, 1, 4]
ROWS = [
    TrainRow(
        prompt_token_ids=[5 + row, 6, 7][: 1 + row % 3],
        completion_token_ids=[30 + row + place for place in range(length)],
        advantages=[1.0 - row % 3] * length,
        behaviour_log_probs=[-6.0] * length,
        loss_mask=[place != 3 for place in range(length)],
        reference_log_probs=[-6.1] * length,
    )
    for row, length in enumerate(LENGTHS)
]


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with model/, state/, weights.safetensors and metrics.json of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    make_tiny_model(folder / "model")
    rows_file = folder / "rows.json"
    rows_file.write_text(json.dumps({"settings": asdict(SETTINGS), "rows": [asdict(row) for row in ROWS]}))
    worker = Path(__file__).with_name("trainer_worker.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, str(worker), str(folder / "model"), str(rows_file), str(folder), "2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_two_ranks_give_the_metrics_and_weights_of_one(run_of_two: Path) -> None:
    theirs = json.loads((run_of_two / "metrics.json").read_text())
    trainer = Trainer.from_folder(run_of_two / "model", SETTINGS, device="cpu")
    log_probs = trainer.log_probs([row.prompt_token_ids for row in ROWS], [row.completion_token_ids for row in ROWS])
    for ours, of_two_ranks in zip(log_probs, theirs["log_probs"], strict=True):
        assert ours == pytest.approx(of_two_ranks, abs=1e-5)
    for step, metrics in enumerate(theirs["metrics"], start=1):
        assert trainer.update(ROWS, step=step) == pytest.approx(metrics, abs=1e-5, rel=1e-5)
    weights = trainer.export_weights("float32")
    trainer.close()
    of_two = load_file(run_of_two / "weights.safetensors")
    assert weights.keys() == of_two.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, of_two[name], atol=1e-5, rtol=0, msg=name)


def test_a_state_of_two_ranks_goes_on_in_one(run_of_two: Path) -> None:
    stopped = Trainer.from_folder(run_of_two / "model", SETTINGS, device="cpu")
    stopped.load_state(run_of_two / "state")
    assert stopped.policy_version == 2
    of_two = load_file(run_of_two / "weights.safetensors")
    for name, tensor in stopped.export_weights("float32").items():
        assert torch.equal(tensor, of_two[name])
    through = Trainer.from_folder(run_of_two / "model", SETTINGS, device="cpu")
    for step in (1, 2):
        through.update(ROWS, step=step)
    assert stopped.update(ROWS, step=3) == pytest.approx(through.update(ROWS, step=3), abs=1e-5, rel=1e-4)
    weights = through.export_weights("float32")
    for name, tensor in stopped.export_weights("float32").items():
        torch.testing.assert_close(tensor, weights[name], atol=2e-5, rtol=0, msg=name)
    stopped.close()
    through.close()


def test_a_world_size_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="world size of 2, got 1"):
        Trainer.from_folder(make_tiny_model(tmp_path), SETTINGS, world_size=2, device="cpu")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="world size of 1, got 4"):
        Trainer.from_folder(tmp_path, SETTINGS, device="cpu")
