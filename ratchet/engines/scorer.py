"""Log-probs of completions under a frozen model: the reference, or the policy before an update.

Trap: equal weights do not give equal log-probs under another packing or dtype. With the trainer's `compute_dtype` and
`max_tokens_per_micro_batch`, scores are bit for bit those that the trainer's own `log_probs` computes on a CPU.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from ratchet.engines.log_probs import PackedLogProbs, PackedTokens, score
from ratchet.engines.model import check_weights, load_causal_lm, torch_dtype
from ratchet.engines.process_group import local_device


class Scorer:
    """A model that only scores, on one device, without process group."""

    def __init__(self, module: PackedLogProbs, *, max_tokens_per_micro_batch: int, device: torch.device) -> None:
        """Use `from_folder`."""
        self._module = module.eval().requires_grad_(False)
        self._max_tokens = max_tokens_per_micro_batch
        self._device = device

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
        return score(self._score, prompts, completions, max_tokens=self._max_tokens, device=self._device)

    def load_weights(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights in place, cast to the compute dtype; a tied output layer may be missing.

        Raises EngineError, before anything is replaced, for a missing or unknown name or a wrong shape.
        """
        pairs = weights.items() if isinstance(weights, Mapping) else weights
        own = dict(self._module.model.named_parameters())
        names = {id(parameter): name for name, parameter in own.items()}
        tied = {
            name: names[id(parameter)]
            for name, parameter in self._module.model.named_parameters(remove_duplicate=False)
            if name not in own
        }
        given = check_weights(pairs, {name: tuple(parameter.shape) for name, parameter in own.items()}, tied)
        with torch.no_grad():
            for name, tensor in given.items():
                own[name].copy_(tensor)

    def close(self) -> None:
        """Give the memory back; the scorer is not usable afterwards."""
        del self._module
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def _score(self, packed: PackedTokens) -> Tensor:
        log_probs, _ = self._module(packed)
        assert isinstance(log_probs, Tensor)
        return log_probs
