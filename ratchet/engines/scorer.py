"""Log-probs of completions under a frozen model: the reference, or the policy before an update.

Trap: equal weights do not give equal log-probs under another packing or dtype. With the trainer's `compute_dtype` and
`max_tokens_per_micro_batch`, scores are bit for bit those that the trainer's own `log_probs` computes on a CPU.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor

from ratchet.engines.log_probs import PackedLogProbs
from ratchet.engines.model import load_causal_lm, torch_dtype
from ratchet.engines.packed import PackedModel, PackedTokens, score
from ratchet.engines.process_group import local_device

AnyModel = TypeVar("AnyModel", bound=PackedModel)


class FrozenModel(Generic[AnyModel]):
    """A model that only scores, on one device, without process group."""

    def __init__(self, module: AnyModel, *, max_tokens_per_micro_batch: int, device: torch.device) -> None:
        """Use `from_folder`."""
        self._module = module.eval().requires_grad_(False)
        self._max_tokens = max_tokens_per_micro_batch
        self._device = device

    def load_weights(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights in place, cast to the compute dtype; a tied output layer may be missing.

        Raises EngineError, before anything is replaced, for a missing or unknown name or a wrong shape.
        """
        self._module.load_weights(weights)

    def close(self) -> None:
        """Give the memory back; the scorer is not usable afterwards."""
        del self._module
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class Scorer(FrozenModel[PackedLogProbs]):
    """A frozen policy."""

    @classmethod
    def from_folder(
        cls,
        model_folder: Path,
        *,
        compute_dtype: str,
        temperature: float,
        max_tokens_per_micro_batch: int,
        device: str = "auto",
    ) -> Self:
        """Load a Hugging Face folder in `compute_dtype` ("float32" or "bfloat16"). Raises EngineError."""
        place = local_device(device)
        model = load_causal_lm(model_folder, torch_dtype(compute_dtype), device=place)
        module = PackedLogProbs(model, temperature=temperature)
        return cls(module, max_tokens_per_micro_batch=max_tokens_per_micro_batch, device=place)

    def log_probs(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """One log-prob (nats, at the temperature) for each token of each completion, in the order of the rows.

        An empty completion gets an empty list. Raises DataError for an empty prompt.
        """
        return self._scores(prompts, completions, with_squares=False)[0]

    def scores_with_sum_pi_squared(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
    ) -> tuple[list[list[float]], list[list[float]]]:
        """The log-probs, and for each token the sum over the vocabulary of squared probabilities before it."""
        log_probs, squares = self._scores(prompts, completions, with_squares=True)
        return log_probs, squares

    def _scores(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], *, with_squares: bool
    ) -> list[list[list[float]]]:
        @torch.no_grad()
        def forward(packed: PackedTokens) -> list[Tensor]:
            found = self._module(packed, with_sum_pi_squared=with_squares)
            return [found.log_probs, found.sum_pi_squared] if with_squares else [found.log_probs]

        columns = 2 if with_squares else 1
        return score(forward, prompts, completions, columns=columns, max_tokens=self._max_tokens, device=self._device)
