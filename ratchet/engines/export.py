"""Writing a Hugging Face folder for serving, and proving that it loads to the same model.

Trap: tied and renamed tensors are lost silently by a wrong export; the proof reloads the folder as a stranger would.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from ratchet.engines.model import is_classifier, load_causal_lm, load_config, load_pretrained, torch_dtype
from ratchet.errors import EngineError

NOT_COPIED = (".safetensors", ".index.json")
"""Endings of the files that weights are in: they are written anew, all others are copied."""


def write_export(model_folder: Path, target: Path, *, dtype: str, max_shard_size: str = "5GB") -> None:
    """Write weights, config, generation config, tokenizer and chat template of `model_folder` to `target`.

    The folder is a causal language model's or a sequence classifier's; so is the export. A classifier's head is written
    in float32, in which it is trained and computes.
    """
    if is_classifier(load_config(model_folder)):
        model = load_pretrained(AutoModelForSequenceClassification, model_folder, torch.float32, device="cpu")
        model.base_model.to(torch_dtype(dtype))
    else:
        model = load_causal_lm(model_folder, dtype=dtype)
    target.mkdir(parents=True, exist_ok=True)
    for path in model_folder.iterdir():
        if not path.name.endswith(NOT_COPIED) and path.name != "config.json":
            shutil.copyfile(path, target / path.name)
    model.save_pretrained(target, max_shard_size=max_shard_size)


def prove_export(
    folder: Path, sequences: Sequence[Sequence[int]], expected: Sequence[Sequence[float]], *, tolerance: float
) -> float:
    """Reload `folder` in float32 and compare the log-prob of every token after the first with `expected`.

    Returns the largest absolute difference in nats; above `tolerance`, or where it is not a number, EngineError.
    """
    model = load_causal_lm(folder, "float32")
    largest = 0.0
    for token_ids, log_probs in zip(sequences, expected, strict=True):
        if len(token_ids) < 2:
            continue
        ids = torch.tensor([list(token_ids)])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1].float()
        found = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        difference = float((found - torch.tensor(list(log_probs))).abs().max())
        largest = max(largest, _small(difference, tolerance, folder, "log-probs"))
    return largest


def prove_classifier_export(
    folder: Path, sequences: Sequence[Sequence[int]], expected: Sequence[float], *, tolerance: float
) -> float:
    """Reload `folder` in float32 as a sequence classifier and compare the score of every sequence with `expected`.

    Returns the largest absolute difference; above `tolerance`, or where it is not a number, EngineError.
    """
    model = load_pretrained(AutoModelForSequenceClassification, folder, torch.float32, device="cpu")
    largest = 0.0
    for token_ids, score in zip(sequences, expected, strict=True):
        with torch.no_grad():
            found = float(model(input_ids=torch.tensor([list(token_ids)])).logits[0, 0])
        largest = max(largest, _small(abs(found - score), tolerance, folder, "scores"))
    return largest


def _small(difference: float, tolerance: float, folder: Path, what: str) -> float:
    if not difference <= tolerance:
        raise EngineError(
            f"the export at {folder} gives other {what}: they differ by {difference}, at most {tolerance}"
        )
    return difference
