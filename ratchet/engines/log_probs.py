"""Log-probs and entropies of sampled tokens from a causal language model, over packed sequences.

Trap: the hidden state at place t scores the token at place t + 1, and the model must run with `use_cache=False`, since
with a cache transformers lets packed sequences see each other. The logits of all tokens, [T, V], never exist at once,
in neither direction: they are computed in chunks, and again in the backward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ratchet.data.packing import pack_by_tokens
from ratchet.engines.packed_attention import attention_arguments, use_packed_attention
from ratchet.errors import DataError, EngineError

CHUNK_ELEMENTS = 2**25
"""Logits of one chunk, 128 MiB in float32. Chunks are part of the arithmetic: they must not depend on the machine."""


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
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]] | None,
    device: torch.device,
) -> PackedTokens:
    """Pack prompt + completion of each row; the completion tokens inside `masks` (None: all) are scored, in row order.

    No rows give one dummy token and nothing scored, so that a rank without work can join its peers' collectives. Raises
    DataError for a completion without a prompt, whose first token nothing predicts.
    """
    ids: list[int] = []
    positions: list[int] = []
    lengths: list[int] = []
    predictors: list[int] = []
    targets: list[int] = []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if not prompt:
            raise DataError(f"expected at least one prompt token, got none in row {row}")
        first = len(ids) + len(prompt) - 1
        for place, token in enumerate(completion):
            if masks is None or masks[row][place]:
                predictors.append(first + place)
                targets.append(token)
        ids += [*prompt, *completion]
        lengths.append(len(prompt) + len(completion))
        positions += range(lengths[-1])
    if not lengths:
        ids, positions, lengths = [0], [0], [1]
    return PackedTokens(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        sequence_lengths=lengths,
        predictors=torch.tensor(predictors, dtype=torch.long, device=device),
        targets=torch.tensor(targets, dtype=torch.long, device=device),
    )


class PackedLogProbs(nn.Module):
    """A causal language model that answers with log-probs instead of logits.

    Dropout is switched off for good: a ratio of probabilities means nothing if either is noisy.
    """

    def __init__(self, model: PreTrainedModel, *, temperature: float) -> None:
        super().__init__()
        if temperature <= 0:
            raise EngineError(f"expected a temperature above 0, got {temperature}")
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
            raise EngineError(f"expected an output layer without bias, got {head} in {type(model).__name__}")
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        use_packed_attention(model)
        self.model: Any = model
        self.temperature = temperature
        self.scale, self.softcap = _logit_options(model.config)

    def forward(
        self, packed: PackedTokens, *, with_entropy: bool = False, entropy_needs_grad: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs [N] (nats, float32, at the temperature) of the scored tokens, and the entropy [N] before each."""
        outputs = self.model.base_model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            use_cache=False,
            **attention_arguments(packed.sequence_lengths, packed.input_ids.device),
        )
        hidden = outputs.last_hidden_state[0].index_select(0, packed.predictors)
        weight = self.model.get_output_embeddings().weight
        log_probs, entropy = _chunked_log_probs(
            hidden, weight, packed.targets, self.scale, self.softcap, self.temperature, with_entropy
        )
        if not with_entropy:
            return log_probs, None
        return log_probs, entropy if entropy_needs_grad else entropy.detach()


def score(
    forward: Callable[[PackedTokens], Tensor],
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    device: torch.device,
) -> list[list[float]]:
    """Log-probs of every completion token, row by row; rows are packed by length and come back in their own order."""
    lengths = [len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True)]
    wanted = [row for row, completion in enumerate(completions) if completion]
    scored: list[list[float]] = [[] for _ in completions]
    for places in pack_by_tokens([lengths[row] for row in wanted], max_tokens):
        rows = [wanted[place] for place in places]
        packed = pack([prompts[row] for row in rows], [completions[row] for row in rows], None, device)
        values = iter(forward(packed).tolist())
        for row in rows:
            scored[row] = [next(values) for _ in completions[row]]
    return scored


class _ChunkedLogProbs(torch.autograd.Function):
    """hidden [N, H], weight [V, H], targets [N] to log-probs [N] and entropy [N], both float32 or wider.

    The gradient of a log-prob by the logits z is onehot - p, that of the entropy S is -p * (log p + S). Logits are
    recomputed chunk by chunk in the backward pass; only their log-sum-exp is kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: float,
        softcap: float | None,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        options = (scale, softcap, temperature)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs, normaliser, entropy = (hidden.new_zeros(len(targets), dtype=dtype) for _ in range(3))
        for rows in _chunks(len(targets), weight.shape[0]):
            logits, _ = _logits(hidden[rows], weight, *options)
            total = torch.logsumexp(logits, dim=-1)
            normaliser[rows] = total
            log_probs[rows] = logits.gather(1, targets[rows, None])[:, 0] - total
            if with_entropy:
                entropy[rows] = total - (torch.exp(logits - total[:, None]).mul_(logits)).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        by_log_prob, by_entropy = gradients
        d_hidden = torch.zeros_like(hidden)
        # Chunks are summed in float32: many small bfloat16 additions would lose the last ones.
        d_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for rows in _chunks(len(targets), weight.shape[0]):
            logits, slope = _logits(hidden[rows], weight, *ctx.options)
            log_p = logits.sub_(normaliser[rows, None])
            p = log_p.exp()
            d_logits = torch.zeros_like(p)
            if by_log_prob is not None:
                d_logits = p * -by_log_prob[rows, None]
                d_logits.scatter_add_(1, targets[rows, None], by_log_prob[rows, None].to(d_logits.dtype))
            if by_entropy is not None:
                d_logits -= p.mul_(log_p.add_(entropy[rows, None])).mul_(by_entropy[rows, None])
            if isinstance(slope, Tensor) or slope != 1.0:
                d_logits = d_logits.mul_(slope)
            d_logits = d_logits.to(hidden.dtype)
            d_hidden[rows] = d_logits @ weight
            d_weight += d_logits.T @ hidden[rows]
        return d_hidden, d_weight.to(weight.dtype), None, None, None, None, None


def _chunked_log_probs(*arguments: Any) -> tuple[Tensor, Tensor]:
    log_probs, entropy = _ChunkedLogProbs.apply(*arguments)  # type: ignore[no-untyped-call]
    return log_probs, entropy


def _logits(
    hidden: Tensor, weight: Tensor, scale: float, softcap: float | None, temperature: float
) -> tuple[Tensor, Tensor | float]:
    """Logits [n, V] in float32 or wider, and their derivative by the output layer's plain products."""
    logits = functional.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32))
    if scale != 1.0:
        logits.mul_(scale)
    slope: Tensor | float = scale / temperature
    if softcap is not None:
        bent = logits.div_(softcap).tanh_()
        slope = (1.0 - bent.square()) * slope
        logits = bent.mul_(softcap)
    if temperature != 1.0:
        logits.div_(temperature)
    return logits, slope


def _chunks(num_rows: int, num_logits: int) -> Iterator[slice]:
    size = max(1, CHUNK_ELEMENTS // num_logits)
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def _logit_options(config: Any) -> tuple[float, float | None]:
    """Factor on the logits and their soft cap, as the model families name them."""
    scale = 1.0
    if getattr(config, "logit_scale", None) is not None:  # Cohere
        scale = float(config.logit_scale)
    elif getattr(config, "logits_scaling", None) is not None:  # Granite
        scale = 1.0 / float(config.logits_scaling)
    softcap = getattr(config, "final_logit_softcapping", None)
    return scale, None if softcap is None else float(softcap)
