"""Sequences laid one after another without padding, and the models that run over them.

Trap: the hidden state at place t belongs to what comes at place t + 1, and a model must run with `use_cache=False`,
since with a cache transformers lets packed sequences see each other.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ratchet.data.packing import Entries, flat, pack_by_tokens
from ratchet.engines.model import check_weights
from ratchet.engines.packed_attention import attention_arguments, use_packed_attention
from ratchet.engines.transfer import to_device
from ratchet.errors import DataError


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Sequences laid one after another, and the tokens among them that are scored (N of T)."""

    input_ids: Tensor
    """int64 [1, T]."""
    position_ids: Tensor
    """int64 [1, T], from 0 in each sequence."""
    sequence_lengths: list[int]
    """Tokens of each sequence; they sum to T."""
    predictors: Tensor
    """int64 [N]: the place whose hidden state predicts the scored token, one before it."""
    targets: Tensor
    """int64 [N]: the scored token ids."""


def pack(
    prompts: Sequence[Entries],
    completions: Sequence[Entries],
    masks: Sequence[Entries] | None,
    device: torch.device,
) -> PackedTokens:
    """Pack prompt + completion of each row; the completion tokens inside `masks` (None: all) are scored, in row order.

    No rows give one dummy token and nothing scored, so that a rank without work can join its peers' collectives. Raises
    DataError for a completion without a prompt, whose first token nothing predicts.
    """
    if not prompts:
        prompts, completions, masks = [[0]], [[]], None
    of_prompts = np.array([len(prompt) for prompt in prompts])
    if not of_prompts.all():
        raise DataError(f"expected at least one prompt token, got none in row {of_prompts.argmin()}")
    lengths = of_prompts + [len(completion) for completion in completions]
    ids = flat([tokens for row in zip(prompts, completions, strict=True) for tokens in row], np.int64)
    positions = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    places = np.flatnonzero(positions >= np.repeat(of_prompts, lengths))
    if masks is not None:
        places = places[flat(masks, np.bool_)]
    parts = [ids, positions, places - 1, ids[places]]
    # One copy to the device for all four.
    tensor = to_device(np.concatenate(parts), device)
    input_ids, position_ids, predictors, targets = torch.split(tensor, [len(part) for part in parts])
    return PackedTokens(input_ids[None], position_ids[None], lengths.tolist(), predictors, targets)


class PackedModel(nn.Module):
    """A Hugging Face model that runs over packed sequences.

    Dropout is switched off for good: a ratio of probabilities, or a difference of values, means nothing if either is
    noisy.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        use_packed_attention(model)
        self.model: Any = model

    def hidden(self, packed: PackedTokens) -> Tensor:
        """Last hidden states [N, H] at the predictors."""
        outputs = self.model.base_model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            use_cache=False,
            **attention_arguments(packed.sequence_lengths, packed.input_ids.device),
        )
        hidden: Tensor = outputs.last_hidden_state[0].index_select(0, packed.predictors)
        return hidden

    def named_weights(self, *, with_tied: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under Hugging Face names; tied ones once, by the name of their first module, unless asked for."""
        yield from self.model.named_parameters(remove_duplicate=not with_tied)

    def float32_modules(self) -> list[nn.Module]:
        """Parts that compute in float32 whatever the rest does."""
        return []

    def load_weights(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights in place, cast to their dtypes; a tied output layer may be missing.

        Raises EngineError, before anything is replaced, for a missing or unknown name or a wrong shape.
        """
        pairs = weights.items() if isinstance(weights, Mapping) else weights
        own = dict(self.named_weights())
        names = {id(parameter): name for name, parameter in own.items()}
        tied = {name: names[id(parameter)] for name, parameter in self.named_weights(with_tied=True) if name not in own}
        given = check_weights(pairs, {name: tuple(parameter.shape) for name, parameter in own.items()}, tied)
        with torch.no_grad():
            for name, tensor in given.items():
                own[name].copy_(tensor)


def score(
    forward: Callable[[PackedTokens], Sequence[Tensor]],
    prompts: Sequence[Entries],
    completions: Sequence[Entries],
    *,
    columns: int = 1,
    max_tokens: int,
    device: torch.device,
) -> list[list[list[float]]]:
    """What `forward` ([N] per column) says of every completion token: by column, by row, by token.

    Rows are packed by length and come back in their own order.
    """
    lengths = [len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True)]
    wanted = [row for row, completion in enumerate(completions) if len(completion)]
    scored: list[list[list[float]]] = [[[] for _ in completions] for _ in range(columns)]
    for places in pack_by_tokens([lengths[row] for row in wanted], max_tokens):
        rows = [wanted[place] for place in places]
        packed = pack([prompts[row] for row in rows], [completions[row] for row in rows], None, device)
        for column, tensor in zip(scored, forward(packed), strict=True):
            values, start = tensor.tolist(), 0
            for row in rows:
                end = start + len(completions[row])
                column[row], start = values[start:end], end
    return scored
