"""Reward models: a classifier of one label learns to score what was chosen above what was rejected.

Trap: a text is judged at one token, which must be the one that `RewardModel` and transformers' classifiers read: the
last of the whole conversation that is not padding, often a line break of the template's behind the end of the turn.
`reward_model.conversations_of_a_prompt` makes such rows; those of completions as they are sampled end earlier.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ratchet.algorithms.preference import bradley_terry_loss
from ratchet.data.packing import MicroBatch
from ratchet.engines.liger import make_faster
from ratchet.engines.offline_rows import SIDES, PairRow, SFTRow, check_pairs, pair_means, pair_outcomes, pair_rewards
from ratchet.engines.packed import PackedTokens
from ratchet.engines.sharded import ShardedTrainer
from ratchet.engines.training import LossTokens, MiniBatch, Share, TrainingSettings
from ratchet.engines.value_model import ValueModel, judged, last_places, last_values, padding_id
from ratchet.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelSettings(TrainingSettings):
    """How to train a reward model; `mini_batch_size` counts pairs, whose losses are averaged."""


class RewardModelTrainer(ShardedTrainer[ValueModel, PairRow, RewardModelSettings]):
    """A reward model with its optimizer. All ranks call every method together, with the same arguments.

    The folder is a classifier's of one label; `make_classifier_folder` makes one of a causal language model. Loss masks
    only say which tokens are counted: a text is judged whole.
    """

    role = "actor"

    def evaluate(self, rows: Sequence[PairRow]) -> list[dict[str, float]]:
        """Of each pair "loss", "margin" (the scores' difference), "accuracy" and "tokens"; nothing is trained.

        The accuracy is 1 where what was chosen has the higher score, else 0.
        """
        self._check_rows(rows)
        sides = [side for row in rows for side in row.sides()]
        texts = [[*side.prompt_token_ids, *side.completion_token_ids] for side in map(self._judged, sides)]
        budget = self.settings.max_tokens_per_micro_batch
        found = last_values(self._module, texts, max_tokens=budget, device=self._device)
        return bradley_terry_outcomes(rows, found)

    @classmethod
    def _load(cls, model_folder: Path, settings: RewardModelSettings, device: torch.device) -> ValueModel:
        module = ValueModel.from_folder(model_folder, torch.float32, device=device, needs_head=True)
        make_faster(module.model, settings, device)
        return module

    def _check_rows(self, rows: Sequence[PairRow]) -> None:
        check_pairs(rows, needs_reference=False)
        for index, row in enumerate(rows):
            for name, side in zip(SIDES, row.sides(), strict=True):
                if not len(self._judged(side).completion_token_ids):
                    raise DataError(f"row {index} has nothing but padding tokens as its {name} completion")

    def _sequences(self, row: PairRow) -> tuple[SFTRow, SFTRow]:
        chosen, rejected = row.sides()
        return self._judged(chosen), self._judged(rejected)

    def _share(
        self, packed: PackedTokens, places: MicroBatch, batch: MiniBatch[PairRow], selection: Tensor | None
    ) -> Share:
        if not places:
            return Share(self._module(packed).sum())
        chosen, rejected = self._module(last_places(packed)).view(-1, 2).unbind(1)
        loss = bradley_terry_loss(chosen, rejected).sum() / batch.totals.num_sequences
        measured = pair_rewards(chosen.detach().double(), rejected.detach().double())
        return Share(loss, {"loss": loss.detach().double(), **measured})

    def _batch_metrics(
        self, sums: Mapping[str, float], largest: Mapping[str, float], batch: MiniBatch[PairRow]
    ) -> dict[str, float]:
        return pair_means(sums, batch.totals.num_sequences)

    def _summary(self, rows: Sequence[PairRow], done: Sequence[dict[str, float]]) -> dict[str, float]:
        return super()._summary(rows, done) | {"perf/total_num_tokens": float(sum(row.num_tokens() for row in rows))}

    def _judged(self, side: SFTRow) -> SFTRow:
        """A side up to the token that it is judged at, every token of its completion counted."""
        completion = side.completion_token_ids
        padding = padding_id(self._module.model.config)
        if padding is not None and len(completion) and completion[-1] == padding:
            completion = judged([padding, *completion], padding)[1:]
        return SFTRow(side.prompt_token_ids, completion, np.ones(len(completion), np.bool_))


def bradley_terry_outcomes(rows: Sequence[PairRow], scores: Sequence[float]) -> list[dict[str, float]]:
    """`RewardModelTrainer.evaluate` of scores that are known: of each pair the chosen text's, then the other's."""
    chosen, rejected = torch.tensor(scores, dtype=torch.float64).view(-1, 2).unbind(1)
    tokens = LossTokens.of([side for row in rows for side in row.sides()])
    return pair_outcomes(bradley_terry_loss(chosen, rejected), chosen - rejected, tokens)
