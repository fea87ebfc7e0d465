"""Sampling with Hugging Face models: the sampler for machines without vLLM.

Trap: `generate` draws from one global generator, so its samples depend on the batch; this loop draws every token from a
hash of (request seed, position) instead, and a row's tokens follow from its own prompt and seed (up to float rounding,
which a batch of another shape may change).
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ratchet.engines.fingerprint import fingerprint
from ratchet.engines.gumbel import sample_tokens
from ratchet.engines.kv_cache import KVCache, use_decode_attention
from ratchet.engines.model import (
    WeightLayout,
    check_weights,
    context_length,
    decode,
    end_token_ids,
    load_causal_lm,
    load_tokenizer,
    torch_device,
)
from ratchet.engines.sampler import Completion, SampleRequest, SamplingParams, check_prompt, check_requests
from ratchet.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Row:
    """One request that is being sampled."""

    index: int
    token_ids: list[int]
    log_probs: list[float]
    stopped: bool = False


class HFSampler:
    """A Sampler over a Hugging Face model held in this process; see `ratchet.engines.sampler.Sampler`."""

    def __init__(self, model_folder: Path, *, dtype: str, device: str = "auto", max_num_seqs: int = 64) -> None:
        """`max_num_seqs` requests are decoded at a time. `model_folder` must pass `check_model_folder`."""
        if max_num_seqs < 1:
            raise ConfigError(f"expected max_num_seqs of at least 1, got {max_num_seqs}")
        self._tokenizer = load_tokenizer(model_folder)
        self._end_ids = end_token_ids(model_folder, self._tokenizer)
        self._device = torch_device(device)
        self._model: PreTrainedModel | None = load_causal_lm(model_folder, dtype, device=self._device)
        use_decode_attention(self._model)
        self._context = context_length(self._model.config)
        self._max_num_seqs = max_num_seqs

    @property
    def model(self) -> PreTrainedModel:
        """The model that is sampled from; closed samplers have none."""
        if self._model is None:
            raise EngineError("the sampler is closed")
        return self._model

    @property
    def _vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Completion]:
        """Draw one completion for each request, in the order of the requests."""
        check_requests(requests, params, vocab_size=self._vocab_size, context_length=self._context)
        completions: list[Completion | None] = [None] * len(requests)
        for wave in _waves(requests, self._max_num_seqs):
            for row in self._sample_wave(requests, wave, params):
                completions[row.index] = Completion(
                    token_ids=row.token_ids,
                    log_probs=row.log_probs if params.with_log_probs and requests[row.index].with_log_probs else None,
                    text=decode(self._tokenizer, row.token_ids),
                    finish_reason="stop" if row.stopped else "length",
                )
        assert all(completion is not None for completion in completions)
        return [completion for completion in completions if completion is not None]

    @torch.inference_mode()
    def _sample_wave(
        self, requests: Sequence[SampleRequest], wave: Sequence[int], params: SamplingParams
    ) -> list[_Row]:
        device = self._device
        rows = [_Row(index, [], []) for index in wave]
        batch = _Batch.prefilled(self.model, [requests[row.index].prompt_token_ids for row in rows], params.max_tokens)
        seeds = torch.tensor([requests[row.index].seed for row in rows], device=device)
        alive = list(rows)
        for position in range(params.max_tokens):
            token_ids, log_probs = sample_tokens(
                batch.logits,
                seeds,
                torch.full_like(seeds, position),
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                with_log_probs=params.with_log_probs,
            )
            self._record(alive, token_ids.tolist(), None if log_probs is None else log_probs.tolist(), params)
            kept = [slot for slot, row in enumerate(alive) if not row.stopped]
            if not kept or position + 1 == params.max_tokens:
                break
            # Moving the cache costs about one forward pass; it pays once an eighth of the rows has finished.
            if len(alive) - len(kept) >= max(1, len(alive) // 8):
                index = torch.tensor(kept, device=device)
                batch.keep(index)
                seeds, token_ids = seeds[index], token_ids[index]
                alive = [alive[slot] for slot in kept]
            batch.advance(self.model, token_ids)
        return rows

    def _record(
        self, rows: Sequence[_Row], token_ids: list[int], log_probs: list[float] | None, params: SamplingParams
    ) -> None:
        for slot, (row, token_id) in enumerate(zip(rows, token_ids, strict=True)):
            if row.stopped:
                continue
            row.token_ids.append(token_id)
            if log_probs is not None:
                row.log_probs.append(log_probs[slot])
            row.stopped = not params.ignore_eos and token_id in self._end_ids

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the weights in place; on EngineError they are as they were. See `Sampler.load_weights`."""
        layout, own = WeightLayout.of_model(self.model), self.model.state_dict()
        for name, tensor in check_weights(weights, layout.shapes, layout.tied).items():
            own[name].copy_(tensor)

    def fingerprint(self) -> int:
        """The fingerprint of the weights. See `Sampler.fingerprint`."""
        return fingerprint(self.model.parameters())

    @torch.inference_mode()
    def prompt_log_probs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of `token_ids[1:]`. See `Sampler.prompt_log_probs`."""
        check_prompt(token_ids, vocab_size=self._vocab_size, context_length=self._context)
        batch = torch.tensor([list(token_ids)], device=self._device)
        logits = self.model(input_ids=batch, use_cache=False).logits[0, :-1].float()
        log_probs: list[float] = logits.log_softmax(dim=-1).gather(-1, batch[0, 1:, None])[:, 0].tolist()
        return log_probs

    def sleep(self) -> None:
        """Nothing to give back: the weights are all that it holds between calls."""

    def close(self) -> None:
        """Give the memory back; the sampler is not usable afterwards."""
        self._model = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _waves(requests: Sequence[SampleRequest], max_num_seqs: int) -> Iterator[list[int]]:
    """Indices of the requests that are decoded together: equal prompts side by side, then prompts of like length."""
    indices_of: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        indices_of.setdefault(tuple(request.prompt_token_ids), []).append(index)
    order = [index for prompt in sorted(indices_of, key=len) for index in indices_of[prompt]]
    for start in range(0, len(order), max_num_seqs):
        yield order[start : start + max_num_seqs]


class _Batch:
    """Rows in flight: their cache, their next-token logits [B, V] (fp32), attention mask and next position [B].

    Prompts are padded on the left, so that every row's next token has one column; padding is masked and takes no part
    in the position ids.
    """

    def __init__(self, cache: KVCache, logits: torch.Tensor, mask: torch.Tensor) -> None:
        self.logits = logits
        self._cache = cache
        self._mask = mask
        self._positions = mask.sum(dim=-1)

    @classmethod
    def prefilled(cls, model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_tokens: int) -> "_Batch":
        """Run every distinct prompt once and give each row a copy of its prompt's cache."""
        distinct = {tuple(prompt): None for prompt in prompts}
        slot_of = {prompt: slot for slot, prompt in enumerate(distinct)}
        length = max(len(prompt) for prompt in distinct)
        token_ids = torch.tensor([[0] * (length - len(prompt)) + list(prompt) for prompt in distinct])
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in distinct])
        token_ids, mask = token_ids.to(model.device), mask.to(model.device)
        cache = KVCache(room=length + max_tokens)
        logits = _next_logits(model, token_ids, mask, (mask.cumsum(dim=-1) - 1).clamp(min=0), cache)
        rows = torch.tensor([slot_of[tuple(prompt)] for prompt in prompts], device=model.device)
        batch = cls(cache, logits, mask)
        if rows.tolist() != list(range(len(distinct))):
            batch.keep(rows)
            batch.logits = logits[rows]
        return batch

    def keep(self, rows: torch.Tensor) -> None:
        """Make `rows` (slots, in any order and number) the rows of the batch; the logits are those of `advance`."""
        mask = self._mask[rows]
        # Columns that are padding in every row that is left cost attention for nothing.
        padding = int(mask.argmax(dim=-1).min())
        self._cache.select(rows, padding)
        self._mask = mask[:, padding:]
        self._positions = self._positions[rows]

    def advance(self, model: PreTrainedModel, token_ids: torch.Tensor) -> None:
        """Append one token a row [B] and compute the logits that follow."""
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        self.logits = _next_logits(model, token_ids[:, None], self._mask, self._positions[:, None], self._cache)
        self._positions = self._positions + 1


def _next_logits(
    model: PreTrainedModel, token_ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: KVCache
) -> torch.Tensor:
    output = model(
        input_ids=token_ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: torch.Tensor = output.logits[:, -1]
    return logits.float()
