"""Policy updates: trained on committed trajectories one step at a time, with any policy loss of the catalog.

Trap: a loss that picks tokens of a whole mini-batch is asked before any of it is trained on, over the tokens of all
ranks in the order of the rows, so that what it picks depends neither on ranks nor on micro-batches.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, distributed

from ratchet.algorithms.aggregation import LossTotals
from ratchet.data.packing import MicroBatch
from ratchet.engines.log_probs import PackedLogProbs
from ratchet.engines.model import load_causal_lm
from ratchet.engines.objective import TrainerSettings, TrainRow, check_rows, micro_batch_loss
from ratchet.engines.packed import PackedTokens, score
from ratchet.engines.sharded import MiniBatch, ShardedTrainer
from ratchet.engines.training import Share, loss_tokens
from ratchet.errors import EngineError

__all__ = ["TrainRow", "Trainer", "TrainerSettings"]


class Trainer(ShardedTrainer[PackedLogProbs, TrainRow, TrainerSettings]):
    """A policy with its optimizer. All ranks call every method together, with the same arguments."""

    role = "actor"

    def log_probs(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of every completion token under the current policy, as `Scorer.log_probs` computes them."""
        budget = self.settings.max_tokens_per_micro_batch
        return score(
            lambda packed: [self._score(packed)], prompts, completions, max_tokens=budget, device=self._device
        )[0]

    @classmethod
    def _load(cls, model_folder: Path, settings: TrainerSettings, device: torch.device) -> PackedLogProbs:
        return PackedLogProbs(
            load_causal_lm(model_folder, torch.float32, device=device), temperature=settings.temperature
        )

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
        log_probs = self._mini_batch_log_probs(batch.rows).cpu()
        behaviour, advantages = (
            loss_tokens([getattr(row, name) for row in batch.rows], batch.rows, log_probs.device)
            for name in ("behaviour_log_probs", "advantages")
        )
        selected: Tensor = select(log_probs, behaviour, advantages, self.settings.loss_options, generator)
        if selected.shape != log_probs.shape or selected.dtype != torch.bool:
            got = f"{selected.dtype} {list(selected.shape)}"
            raise EngineError(f"expected a bool for each of {len(log_probs)} tokens from the selection, got {got}")
        return selected.to(self._device)

    def _mini_batch_log_probs(self, rows: Sequence[TrainRow]) -> Tensor:
        """Log-probs [N] of all loss tokens of a mini-batch in the order of its rows, the same on every rank."""
        found = torch.zeros(sum(sum(row.loss_mask) for row in rows), device=self._device)
        for places, packed in self._micro_batches(rows):
            found[_token_index(rows, places)] = self._score(packed)
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
        part = None if selection is None else selection[_token_index(batch.rows, places)]
        return micro_batch_loss(scores.log_probs, scores.entropy, rows, batch.totals, self.settings, part)

    def _batch_metrics(
        self, sums: Mapping[str, float], largest: Mapping[str, float], totals: LossTotals
    ) -> dict[str, float]:
        count = totals.num_tokens
        mean = sums["diff"] / count
        variance = max(sums["diff_squared"] - count * mean**2, 0.0) / max(count - 1, 1)
        metrics = self._token_means(sums, totals)
        metrics |= {"actor/pg_loss": sums["pg_loss"], "actor/entropy": sums["entropy"]}
        if self.settings.kl_loss_coef:
            metrics |= {"actor/kl_loss": sums["kl_loss"]}
        return metrics | {
            "training/rollout_probs_diff_mean": mean,
            "training/rollout_probs_diff_max": largest["diff"],
            "training/rollout_probs_diff_std": variance**0.5,
        }

    def _summary(self, rows: Sequence[TrainRow], done: Sequence[dict[str, float]]) -> dict[str, float]:
        metrics = super()._summary(rows, done)
        # Only before the first optimizer step is the policy the one that is compared with the sampler's.
        metrics |= {name: value for name, value in (done[0] if done else {}).items() if name.startswith("training/")}
        if self.settings.kl_loss_coef:
            metrics["actor/kl_coef"] = self.settings.kl_loss_coef
        num_tokens = sum(len(row.prompt_token_ids) + len(row.completion_token_ids) for row in rows)
        return metrics | {"perf/total_num_tokens": float(num_tokens)}

    @torch.no_grad()
    def _score(self, packed: PackedTokens) -> Tensor:
        log_probs: Tensor = self._module(packed).log_probs
        return log_probs


def _token_index(rows: Sequence[TrainRow], places: MicroBatch) -> list[int]:
    """Where the loss tokens of the rows at `places` are among those of all rows."""
    starts = [0, *accumulate(sum(row.loss_mask) for row in rows)]
    return [token for place in places for token in range(starts[place], starts[place + 1])]
