"""Models and tokenizers from folders in Hugging Face's layout, loaded the same way by every engine.

Trap: transformers fills a weight that the files lack with random numbers and only warns, and a chat template's text
tokenised a second time gains a second BOS; `load_causal_lm` refuses the first, `chat_prompt_ids` cannot do the second.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ratchet.engines.chat_template import rendered
from ratchet.engines.model_folder import check_model_folder, read_json, weight_files
from ratchet.engines.model_source import resolve_model_folder, resolve_tokenizer_folder
from ratchet.errors import EngineError

__all__ = [
    "WeightLayout",
    "chat_prompt_ids",
    "chat_prompts_ids",
    "check_model_folder",
    "check_weights",
    "context_length",
    "decode",
    "end_token_ids",
    "is_classifier",
    "load_causal_lm",
    "load_config",
    "load_pretrained",
    "load_tokenizer",
    "resolve_model_folder",
    "resolve_tokenizer_folder",
    "tokenizer_digest",
    "torch_device",
    "torch_dtype",
    "weight_files",
]

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called "float32", "bfloat16" or "float16"."""
    if name not in _DTYPES:
        raise EngineError(f"expected a dtype of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def torch_device(name: str) -> torch.device:
    """The device called `name`; "auto" is the current GPU where there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


@cache
def accelerator_name() -> str:
    """The name of the current GPU, such as NVIDIA H200."""
    return torch.cuda.get_device_name()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer, which must have a chat template."""
    if not folder.is_dir():
        raise EngineError(f"model folder {str(folder)!r} does not exist")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # of tokenizer.json, the tokenizers library raises plain Exception and nothing below it
        raise EngineError(f"tokenizer in {str(folder)!r} cannot be loaded: {error}") from error
    if not tokenizer.chat_template:
        raise EngineError(f"tokenizer in {str(folder)!r} has no chat template; prompts are chat messages")
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def load_config(folder: Path) -> PreTrainedConfig:
    """The folder's model configuration; EngineError for an architecture that transformers itself does not have."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as error:
        raise EngineError(f"configuration in {str(folder)!r} cannot be loaded: {error}") from error
    assert isinstance(config, PreTrainedConfig)
    return config


def is_classifier(config: PreTrainedConfig) -> bool:
    """Whether a model's configuration is a sequence classifier's."""
    architectures = getattr(config, "architectures", None) or [""]
    return str(architectures[0]).endswith("ForSequenceClassification")


def load_causal_lm(
    folder: Path, dtype: torch.dtype | str, *, device: str | torch.device = "cpu", attn: str = "sdpa"
) -> PreTrainedModel:
    """The folder's model in `dtype` on `device`, in eval mode, without code from the folder.

    Raises EngineError where the files lack a weight or hold one of another shape. A model that caps its attention
    logits (Gemma 2) attends by "eager" instead of "sdpa", which would leave the cap out.
    """
    dtype = torch_dtype(dtype) if isinstance(dtype, str) else dtype
    if attn == "sdpa" and getattr(load_config(folder).get_text_config(), "attn_logit_softcapping", None):
        attn = "eager"
    return load_pretrained(AutoModelForCausalLM, folder, dtype, device=device, attn=attn)


def load_pretrained(
    kind: Any,
    folder: Path,
    dtype: torch.dtype,
    *,
    device: str | torch.device,
    attn: str = "sdpa",
    unused: tuple[str, ...] = (),
) -> PreTrainedModel:
    """The folder's model by one of transformers' auto classes; weights whose names begin with `unused` are left out.

    Raises EngineError where the files lack a weight or hold one of another shape.
    """
    try:
        loaded: Any = kind.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attn,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise EngineError(f"model in {str(folder)!r} cannot be loaded: {error}") from error
    model, info = loaded
    assert isinstance(model, PreTrainedModel)
    wrong = sorted(str(name) for kind in ("missing_keys", "mismatched_keys") for name in info[kind])
    if wrong:
        raise EngineError(f"model in {str(folder)!r} lacks weights or has them in other shapes: {_some(wrong)}")
    unexpected = sorted(name for name in info["unexpected_keys"] if not name.startswith(unused))
    if unexpected:
        logger.warning("weights that the model has no place for: %s", _some(unexpected))
    model.to(torch.device(device))  # type: ignore[arg-type]
    model.train(False)
    return model


def context_length(config: PreTrainedConfig) -> int | None:
    """Most tokens that prompt and completion may have together, or None where the configuration sets no limit."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) else None


def chat_prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of one conversation; see `chat_prompts_ids`."""
    return chat_prompts_ids(tokenizer, [messages])[0]


def chat_prompts_ids(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Mapping[str, str]]]
) -> list[list[int]]:
    """Token ids of each conversation ({"role", "content"}) up to where the assistant's completion begins.

    Special tokens are the template's alone: the tokenizer is told to add no second BOS. A template that asks for the
    date is told the same one every day: a prompt's ids depend on its messages alone. DataError for messages that the
    template refuses, and for a template that takes too long or makes too much of them.
    """
    encoded: list[Any] = [tokenizer(text, add_special_tokens=False) for text in rendered(tokenizer, conversations)]
    return [[int(token_id) for token_id in each["input_ids"]] for each in encoded]


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Digest of all that `chat_prompt_ids` depends on beside the messages; None for a tokenizer that cannot say.

    It is that of the loaded tokenizer and not of its files: exports write the same tokenizer in other words.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    # What the last call was told stays in the backend; every call says it anew.
    backend.no_truncation()
    backend.no_padding()
    state = {
        "class": type(tokenizer).__name__,
        "backend": hashlib.sha256(backend.to_str().encode()).hexdigest(),
        "chat_template": tokenizer.chat_template,
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "split_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
    }
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def end_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> frozenset[int]:
    """Every token id that ends a completion: of generation_config.json, of config.json and the tokenizer's EOS.

    The three often disagree: chat models end turns with one token and texts with another.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        content = read_json(path) if path.is_file() else {}
        for part in (content, content.get("text_config") or {}):
            ids = part.get("eos_token_id")
            listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
            if not all(isinstance(token_id, int) for token_id in listed):
                raise EngineError(f"expected token ids as eos_token_id in {str(path)!r}, got {ids!r:.80}")
            found |= set(listed)
    tokenizer_eos = (tokenizer or load_tokenizer(folder)).eos_token_id
    if isinstance(tokenizer_eos, int):
        found.add(tokenizer_eos)
    if not found:
        raise EngineError(f"model folder {str(folder)!r} names no end token: no completion would ever stop")
    return frozenset(found)


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of `token_ids` without special tokens, spaces as they were sampled."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """The weights of a model under their Hugging Face names."""

    shapes: Mapping[str, tuple[int, ...]]
    """Name to shape of every weight, tied copies included."""
    tied: Mapping[str, str]
    """Name of a tied copy to the weight that it shares: {"lm_head.weight": "model.embed_tokens.weight"}."""

    @classmethod
    def of_model(cls, model: torch.nn.Module) -> "WeightLayout":
        """The layout of a model in memory."""
        first: dict[int, str] = {}
        tied = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            original = first.setdefault(id(parameter), name)
            if original != name:
                tied[name] = original
        return cls({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, tied)

    @classmethod
    def of_folder(cls, folder: Path) -> "WeightLayout":
        """The layout of the model that the folder's config.json describes; no weight is read."""
        with torch.device("meta"):
            model: torch.nn.Module = AutoModelForCausalLM.from_config(load_config(folder))  # type: ignore[no-untyped-call]
        return cls.of_model(model)


def check_weights(
    weights: Iterable[tuple[str, torch.Tensor]], shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """`weights` by name, once each, in the model's shapes, with nothing missing; tied copies are left out.

    `shapes` and `tied` are those of a WeightLayout. A tied copy may be missing; if it comes, it must be equal. Raises
    EngineError on anything else, so that nothing is loaded from a set that does not fit.
    """
    given: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        shape = shapes.get(tied.get(name, name))
        if shape is None:
            raise EngineError(f"unknown weight {name!r}: the model has {len(shapes)} others, such as {_some(shapes)}")
        if tuple(tensor.shape) != shape:
            raise EngineError(f"weight {name!r} has shape {tuple(tensor.shape)}, expected {shape}")
        if name in given:
            raise EngineError(f"weight {name!r} came twice")
        given[name] = tensor
    missing = sorted(name for name in shapes if name not in given and name not in tied)
    if missing:
        raise EngineError(f"{len(missing)} of {len(shapes)} weights are missing: {_some(missing)}")
    for name, original in tied.items():
        copy = given.pop(name, None)
        if copy is not None and not torch.equal(copy.to(given[original].device), given[original]):
            raise EngineError(f"weight {name!r} is tied to {original!r} in this model, but their values differ")
    return given


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:5]) + (", ..." if len(listed) > 5 else "")
