"""Sampling by Gumbel noise from a counter: the noise of a token is a hash of (seed, position, token id).

Trap: a generator's next number depends on how often it was called, so a sample drawn from one depends on its batch;
a counter-based hash does not (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Integers agree bit
for bit on every device; the logarithms may differ there in the last bit.
"""

import math

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# Small enough that the three work buffers stay in a core's cache: the noise is bound by memory otherwise.
_CPU_CHUNK = 1 << 15


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _mix_(state: torch.Tensor, work: torch.Tensor) -> None:
    """SplitMix64's finaliser (Steele et al. 2014), in place; torch shifts signed words, hence the masks."""
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1]), (31, None)):
        torch.bitwise_right_shift(state, shift, out=work)
        work.bitwise_and_((1 << (64 - shift)) - 1)
        state.bitwise_xor_(work)
        if factor is not None:
            state.mul_(_signed(factor))


def _row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One 64-bit key per row; mixing the seed first keeps (seed, position) and (seed + 1, position - 1) apart."""
    keys = seeds * _signed(_GOLDEN)
    work = torch.empty_like(keys)
    _mix_(keys, work)
    keys.add_(positions * _signed(_GOLDEN))
    _mix_(keys, work)
    return keys


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise [B, V] (fp32, finite) for `seeds` [B] and `positions` [B] (int64).

    Entry [b, v] depends on (seeds[b], positions[b], v) alone.
    """
    keys = _row_keys(seeds, positions)
    # The word's index enters multiplied, as SplitMix64 counts: neighbouring ids differ in every bit before mixing.
    counters = torch.arange(1, vocab_size + 1, device=seeds.device) * _signed(_GOLDEN)
    noise = torch.empty(len(keys), vocab_size, device=seeds.device)
    rows = len(keys) if noise.is_cuda else 1
    width = vocab_size if noise.is_cuda else _CPU_CHUNK
    for row in range(0, len(keys), rows):
        for start in range(0, vocab_size, width):
            words = keys[row : row + rows, None] + counters[None, start : start + width]
            work = torch.empty_like(words)
            _mix_(words, work)
            # 53 bits at the middle of their interval; as fp32 fine-grained near 0, which is where large noise is made.
            torch.bitwise_right_shift(words, 11, out=work)
            work.bitwise_and_((1 << 53) - 1)
            uniform = noise[row : row + rows, start : start + width]
            uniform.copy_(work)
            uniform.add_(0.5).mul_(2.0**-53).clamp_(max=1 - 2.0**-24)
            uniform.neg_().log1p_().neg_().log_().neg_()
    return noise


def sample_tokens(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int | None = None,
    with_log_probs: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draw one token a row from `logits` [B, V] (fp32): token ids [B] and their log-probs [B] (fp32, nats) or None.

    The log-prob is after temperature and renormalised over what top-k, then top-p, keep: vLLM's "processed_logprobs".
    Temperature 0 takes the most likely token, and its log-prob is that of the logits as they are (temperature 1, no
    truncation), again as in vLLM. Tokens that tie with the last one kept are kept.
    """
    if temperature == 0:
        token_ids = logits.argmax(dim=-1)
    else:
        logits = _truncated(logits / temperature if temperature != 1 else logits, top_p, top_k)
        # Gumbel-max: argmax(logits + noise) is distributed as softmax(logits).
        token_ids = gumbel_noise(seeds, positions, logits.shape[-1]).add_(logits).argmax(dim=-1)
    if not with_log_probs:
        return token_ids, None
    sampled = logits.gather(-1, token_ids[:, None])[:, 0]
    return token_ids, sampled - logits.logsumexp(dim=-1)


def _truncated(logits: torch.Tensor, top_p: float, top_k: int | None) -> torch.Tensor:
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    if top_p < 1:
        ordered = logits.sort(dim=-1, descending=True).values
        probs = ordered.softmax(dim=-1)
        # A token is kept while those before it have not reached top_p; the first always is.
        num_kept = (probs.cumsum(dim=-1) - probs < top_p).sum(dim=-1, keepdim=True)
        smallest = ordered.gather(-1, num_kept.clamp(min=1) - 1)
        logits = logits.masked_fill(logits < smallest, -math.inf)
    return logits
