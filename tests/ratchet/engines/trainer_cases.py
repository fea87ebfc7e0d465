"""Rows, options and folders of the trainers' tests, the same in one process and in two; not a test itself."""

import math
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from ratchet.algorithms.batch import LossOptions
from ratchet.algorithms.catalog import POLICY_LOSSES
from ratchet.engines.critic import CriticSettings, ValueRow
from ratchet.engines.scorer import Scorer
from ratchet.engines.trainer import TrainerSettings, TrainRow
from tests.tiny_models import make_tiny_model, tiny_tokenizer

POLICY_LOSS_NAMES = POLICY_LOSSES.names()
OPTIONS = {
    # Few tokens of few: shares at which the selections pick some and leave some.
    "clip_cov": LossOptions(clip_cov_ratio=0.2, clip_cov_lb=0.0, clip_cov_ub=100.0),
    "kl_cov": LossOptions(kl_cov_ratio=0.2),
    "dro": LossOptions(dro_beta=0.5),
}
LENGTHS = [3, 1, 0, 5, 2, 2, 7, 1, 4]
"""Of the completions; with prompts of 1 to 3 tokens."""
# An epsilon far above rounding: with a tiny one, AdamW turns the sign of a rounding error into a whole step.
POLICY = TrainerSettings(lr=1e-3, adam_eps=1e-3, mini_batch_size=9, compute_dtype="float32")
CRITIC = CriticSettings(lr=1e-3, adam_eps=1e-3, mini_batch_size=9, compute_dtype="float32")


def policy_rows(folder: Path, *, num_rows: int = len(LENGTHS)) -> list[TrainRow]:
    """Rows whose behaviour policy is near the folder's: ratios on both sides of 1, some of them clipped."""
    prompts, completions = _sequences(num_rows)
    scorer = Scorer.from_folder(
        folder, compute_dtype="float32", temperature=1.0, max_tokens_per_micro_batch=64, device="cpu"
    )
    log_probs = scorer.log_probs(prompts, completions)
    scorer.close()
    return [
        TrainRow(
            prompt_token_ids=prompt,
            completion_token_ids=completion,
            advantages=[math.cos(1.0 + 3.0 * row + 0.3 * place) for place in range(len(completion))],
            behaviour_log_probs=[value + 0.4 * math.sin(row + 2.0 * place) for place, value in enumerate(values)],
            loss_mask=_mask(completion),
            reference_log_probs=[value - 0.1 for value in values],
            importance_weights=[0.5 + 0.1 * place for place in range(len(completion))],
        )
        for row, (prompt, completion, values) in enumerate(zip(prompts, completions, log_probs, strict=True))
    ]


def value_rows(*, num_rows: int = len(LENGTHS)) -> list[ValueRow]:
    """Rows with old values on both sides of 0 and returns both nearer and farther than the clip."""
    return [
        ValueRow(
            prompt_token_ids=prompt,
            completion_token_ids=completion,
            values=[math.sin(row + 2.0 * place) for place in range(len(completion))],
            returns=[math.cos(2.0 * row + 0.5 * place) for place in range(len(completion))],
            loss_mask=_mask(completion),
        )
        for row, (prompt, completion) in enumerate(zip(*_sequences(num_rows), strict=True))
    ]


def make_tiny_classifier(folder: Path, *, architecture: str = "llama", num_labels: int = 1, seed: int = 0) -> Path:
    """Write a random sequence classifier in the shape of `make_tiny_model` to `folder`, and return it."""
    make_tiny_model(folder, architecture=architecture)
    config = AutoConfig.from_pretrained(folder, num_labels=num_labels)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _sequences(num_rows: int) -> tuple[list[list[int]], list[list[int]]]:
    lengths = [LENGTHS[row % len(LENGTHS)] for row in range(num_rows)]
    prompts = [[5 + row, 6, 7][: 1 + row % 3] for row in range(num_rows)]
    return prompts, [[30 + row + place for place in range(length)] for row, length in enumerate(lengths)]


def _mask(completion: list[int]) -> list[bool]:
    return [place != 3 for place in range(len(completion))]
