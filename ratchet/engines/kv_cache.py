"""Keys and values of the tokens so far, and the attention of one new token over them.

Trap: transformers' DynamicCache concatenates and its attention repeats the KV heads, so every token copies the whole
cache several times; here a token writes one column and nothing is repeated. Layers with a sliding window keep every
column too: the attention mask hides what the window excludes.
"""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_DECODE_ATTENTION = "ratchet_decode"


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer; `keys` and `values` [B, heads, T, head_dim] are views of the buffers' first T columns."""

    def __init__(self, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.room = room
        self.buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `key_states` and `value_states` [B, heads, T_new, head_dim] and return all columns."""
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        if self.buffers is None:
            self.lazy_initialization(key_states, value_states)
            self.buffers = (self._buffer(key_states, len(key_states)), self._buffer(value_states, len(value_states)))
        keys, values = self.buffers
        keys[:, :, start:stop] = key_states
        values[:, :, start:stop] = value_states
        self.keys, self.values = keys[:, :, :stop], values[:, :, :stop]
        return self.keys, self.values

    def _buffer(self, states: torch.Tensor, batch: int) -> torch.Tensor:
        return states.new_empty(batch, states.shape[1], self.room, states.shape[-1])

    def select(self, rows: torch.Tensor, padding: int) -> None:
        """Keep `rows` of the batch, without their first `padding` columns."""
        if self.buffers is None or self.keys is None or self.values is None:
            return
        stop = self.get_seq_length() - padding
        self.room -= padding
        keys, values = (self._buffer(states, len(rows)) for states in self.buffers)
        keys[:, :, :stop] = self.keys[rows, :, padding:]
        values[:, :, :stop] = self.values[rows, :, padding:]
        self.buffers = (keys, values)
        self.keys, self.values = keys[:, :, :stop], values[:, :, :stop]


class KVCache(Cache):
    """A cache for `room` tokens a row."""

    def __init__(self, room: int) -> None:
        super().__init__(layer_class_to_replicate=lambda: _Layer(room))  # type: ignore[arg-type]

    def select(self, rows: torch.Tensor, padding: int) -> None:
        """Make `rows` (indices, repeats allowed) the batch, without the first `padding` columns of each."""
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            layer.select(rows, padding)


def _decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` [B, heads, T_new, head_dim] over `key` and `value` [B, KV heads, T, head_dim].

    For one new token the query heads that share a KV head become queries of that one head: the same numbers as with
    repeated KV heads, six times faster on CPU in bfloat16.
    """
    if query.shape[2] != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    batch, heads, _, width = query.shape
    folded = query.reshape(batch, key.shape[1], heads // key.shape[1], width)
    if attention_mask is not None:
        attention_mask = attention_mask.expand(-1, -1, folded.shape[2], -1)
    output = torch.nn.functional.scaled_dot_product_attention(folded, key, value, attention_mask, scale=scaling)
    return output.reshape(batch, 1, heads, -1), None


AttentionInterface.register(_DECODE_ATTENTION, _decode_attention)
AttentionMaskInterface.register(_DECODE_ATTENTION, sdpa_mask)


def use_decode_attention(model: PreTrainedModel) -> None:
    """Let a model that attends by PyTorch's SDPA decode by the faster form of it; leave any other as it is."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(_DECODE_ATTENTION)
