"""What every sampler offers, whatever engine is behind it.

Trap: a sample may depend on its own seed and prompt only, never on its place in a batch; otherwise a resumed run or
another batch size would draw other completions.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from ratchet.errors import ConfigError, EngineError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to sample; the same for every request of a call."""

    temperature: float
    """Above 0, or 0 for greedy decoding."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all."""
    top_k: int | None = None
    """Keep the k most likely tokens; None keeps all."""
    max_tokens: int
    """Most completion tokens, the end token included."""
    ignore_eos: bool = False
    """Sample to `max_tokens` whatever comes: for benchmarks."""
    with_log_probs: bool = True
    """Whether each token's log-prob (nats, after temperature and truncation) is wanted."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"expected a temperature of 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"expected top_p above 0 and at most 1, got {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"expected top_k of at least 1, or None to keep all tokens, got {self.top_k}")
        if self.max_tokens < 1:
            raise ConfigError(f"expected max_tokens of at least 1, got {self.max_tokens}")


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion to draw."""

    prompt_token_ids: Sequence[int]
    """Token ids exactly as the policy sees them; nothing is prepended."""
    seed: int
    """0 <= seed < 2**63, derived from (seed, step, prompt_id, sample_index)."""
    with_log_probs: bool = True
    """Whether this request's log-probs are wanted, where `SamplingParams.with_log_probs` wants any."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion as it was sampled.

    Example: Completion(token_ids=[24, 2], log_probs=[-0.11, -0.02], text="6", finish_reason="stop").
    """

    token_ids: list[int]
    """Sampled token ids, the end token included where it was sampled."""
    log_probs: list[float] | None
    """One log-prob a token, in nats, or None where none was asked for."""
    text: str
    """The decoded tokens without special tokens."""
    finish_reason: Literal["stop", "length"]
    """"stop" after an end token, "length" at `max_tokens`."""


class Sampler(Protocol):
    """An engine that holds one policy and draws completions from it."""

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Completion]:
        """Draw one completion for each request, in the order of the requests."""

    def load_weights(self, weights: "Iterable[tuple[str, torch.Tensor]]") -> None:
        """Replace the weights in place by tensors under their Hugging Face names, and forget every cached prefix.

        A tied output embedding may be missing. An unknown name or a wrong shape raises EngineError.
        """

    def fingerprint(self) -> int | None:
        """The number (see `engines.fingerprint`) of the weights as the engine holds them, None if it cannot say."""

    def prompt_log_probs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of `token_ids[1:]`, each given those before it: nats, temperature 1, no truncation.

        Raises EngineError where the context has no room for one token more.
        """

    def sleep(self) -> None:
        """Give back what memory it can until the next call, which wakes it; a no-op where there is nothing to give."""

    def close(self) -> None:
        """Give the memory back; the sampler is not usable afterwards."""


def check_requests(
    requests: Sequence[SampleRequest], params: SamplingParams, *, vocab_size: int, context_length: int | None
) -> None:
    """Raise EngineError, naming the request's index, unless the model can sample every request to `max_tokens`."""
    for index, request in enumerate(requests):
        prompt = request.prompt_token_ids
        if len(prompt) == 0:
            raise EngineError(f"request {index} has an empty prompt")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise EngineError(
                f"request {index} has token ids from {min(prompt)} to {max(prompt)}, expected 0 to {vocab_size - 1}"
            )
        if context_length is not None and len(prompt) + params.max_tokens > context_length:
            raise EngineError(
                f"request {index} has {len(prompt)} prompt tokens; with max_tokens {params.max_tokens} that exceeds "
                f"the model's context of {context_length}"
            )
        if not 0 <= request.seed < 1 << 63:
            raise EngineError(f"request {index} has seed {request.seed}, expected 0 <= seed < 2**63")


def check_prompt(token_ids: Sequence[int], *, vocab_size: int, context_length: int | None) -> None:
    """Raise EngineError unless `prompt_log_probs` can score `token_ids`: as a prompt with one token after it."""
    params = SamplingParams(temperature=0, max_tokens=1)
    check_requests([SampleRequest(token_ids, seed=0)], params, vocab_size=vocab_size, context_length=context_length)
