"""Writing a Hugging Face folder for serving, and proving that it loads to the same model.

Trap: tied and renamed tensors are lost silently by a wrong export; the proof reloads the folder as a stranger would.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from ratchet.engines.model import load_causal_lm
from ratchet.errors import EngineError

_NOT_COPIED = (".safetensors", ".index.json")


def write_export(model_folder: Path, target: Path, *, dtype: str, max_shard_size: str = "5GB") -> None:
    """Write weights, config, generation config, tokenizer and chat template of `model_folder` to `target`."""
    model = load_causal_lm(model_folder, dtype=dtype)
    target.mkdir(parents=True, exist_ok=True)
    for path in model_folder.iterdir():
        if not path.name.endswith(_NOT_COPIED) and path.name != "config.json":
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
        if not difference <= tolerance:
            raise EngineError(
                f"the export at {folder} gives other log-probs: they differ by {difference}, at most {tolerance}"
            )
        largest = max(largest, difference)
    return largest
