"""What the trainers of a causal language model share: how it is loaded, and its log-probs between updates."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ratchet.data.packing import Entries
from ratchet.engines.liger import make_faster
from ratchet.engines.log_probs import PackedLogProbs
from ratchet.engines.model import load_causal_lm
from ratchet.engines.packed import PackedTokens, score
from ratchet.engines.sharded import AnySettings, ShardedTrainer
from ratchet.engines.training import AnyRow


class PolicyTrainer(ShardedTrainer[PackedLogProbs, AnyRow, AnySettings]):
    """A causal language model with its optimizer. All ranks call every method together, with the same arguments."""

    role = "actor"

    def log_probs(
        self, prompts: Sequence[Entries], completions: Sequence[Entries], *, temperature: float | None = None
    ) -> list[list[float]]:
        """Log-probs of every completion token under the current policy, as `Scorer.log_probs` computes them.

        Without a `temperature` they are at the one that is trained at. Raises EngineError for one that is not above 0.
        """

        def forward(packed: PackedTokens) -> list[Tensor]:
            return [self._score(packed, temperature)]

        budget = self.settings.max_tokens_per_micro_batch
        return score(forward, prompts, completions, max_tokens=budget, device=self._device)[0]

    @classmethod
    def _temperature(cls, settings: AnySettings) -> float:
        """That log-probs are trained at."""
        return 1.0

    @classmethod
    def _load(cls, model_folder: Path, settings: AnySettings, device: torch.device) -> PackedLogProbs:
        model = load_causal_lm(model_folder, torch.float32, device=device)
        make_faster(model, settings, device)
        return PackedLogProbs(model, temperature=cls._temperature(settings))

    @torch.no_grad()
    def _score(self, packed: PackedTokens, temperature: float | None = None) -> Tensor:
        log_probs: Tensor = self._module(packed, temperature=temperature).log_probs
        return log_probs
