"""Version 0 of a reward model: a causal language model's folder with a head of one number for its output layer.

Trap: transformers draws a missing head from the process's random state and only warns; here it is drawn from a seed on
the CPU, so that every attempt makes the same bytes.
"""

import math
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedConfig

from ratchet.engines.export import NOT_COPIED
from ratchet.engines.model import is_classifier, load_config, load_pretrained, load_tokenizer
from ratchet.engines.value_model import OUTPUT_LAYER, read_head
from ratchet.errors import EngineError


def make_classifier_folder(causal_folder: Path, target: Path, *, seed: int) -> None:
    """Write a sequence classifier of one label to `target`: the backbone as it is, in its dtype, and a head.

    The head's weights are drawn with variance 1 / (hidden size + 1) (https://arxiv.org/abs/2009.01325), from `seed`.
    The padding is the tokenizer's where the configuration names none, or else the end of text: with it, classifiers
    find the last token of each text of a batch. Raises EngineError for a folder that holds a head already, and for an
    architecture that transformers has no classifier of.
    """
    config = load_config(causal_folder)
    text = config.get_text_config()
    if is_classifier(config) or read_head(causal_folder, text.hidden_size) is not None:
        raise EngineError(f"expected a causal language model in {str(causal_folder)!r}, got a model that has a head")
    config.architectures = [_classifier_of(config)]
    config.num_labels = 1
    if text.pad_token_id is None:
        tokenizer = load_tokenizer(causal_folder)
        text.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    dtype = getattr(config, "dtype", None) or torch.float32
    backbone = load_pretrained(AutoModel, causal_folder, dtype, device="cpu", unused=(OUTPUT_LAYER,))
    weights = {f"{backbone.base_model_prefix}.{name}": tensor for name, tensor in backbone.state_dict().items()}
    weights["score.weight"] = _drawn(text.hidden_size, seed).to(dtype)
    target.mkdir(parents=True, exist_ok=True)
    for path in causal_folder.iterdir():
        if path.is_file() and not path.name.endswith(NOT_COPIED) and path.name not in _OF_GENERATORS:
            shutil.copyfile(path, target / path.name)
    config.save_pretrained(target)
    save_torch_state_dict(weights, target)


_OF_GENERATORS = ("config.json", "generation_config.json")


def _classifier_of(config: PreTrainedConfig) -> str:
    try:
        kind: Any = AutoModelForSequenceClassification._model_mapping[type(config)]
    except KeyError as error:
        raise EngineError(f"transformers has no sequence classifier of model type {config.model_type!r}") from error
    return str(kind.__name__)


def _drawn(hidden_size: int, seed: int) -> Tensor:
    """A head's weight [1, H], float32; on the CPU, where draws are the same whatever the device."""
    generator = torch.Generator()
    generator.manual_seed(random.Random(f"{seed}/reward_head").getrandbits(63))
    return torch.randn(1, hidden_size, generator=generator) / math.sqrt(hidden_size + 1)
