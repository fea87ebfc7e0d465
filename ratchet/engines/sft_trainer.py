"""Supervised fine-tuning: completions that are given are made more likely, token by token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ratchet.algorithms.aggregation import LossTotals
from ratchet.algorithms.catalog import LossAggMode
from ratchet.data.packing import Entries, MicroBatch
from ratchet.engines.offline_rows import SFTRow
from ratchet.engines.packed import PackedTokens
from ratchet.engines.policy_trainer import PolicyTrainer
from ratchet.engines.training import LossTokens, MiniBatch, Share, TrainingSettings, check_columns


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTSettings(TrainingSettings):
    """How to train on completions; "token-mean" is the usual cross entropy."""


class SFTTrainer(PolicyTrainer[SFTRow, SFTSettings]):
    """A policy that imitates completions. All ranks call every method together, with the same arguments."""

    def evaluate(self, rows: Sequence[SFTRow]) -> list[dict[str, float]]:
        """Of each row "loss", the mean of -log p over its "tokens" in the loss (nats); 0 where there is none.

        Nothing is trained. Over a set of rows, perplexity is exp of the mean weighted by tokens.
        """
        self._check_rows(rows)
        found = self.log_probs([row.prompt_token_ids for row in rows], [row.completion_token_ids for row in rows])
        return imitation_outcomes(rows, found)

    def _check_rows(self, rows: Sequence[SFTRow]) -> None:
        check_columns(rows, {})

    def _share(
        self, packed: PackedTokens, places: MicroBatch, batch: MiniBatch[SFTRow], selection: Tensor | None
    ) -> Share:
        log_probs = self._module(packed).log_probs
        if not places:
            return Share(log_probs.sum())
        rows = [batch.rows[place] for place in places]
        mode, norm_length = self.settings.loss_agg_mode, self.settings.loss_norm_length
        return imitation_share(log_probs, rows, batch.totals, mode=mode, norm_length=norm_length)

    def _batch_metrics(
        self, sums: Mapping[str, float], largest: Mapping[str, float], batch: MiniBatch[SFTRow]
    ) -> dict[str, float]:
        return {"actor/loss": sums["loss"], "actor/perplexity": perplexity(sums["nll"] / batch.totals.num_tokens)}

    def _summary(self, rows: Sequence[SFTRow], done: Sequence[dict[str, float]]) -> dict[str, float]:
        num_tokens = sum(len(row.prompt_token_ids) + len(row.completion_token_ids) for row in rows)
        return super()._summary(rows, done) | {"perf/total_num_tokens": float(num_tokens)}


def imitation_outcomes(rows: Sequence[SFTRow], log_probs: Sequence[Entries]) -> list[dict[str, float]]:
    """`SFTTrainer.evaluate` of log-probs that are known, one for each completion token of each row."""
    tokens = LossTokens.of(rows)
    losses = torch.split(-tokens.take(log_probs, torch.device("cpu")).double(), tokens.counts.tolist())
    return [{"loss": float(one.mean()) if len(one) else 0.0, "tokens": float(len(one))} for one in losses]


def imitation_share(
    log_probs: Tensor, rows: Sequence[SFTRow], totals: LossTotals, *, mode: LossAggMode, norm_length: float | None
) -> Share:
    """A micro-batch's share of the loss -log p, aggregated by `mode`, with "nll", its plain sum over tokens.

    `log_probs` [N] belong to the tokens of `rows` inside their loss masks, in order.
    """
    weights = LossTokens.of(rows).weights(mode, totals, norm_length, log_probs.device)
    loss = -(log_probs * weights).sum()
    return Share(loss, {"loss": loss.detach().double(), "nll": -log_probs.detach().double().sum()})


def perplexity(nll: float) -> float:
    """Return exp of a mean of -log p (nats); infinite where a float has no room for it."""
    return float(torch.tensor(nll, dtype=torch.float64).exp())
