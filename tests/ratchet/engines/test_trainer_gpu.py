"""The trainer and the scorer on a GPU: the flash kernel, NCCL, and agreement with the CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from ratchet.engines.critic import CriticTrainer
from ratchet.engines.scorer import Scorer
from ratchet.engines.trainer import Trainer, TrainerSettings, TrainRow
from tests.ratchet.engines.trainer_cases import CRITIC, make_tiny_classifier, value_rows
from tests.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12], list(range(20, 90))]
COMPLETIONS = [[30, 31, 2], [40, 41, 42, 43, 44], [50], [50, 51, 52, 0]]
ROWS = [
    TrainRow(prompt, completion, [1.0 - row] * len(completion), [-6.0] * len(completion), [True] * len(completion))
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True))
]
SETTINGS = TrainerSettings(lr=1e-3, adam_eps=1e-3, mini_batch_size=4, compute_dtype="float32")


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gemma3_text"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-2), ("bfloat16", 0.3)])
def test_scores_on_a_gpu_are_those_of_the_cpu(architecture: str, dtype: str, tolerance: float, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture=architecture)
    on_gpu, on_cpu = (
        Scorer.from_folder(
            folder, compute_dtype=of, temperature=1.0, max_tokens_per_micro_batch=512, device=device
        ).log_probs(PROMPTS, COMPLETIONS)
        for device, of in (("cuda", dtype), ("cpu", "float32"))
    )
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert ours == pytest.approx(theirs, abs=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_on_a_gpu_is_that_of_the_cpu(dtype: Literal["float32", "bfloat16"], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    settings = replace(SETTINGS, compute_dtype=dtype)
    metrics, weights = [], []
    for device in ("cuda", "cpu"):
        trainer = Trainer.from_folder(folder, settings, device=device)
        metrics.append(trainer.update(ROWS, step=1))
        weights.append(trainer.export_weights("float32"))
        trainer.close()
    tolerance = 1e-3 if dtype == "float32" else 0.1
    assert metrics[0] == pytest.approx(metrics[1], rel=tolerance, abs=tolerance)
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], atol=tolerance * 1e-2, rtol=0, msg=name)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_a_critic_on_a_gpu_is_that_of_the_cpu(
    dtype: Literal["float32", "bfloat16"], tolerance: float, tmp_path: Path
) -> None:
    folder = make_tiny_classifier(tmp_path / "model")
    rows = value_rows()
    metrics, values = [], []
    for device in ("cuda", "cpu"):
        trainer = CriticTrainer.from_folder(folder, replace(CRITIC, compute_dtype=dtype), device=device)
        metrics.append(trainer.update(rows, step=1))
        values.append([value for row in trainer.values(PROMPTS, COMPLETIONS) for value in row])
        trainer.close()
    assert metrics[0] == pytest.approx(metrics[1], rel=tolerance, abs=tolerance)
    assert values[0] == pytest.approx(values[1], abs=30 * tolerance)


def test_a_state_saved_on_a_gpu_is_resumed_on_a_gpu_and_on_a_cpu(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    trainer = Trainer.from_folder(folder, SETTINGS, device="cuda")
    trainer.update(ROWS, step=1)
    trainer.save_state(tmp_path / "state")
    weights = trainer.export_weights("float32")
    trainer.close()
    for device in ("cuda", "cpu"):
        resumed = Trainer.from_folder(folder, SETTINGS, device=device)
        resumed.load_state(tmp_path / "state")
        assert all(torch.equal(tensor, weights[name]) for name, tensor in resumed.export_weights("float32").items())
        assert resumed.update(ROWS, step=2)["actor/grad_norm"] > 0
        resumed.close()
