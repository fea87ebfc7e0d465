"""Policy updates: trained on committed trajectories one step at a time, with any policy loss of the catalog.

Trap: a loss that picks tokens of a whole mini-batch is asked before any of it is trained on, over the tokens of all
ranks in the order of the rows, so that what it picks depends neither on ranks nor on micro-batches.
"""

import random
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, distributed

from ratchet.algorithms.aggregation import LossTotals
from ratchet.data.packing import MicroBatch, even_runs, flat
from ratchet.engines.objective import TrainerSettings, TrainRow, check_rows, micro_batch_loss
from ratchet.engines.offline_rows import SFTRow
from ratchet.engines.packed import PackedTokens
from ratchet.engines.policy_trainer import PolicyTrainer
from ratchet.engines.sft_trainer import imitation_share
from ratchet.engines.training import LossTokens, MiniBatch, Row, Share, check_columns
from ratchet.engines.transfer import to_device
from ratchet.errors import DataError, EngineError

__all__ = ["TrainRow", "Trainer", "TrainerSettings"]


class Trainer(PolicyTrainer[TrainRow | SFTRow, TrainerSettings]):
    """A policy with its optimizer. All ranks call every method together, with the same arguments."""

    def update(
        self, rows: Sequence[TrainRow | SFTRow], *, step: int, sft_rows: Sequence[SFTRow] = ()
    ) -> dict[str, float]:
        """Run step `step` as every trainer does, over `rows`, and in the same mini-batches over `sft_rows`.

        With w for `sft_weight`, the loss is (1 - w) times that of the rows plus w * `sft_scale` times the token mean of
        -log p of the SFT rows' completions, at temperature 1. The SFT rows are dealt out over the mini-batches in their
        order. Raises DataError for SFT rows without a weight.
        """
        return super().update([*rows, *sft_rows], step=step)

    @classmethod
    def _temperature(cls, settings: TrainerSettings) -> float:
        return settings.temperature

    def _check_rows(self, rows: Sequence[TrainRow | SFTRow]) -> None:
        sampled, given = _by_kind(rows)
        check_rows(sampled, self.settings)
        check_columns(given, {})
        if given and not self.settings.sft_weight:
            raise DataError(f"expected an sft_weight above 0 for {len(given)} SFT rows, got {self.settings.sft_weight}")

    def _mini_batches(self, rows: Sequence[TrainRow | SFTRow], step: int, epoch: int) -> list[list[TrainRow | SFTRow]]:
        sampled, given = _by_kind(rows)
        batches = super()._mini_batches(sampled, step, epoch)
        if not given:
            return batches
        batches = batches or [[]]
        return [[*batch, *run] for batch, run in zip(batches, even_runs(given, len(batches)), strict=True)]

    def _micro_batches(self, rows: Sequence[TrainRow | SFTRow]) -> Iterator[tuple[MicroBatch, PackedTokens]]:
        # The two kinds share no micro-batch: they may be of different temperatures.
        sampled, given = _by_kind(rows)
        yield from super()._micro_batches(sampled)
        for places, packed in super()._micro_batches(given):
            yield [len(sampled) + place for place in places], packed

    def _select(self, batch: MiniBatch[TrainRow | SFTRow]) -> Tensor | None:
        select = self.settings.loss_entry().selection()
        rows, _ = _by_kind(batch.rows)
        if select is None or not rows:
            return None
        # On the CPU, where a generator's draws are the same whatever the device.
        generator = torch.Generator()
        place = f"{self.settings.seed}/{batch.step}/{batch.epoch}/{batch.number}/selection"
        generator.manual_seed(random.Random(place).getrandbits(63))
        tokens = LossTokens.of(rows)
        log_probs = self._mini_batch_log_probs(rows, tokens).cpu()
        given = [row.behaviour_log_probs for row in rows if row.behaviour_log_probs is not None]
        behaviour = tokens.take(given, log_probs.device) if given else log_probs
        advantages = tokens.take([row.advantages for row in rows], log_probs.device)
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
        self, packed: PackedTokens, places: MicroBatch, batch: MiniBatch[TrainRow | SFTRow], selection: Tensor | None
    ) -> Share:
        settings = self.settings
        sampled, given = _by_kind(batch.rows)
        rows, imitated = _by_kind([batch.rows[place] for place in places])
        if imitated:
            log_probs = self._module(packed, temperature=1.0).log_probs
            share = imitation_share(log_probs, imitated, _totals(given), mode="token-mean", norm_length=None)
            return share.scaled(settings.sft_weight * settings.sft_scale)
        scores = self._module(packed, with_entropy=True, entropy_needs_grad=settings.entropy_coeff != 0)
        if not rows:
            return Share(scores.log_probs.sum())
        part = None
        if selection is not None:
            part = selection[_token_index(LossTokens.of(sampled), places, self._device)]
        totals = _totals(sampled) if given else batch.totals
        has_sampler = any(row.sampler_log_probs is not None for row in sampled)
        share = micro_batch_loss(
            scores.log_probs, scores.entropy, rows, totals, settings, part, has_sampler=has_sampler
        )
        return share.scaled(1.0 - settings.sft_weight) if settings.sft_weight else share

    def _batch_metrics(
        self, sums: Mapping[str, float], largest: Mapping[str, float], batch: MiniBatch[TrainRow | SFTRow]
    ) -> dict[str, float]:
        sampled, given = _by_kind(batch.rows)
        metrics: dict[str, float] = {}
        if given:
            num_tokens = _totals(given).num_tokens
            metrics |= {"actor/loss": sums["loss"], "actor/sft_loss": sums["nll"] / num_tokens}
            metrics["actor/sft_tokens"] = float(num_tokens)
        if sampled:
            metrics |= self._sampled_metrics(sums, largest, _totals(sampled) if given else batch.totals)
        return metrics

    def _sampled_metrics(
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

    def _summary(self, rows: Sequence[TrainRow | SFTRow], done: Sequence[dict[str, float]]) -> dict[str, float]:
        # Only before the first optimizer step is the policy the one that is compared with the sampler's.
        drift = {name: value for name, value in (done[0] if done else {}).items() if name.startswith(_DRIFT)}
        others = [{name: value for name, value in one.items() if not name.startswith(_DRIFT)} for one in done]
        metrics = super()._summary(rows, others) | drift
        if self.settings.kl_loss_coef:
            metrics["actor/kl_coef"] = self.settings.kl_loss_coef
        num_tokens = sum(len(row.prompt_token_ids) + len(row.completion_token_ids) for row in rows)
        return metrics | {"perf/total_num_tokens": float(num_tokens)}


_DRIFT = "training/"


def _token_index(tokens: LossTokens, places: MicroBatch, device: torch.device) -> Tensor:
    """Where the loss tokens of the rows at `places` are among those of all rows."""
    ends = np.cumsum(tokens.counts)
    parts = [np.arange(ends[place] - tokens.counts[place], ends[place]) for place in places]
    return to_device(flat(parts, np.int64), device)


def _by_kind(rows: Sequence[TrainRow | SFTRow]) -> tuple[list[TrainRow], list[SFTRow]]:
    """Those that were sampled and those that are given to imitate."""
    return [row for row in rows if isinstance(row, TrainRow)], [row for row in rows if isinstance(row, SFTRow)]


def _totals(rows: Sequence[Row]) -> LossTotals:
    return LossTotals.of(LossTokens.of(rows).counts.tolist())
