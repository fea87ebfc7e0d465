"""Models, rows and settings of the offline trainers' tests; not a test itself.

Trap: numbers of another implementation are compared with, so that weights are a formula's and not a generator's.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ratchet.engines.dpo_trainer import DPOSettings, DPOTrainer
from ratchet.engines.offline_rows import PairRow, SFTRow
from ratchet.engines.reward_trainer import RewardModelSettings, RewardModelTrainer
from ratchet.engines.sft_trainer import SFTSettings, SFTTrainer
from tests.ratchet.engines.trainer_cases import make_tiny_classifier
from tests.tiny_models import make_tiny_model

COMMON: dict[str, Any] = {"lr": 1e-3, "adam_eps": 1e-3, "mini_batch_size": 9, "compute_dtype": "float32"}
# AdamW's first step is lr * g / (|g| + eps): with a huge epsilon, and a rate as large, it is the gradient to 1e-6.
GRADIENT: dict[str, Any] = {"lr": 1e6, "adam_eps": 1e6, "weight_decay": 0.0, "grad_clip": None}
SFT = SFTSettings(**COMMON)
DPO = DPOSettings(**COMMON)
REWARD = RewardModelSettings(**COMMON)
TRAINERS: dict[type, Any] = {
    SFTSettings: SFTTrainer,
    DPOSettings: DPOTrainer,
    RewardModelSettings: RewardModelTrainer,
}
CHOSEN = [3, 1, 5, 2, 7]
REJECTED = [2, 4, 1, 2, 3]


def causal_folder(folder: Path) -> Path:
    """A tiny Llama whose weights are a formula's."""
    return _with_formula(make_tiny_model(folder))


def classifier_folder(folder: Path) -> Path:
    """A tiny classifier of one label whose weights are a formula's."""
    return _with_formula(make_tiny_classifier(folder))


def pair_rows() -> list[PairRow]:
    """Five pairs of unequal lengths, with a hole in the longer masks and a reference on both sides of the policy."""
    return [
        PairRow(
            prompt_token_ids=[5 + row, 6, 7][: 1 + row % 3],
            chosen_token_ids=[30 + 7 * row + place for place in range(chosen)],
            rejected_token_ids=[90 + 5 * row + place for place in range(rejected)],
            chosen_loss_mask=_mask(chosen),
            rejected_loss_mask=_mask(rejected),
            reference_chosen_log_probs=[-6.0 + math.sin(row + 2.0 * place) for place in range(chosen)],
            reference_rejected_log_probs=[-6.0 + math.cos(row + 3.0 * place) for place in range(rejected)],
        )
        for row, (chosen, rejected) in enumerate(zip(CHOSEN, REJECTED, strict=True))
    ]


def sft_rows() -> list[SFTRow]:
    """The chosen sides of the pairs."""
    return [row.sides()[0] for row in pair_rows()]


def gradient(folder: Path, settings: Any, rows: list[Any]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradient of one update of a trainer, by weight, and the update's metrics."""
    trainer = TRAINERS[type(settings)].from_folder(folder, replace(settings, **GRADIENT), device="cpu")
    try:
        before = trainer.export_weights("float32")
        metrics = trainer.update(rows, step=1)
        after = trainer.export_weights("float32")
    finally:
        trainer.close()
    return {name: before[name].double() - after[name].double() for name in before}, metrics


def projections(gradients: dict[str, Tensor]) -> dict[str, float]:
    """Each weight's gradient as one number: its product with a wave that no gradient is perpendicular to by chance."""
    return {
        name: float((tensor.double().flatten() * torch.cos(torch.arange(tensor.numel()).double() * 0.7)).sum())
        for name, tensor in sorted(gradients.items())
    }


def _mask(length: int) -> list[bool]:
    return [place != 1 or length < 3 for place in range(length)]


def _with_formula(folder: Path) -> Path:
    weights = load_file(folder / "model.safetensors")
    for number, (name, tensor) in enumerate(sorted(weights.items())):
        wave = torch.sin(torch.arange(tensor.numel()).double() * (1.3 + 0.1 * number) + number)
        weights[name] = (1.0 + 0.1 * wave if tensor.dim() == 1 else 0.1 * wave).float().reshape(tensor.shape)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    return folder
