"""Rewards from a sequence classifier, or from any decoder with a head of one number.

Trap: the number stands at the last token, and classifiers of transformers take the last one that is not padding by its
id: where padding and end of text are one token, a text that ends in it is judged one token earlier. That is how such
a model was trained, so it is done here too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedTokenizerBase

from ratchet.data.packing import pack_by_tokens
from ratchet.engines.model import load_config, load_tokenizer, torch_dtype
from ratchet.engines.packed import pack
from ratchet.engines.process_group import local_device
from ratchet.engines.scorer import FrozenModel
from ratchet.engines.value_model import ValueModel, no_head, read_head
from ratchet.errors import DataError, EngineError


def check_reward_model(folder: Path) -> None:
    """Raise EngineError where the folder lacks a head or a tokenizer with a chat template; no model is made."""
    load_tokenizer(folder)
    if read_head(folder, load_config(folder).get_text_config().hidden_size) is None:
        raise EngineError(no_head(folder))


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
        config = load_config(folder)
        architectures = getattr(config, "architectures", None) or [""]
        is_classifier = architectures[0].endswith("ForSequenceClassification")
        return cls(
            ValueModel.from_folder(folder, torch_dtype(compute_dtype), device=place, needs_head=True),
            load_tokenizer(folder),
            padding_id=config.get_text_config().pad_token_id if is_classifier else None,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            device=place,
        )

    def scores(self, texts: Sequence[str]) -> list[float]:
        """One number for each text, in order; raises DataError for an empty one.

        A text is what a chat template renders, with all its special tokens: none is added.
        """
        return self._scores([self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])

    def chat_scores(self, conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[float]:
        """One number for each conversation of {"role", "content"} messages, through the model's own chat template."""
        rendered = [
            self._tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False)
            for messages in conversations
        ]
        return self.scores(rendered)

    @torch.no_grad()
    def _scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        judged = [self._without_padding(ids, index) for index, ids in enumerate(sequences)]
        lengths = [len(ids) for ids in judged]
        found = [0.0] * len(judged)
        for places in pack_by_tokens(lengths, self._max_tokens):
            packed = pack([judged[place] for place in places], [[]] * len(places), None, self._device)
            last = torch.tensor(list(accumulate(packed.sequence_lengths)), device=self._device) - 1
            for place, value in zip(places, self._module(replace(packed, predictors=last)).tolist(), strict=True):
                found[place] = value
        return found

    def _without_padding(self, ids: Sequence[int], index: int) -> list[int]:
        """The tokens up to the one that is judged; attention is causal, so that those behind it say nothing."""
        if not ids:
            raise DataError(f"expected at least one token, got none in text {index}")
        length = len(ids)
        while length > 1 and ids[length - 1] == self._padding_id:
            length -= 1
        return list(ids[:length])
