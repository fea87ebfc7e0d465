"""Policy updates: trained on committed trajectories one step at a time, with any policy loss of the catalog.

Trap: a loss that picks tokens of a whole mini-batch is asked before any of it is trained on, over the tokens of all
ranks in the order of the rows, so that what it picks depends neither on ranks nor on micro-batches.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, distributed

from ratchet.algorithms.aggregation import LossTotals
from ratchet.data.packing import Entries, MicroBatch, flat
from ratchet.engines.liger import make_faster
from ratchet.engines.log_probs import PackedLogProbs
from ratchet.engines.model import load_causal_lm
from ratchet.engines.objective import TrainerSettings, TrainRow, check_rows, micro_batch_loss
from ratchet.engines.packed import PackedTokens, score
from ratchet.engines.sharded import MiniBatch, ShardedTrainer
from ratchet.engines.training import LossTokens, Share
from ratchet.engines.transfer import to_device
from ratchet.errors import EngineError

__all__ = ["TrainRow", "Trainer", "TrainerSettings"]


class Trainer(ShardedTrainer[PackedLogProbs, TrainRow, TrainerSettings]):
    """A policy with its optimizer. All ranks call every method together, with the same arguments."""

    role = "actor"

    def log_probs(
        self, prompts: Sequence[Entries], completions: Sequence[Entries], *, temperature: float | None = None
    ) -> list[list[float]]:
        """Log-probs of every completion token under the current policy, as `Scorer.log_probs` computes them.

        Without a `temperature` they are at the settings'. Raises EngineError for one that is not above 0.
        """

        def forward(packed: PackedTokens) -> list[Tensor]:
            return [self._score(packed, temperature)]

        budget = self.settings.max_tokens_per_micro_batch
        return score(forward, prompts, completions, max_tokens=budget, device=self._device)[0]

    @classmethod
    def _load(cls, model_folder: Path, settings: TrainerSettings, device: torch.device) -> PackedLogProbs:
        model = load_causal_lm(model_folder, torch.float32, device=device)
        make_faster(model, settings, device)
        return PackedLogProbs(model, temperature=settings.temperature)

    def _check_rows(self, rows: Sequence[TrainRow]) -> None:
        check_rows(rows, self.settings)

    def _select(self, batch: MiniBatch[TrainRow]) -> Tensor | None:
        select = self.settings.loss_entry().selection()
        if select is None:
            return None
        # On the CPU, where a generator's draws are the same whatever the device.
        generator = torch.Generator()
        place = f"{self.settings.seed}/{batch.step}/{batch.epoch}/{batch.number}/selection"
        generator.manual_seed(random.Random(place).getrandbits(63))
        tokens = LossTokens.of(batch.rows)
        log_probs = self._mini_batch_log_probs(batch.rows, tokens).cpu()
        given = [row.behaviour_log_probs for row in batch.rows if row.behaviour_log_probs is not None]
        behaviour = tokens.take(given, log_probs.device) if given else log_probs
        advantages = tokens.take([row.advantages for row in batch.rows], log_probs.device)
        selected: Tensor = select(log_probs, behaviour, advantages, self.settings.loss_options, generator)
        if selected.shape != log_probs.shape or selected.dtype != torch.bool:
            got = f"{selected.dtype} {list(selected.shape)}"
            raise EngineError(f"expected a bool for each of {len(log_probs)} tokens from the selection, got {got}")
        return selected.to(self._device)

    def _mini_batch_log_probs(self, rows: Sequence[TrainRow], tokens: LossTokens) -> Tensor:
        """Log-probs [N] of all loss tokens of a mini-batch in the order of its rows, the same on every rank."""
        found = torch.zeros(int(tokens.counts.sum()), device=self._device)
        for places, packed in self._micro_batches(rows):
            found[_token_index(tokens, places, self._device)] = self._score(packed)
        if self._mesh.size() > 1:
            # Every token is scored by one rank, and 0 on the others.
            distributed.all_reduce(found)
        return found

    def _share(
        self, packed: PackedTokens, places: MicroBatch, batch: MiniBatch[TrainRow], selection: Tensor | None
    ) -> Share:
        needs_entropy = self.settings.entropy_coeff != 0
        scores = self._module(packed, with_entropy=True, entropy_needs_grad=needs_entropy)
        if not places:
            return Share(scores.log_probs.sum())
        rows = [batch.rows[place] for place in places]
        part = None
        if selection is not None:
            part = selection[_token_index(LossTokens.of(batch.rows), places, self._device)]
        has_sampler = any(row.sampler_log_probs is not None for row in batch.rows)
        return micro_batch_loss(
            scores.log_probs, scores.entropy, rows, batch.totals, self.settings, part, has_sampler=has_sampler
        )

    def _batch_metrics(
        self, sums: Mapping[str, float], largest: Mapping[str, float], totals: LossTotals
    ) -> dict[str, float]:
        metrics = self._token_means(sums, totals)
        metrics |= {"actor/pg_loss": sums["pg_loss"], "actor/entropy": sums["entropy"]}
        if self.settings.kl_loss_coef:
            metrics |= {"actor/kl_loss": sums["kl_loss"]}
        if "diff" in sums:
            count = sums["diff_tokens"]
            mean = sums["diff"] / count
            variance = max(sums["diff_squared"] - count * mean**2, 0.0) / max(count - 1, 1)
            metrics |= {
                "training/rollout_probs_diff_mean": mean,
                "training/rollout_probs_diff_max": largest["diff"],
                "training/rollout_probs_diff_std": variance**0.5,
            }
        if "weight" in sums:
            metrics |= {
                "rollout_corr/rollout_is_mean": sums["weight"] / totals.num_tokens,
                "rollout_corr/rollout_is_max": largest["weight"],
                "rollout_corr/rollout_is_min": -largest["minus_weight"],
                "rollout_corr/rollout_is_ratio_fraction_high": sums["truncated"] / totals.num_tokens,
            }
        return metrics

    def _summary(self, rows: Sequence[TrainRow], done: Sequence[dict[str, float]]) -> dict[str, float]:
        # Only before the first optimizer step is the policy the one that is compared with the sampler's.
        drift = {name: value for name, value in (done[0] if done else {}).items() if name.startswith(_DRIFT)}
        others = [{name: value for name, value in one.items() if not name.startswith(_DRIFT)} for one in done]
        metrics = super()._summary(rows, others) | drift
        if self.settings.kl_loss_coef:
            metrics["actor/kl_coef"] = self.settings.kl_loss_coef
        num_tokens = sum(len(row.prompt_token_ids) + len(row.completion_token_ids) for row in rows)
        return metrics | {"perf/total_num_tokens": float(num_tokens)}

    @torch.no_grad()
    def _score(self, packed: PackedTokens, temperature: float | None = None) -> Tensor:
        log_probs: Tensor = self._module(packed, temperature=temperature).log_probs
        return log_probs


_DRIFT = "training/"


def _token_index(tokens: LossTokens, places: MicroBatch, device: torch.device) -> Tensor:
    """Where the loss tokens of the rows at `places` are among those of all rows."""
    ends = np.cumsum(tokens.counts)
    parts = [np.arange(ends[place] - tokens.counts[place], ends[place]) for place in places]
    return to_device(flat(parts, np.int64), device)
