"""Rewards from a sequence classifier, or from any decoder with a head of one number.

Trap: the number stands at the last token, and classifiers of transformers take the last one that is not padding by its
id: where padding and end of text are one token, a text that ends in it is judged one token earlier. That is how such
a model was trained, so it is done here too.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedTokenizerBase

from ratchet.engines.model import chat_prompt_ids, load_config, load_tokenizer, torch_dtype
from ratchet.engines.process_group import local_device
from ratchet.engines.scorer import FrozenModel
from ratchet.engines.value_model import ValueModel, judged, last_values, no_head, padding_id, read_head
from ratchet.errors import DataError, EngineError


def check_reward_model(folder: Path) -> None:
    """Raise EngineError where the folder lacks a head or a tokenizer with a chat template; no model is made."""
    load_tokenizer(folder)
    if read_head(folder, load_config(folder).get_text_config().hidden_size) is None:
        raise EngineError(no_head(folder))


def whole_conversation_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The ids of a whole conversation of {"role", "content"} messages as reward models read it.

    Trap: it ends with what the chat template writes last, often a line break behind the token that ends the turn.
    """
    text: Any = tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False)
    return _text_ids(tokenizer, text)


def conversations_of_a_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[Mapping[str, str]],
    completions: Sequence[Sequence[Mapping[str, str]]],
) -> tuple[list[int], list[list[int]]]:
    """The ids of conversations that begin with one prompt: (what all have in common of its ids, the rest of each).

    Together they are those of `whole_conversation_ids`: what a reward model is trained on must end where it judges.
    Raises DataError where a conversation has nothing beyond what they have in common.
    """
    wholes = [whole_conversation_ids(tokenizer, [*prompt, *completion]) for completion in completions]
    common = [chat_prompt_ids(tokenizer, prompt), *wholes]
    places = zip(*common, strict=False)
    length = next((place for place, ids in enumerate(places) if len(set(ids)) > 1), min(map(len, common)))
    if not length or any(len(ids) == length for ids in wholes):
        got = f"{length} tokens in common of {', '.join(str(len(ids)) for ids in wholes)}"
        raise DataError(f"expected conversations that begin with the prompt and go on, got {got}")
    return wholes[0][:length], [ids[length:] for ids in wholes]


def _text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    encoded: Any = tokenizer(text, add_special_tokens=False)
    return [int(token_id) for token_id in encoded["input_ids"]]


class RewardModel(FrozenModel[ValueModel]):
    """A frozen model that judges whole texts."""

    def __init__(
        self,
        module: ValueModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        padding_id: int | None,
        max_tokens_per_micro_batch: int,
        device: torch.device,
    ) -> None:
        """Use `from_folder`; trailing tokens of `padding_id` are not judged."""
        super().__init__(module, max_tokens_per_micro_batch=max_tokens_per_micro_batch, device=device)
        self._tokenizer: Any = tokenizer
        self._padding_id = padding_id

    @classmethod
    def from_folder(
        cls, folder: Path, *, compute_dtype: str, max_tokens_per_micro_batch: int, device: str = "auto"
    ) -> Self:
        """Load a classifier of one label, or a causal language model's folder that holds a head (see value_model).

        The head computes in float32. Raises EngineError without a head or a tokenizer with a chat template.
        """
        place = local_device(device)
        return cls(
            ValueModel.from_folder(folder, torch_dtype(compute_dtype), device=place, needs_head=True),
            load_tokenizer(folder),
            padding_id=padding_id(load_config(folder)),
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            device=place,
        )

    def scores(self, texts: Sequence[str]) -> list[float]:
        """One number for each text, in order; raises DataError for an empty one.

        A text is what a chat template renders, with all its special tokens: none is added.
        """
        return self.token_scores([_text_ids(self._tokenizer, text) for text in texts])

    def chat_scores(self, conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[float]:
        """One number for each conversation of {"role", "content"} messages, through the model's own chat template."""
        return self.token_scores([whole_conversation_ids(self._tokenizer, messages) for messages in conversations])

    def token_scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """One number for each text as its token ids, in order; raises DataError for an empty one."""
        for index, ids in enumerate(sequences):
            if not ids:
                raise DataError(f"expected at least one token, got none in text {index}")
        cut = [judged(ids, self._padding_id) for ids in sequences]
        return last_values(self._module, cut, max_tokens=self._max_tokens, device=self._device)
