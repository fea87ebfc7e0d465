"""Direct preference optimisation: a policy that prefers what was chosen, more than the reference does.

Trap: a pair's loss looks at two sums over tokens, so that a pair is never split over micro-batches, and the mean is
over pairs whatever the aggregation of tokens; differences to the reference are taken token by token, before any sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ratchet.algorithms.loss_terms import segment_sums
from ratchet.algorithms.preference import PreferenceLossType, check_preference_loss, dpo_loss
from ratchet.data.packing import Entries, MicroBatch
from ratchet.engines.offline_rows import PairRow, SFTRow, check_pairs, pair_means, pair_outcomes, pair_rewards
from ratchet.engines.packed import PackedTokens
from ratchet.engines.policy_trainer import PolicyTrainer
from ratchet.engines.training import LossTokens, MiniBatch, Share, TrainingSettings
from ratchet.engines.transfer import to_device
from ratchet.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DPOSettings(TrainingSettings):
    """How to train on pairs; `mini_batch_size` counts pairs, whose losses are averaged."""

    beta: float = 0.1
    """How much a log-ratio counts: the smaller, the further the policy may go from the reference."""
    loss_type: PreferenceLossType = "sigmoid"
    label_smoothing: float = 0.0
    """The rate at which labels are wrong; of "sigmoid" alone."""
    reference_free: bool = False
    """Compare log-probs instead of log-ratios: the reference is uniform."""
    length_normalized: bool = False
    """Compare means over tokens instead of sums; "ipo" always does, as its authors and TRL."""

    def __post_init__(self) -> None:
        TrainingSettings.__post_init__(self)
        try:
            check_preference_loss(self.beta, self.loss_type, self.label_smoothing)
        except ValueError as error:
            raise ConfigError(str(error)) from error


class DPOTrainer(PolicyTrainer[PairRow, DPOSettings]):
    """A policy that learns preferences. All ranks call every method together, with the same arguments."""

    def evaluate(self, rows: Sequence[PairRow]) -> list[dict[str, float]]:
        """Of each pair "loss", "margin", "accuracy" and "tokens" (in the loss, of both sides); nothing is trained.

        The margin is beta times the difference that the loss is of; the accuracy is 1 where it is above 0, else 0.
        """
        self._check_rows(rows)
        sides = [side for row in rows for side in row.sides()]
        found = self.log_probs([side.prompt_token_ids for side in sides], [side.completion_token_ids for side in sides])
        return dpo_outcomes(rows, found, self.settings)

    def _check_rows(self, rows: Sequence[PairRow]) -> None:
        check_pairs(rows, needs_reference=not self.settings.reference_free)

    def _sequences(self, row: PairRow) -> tuple[SFTRow, SFTRow]:
        return row.sides()

    def _share(
        self, packed: PackedTokens, places: MicroBatch, batch: MiniBatch[PairRow], selection: Tensor | None
    ) -> Share:
        log_probs = self._module(packed).log_probs
        if not places:
            return Share(log_probs.sum())
        rows = [batch.rows[place] for place in places]
        tokens = LossTokens.of([side for row in rows for side in row.sides()])
        sums, ratios = _sums(log_probs, rows, tokens, self.settings)
        loss = _losses(ratios, self.settings).sum() / batch.totals.num_sequences
        chosen, rejected = (self.settings.beta * ratios.detach()).unbind(1)
        of_chosen, of_rejected = sums.detach().sum(0).unbind()
        measured = {**pair_rewards(chosen, rejected), "logps/chosen": of_chosen, "logps/rejected": of_rejected}
        return Share(loss, {"loss": loss.detach(), **measured})

    def _batch_metrics(
        self, sums: Mapping[str, float], largest: Mapping[str, float], batch: MiniBatch[PairRow]
    ) -> dict[str, float]:
        return pair_means(sums, batch.totals.num_sequences)

    def _summary(self, rows: Sequence[PairRow], done: Sequence[dict[str, float]]) -> dict[str, float]:
        return super()._summary(rows, done) | {"perf/total_num_tokens": float(sum(row.num_tokens() for row in rows))}


def dpo_outcomes(
    rows: Sequence[PairRow], log_probs: Sequence[Entries], settings: DPOSettings
) -> list[dict[str, float]]:
    """`DPOTrainer.evaluate` of log-probs that are known: of each pair those of the chosen tokens, then the rejected."""
    tokens = LossTokens.of([side for row in rows for side in row.sides()])
    _, ratios = _sums(tokens.take(log_probs, torch.device("cpu")), rows, tokens, settings)
    return pair_outcomes(_losses(ratios, settings), settings.beta * (ratios[:, 0] - ratios[:, 1]), tokens)


def _sums(
    log_probs: Tensor, rows: Sequence[PairRow], tokens: LossTokens, settings: DPOSettings
) -> tuple[Tensor, Tensor]:
    """Of the chosen and the rejected side of each pair, float64 [P, 2]: sums of log-probs, and what is compared.

    `log_probs` [N] belong to the sides' tokens in the loss, in order.
    """
    counts = to_device(tokens.counts, log_probs.device)
    sums = segment_sums(log_probs, counts)
    ratios = sums
    if not settings.reference_free:
        given: list[Entries] = [one for row in rows for one in row.references() if one is not None]
        ratios = segment_sums(log_probs - tokens.take(given, log_probs.device), counts)
    if settings.length_normalized or settings.loss_type == "ipo":
        ratios = ratios / counts
    return sums.view(-1, 2), ratios.view(-1, 2)


def _losses(ratios: Tensor, settings: DPOSettings) -> Tensor:
    return dpo_loss(
        ratios[:, 0],
        ratios[:, 1],
        beta=settings.beta,
        loss_type=settings.loss_type,
        label_smoothing=settings.label_smoothing,
    )
