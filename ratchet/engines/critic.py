"""The critic: what it expects of each completion from each token on, and how it is trained.

Trap: values are clipped around those that the advantages were computed from, which belong to the critic before the
step; the explained variance is theirs too, since after the update it would measure the fit to its own targets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ratchet.algorithms.value_loss import value_loss
from ratchet.data.packing import Entries, MicroBatch
from ratchet.engines.liger import make_faster
from ratchet.engines.model import torch_dtype
from ratchet.engines.packed import PackedTokens, score
from ratchet.engines.process_group import local_device
from ratchet.engines.scorer import FrozenModel
from ratchet.engines.sharded import ShardedTrainer
from ratchet.engines.training import LossTokens, MiniBatch, Share, TrainingSettings, check_columns
from ratchet.engines.value_model import ValueModel


@dataclass(frozen=True, slots=True)
class ValueRow:
    """One completion to train the critic on; every column but the prompt has one entry per completion token.

    Columns are lists or arrays. Example: ValueRow(prompt_token_ids=[1, 4093], completion_token_ids=[24, 2],
    values=[0.4, 0.6], returns=[1.0, 1.0], loss_mask=[True, True]).
    """

    prompt_token_ids: Sequence[int] | np.ndarray
    completion_token_ids: Sequence[int] | np.ndarray
    values: Entries
    """What the critic expected before each token, before this step's update."""
    returns: Entries
    loss_mask: Sequence[bool] | np.ndarray
    """False keeps a token in the attention and out of the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticSettings(TrainingSettings):
    """How to train a critic."""

    cliprange_value: float = 0.5
    """How far a value may move from the old one before its loss stops falling."""

    def __post_init__(self) -> None:
        TrainingSettings.__post_init__(self)
        self.check_above(0.0, "cliprange_value")


class ValueScorer(FrozenModel[ValueModel]):
    """A frozen critic."""

    @classmethod
    def from_folder(
        cls, folder: Path, *, compute_dtype: str, max_tokens_per_micro_batch: int, device: str = "auto"
    ) -> Self:
        """Load a folder as `ValueModel` does, in `compute_dtype` ("float32" or "bfloat16"). Raises EngineError."""
        place = local_device(device)
        module = ValueModel.from_folder(folder, torch_dtype(compute_dtype), device=place)
        return cls(module, max_tokens_per_micro_batch=max_tokens_per_micro_batch, device=place)

    def values(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """The value before each token of each completion, in the order of the rows.

        An empty completion gets an empty list. Raises DataError for an empty prompt.
        """
        return _values(self._module, prompts, completions, self._max_tokens, self._device)


class CriticTrainer(ShardedTrainer[ValueModel, ValueRow, CriticSettings]):
    """A critic with its optimizer. All ranks call every method together, with the same arguments."""

    role = "critic"

    def values(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Values under the current critic, as `ValueScorer.values` computes them."""
        return _values(self._module, prompts, completions, self.settings.max_tokens_per_micro_batch, self._device)

    @classmethod
    def _load(cls, model_folder: Path, settings: CriticSettings, device: torch.device) -> ValueModel:
        module = ValueModel.from_folder(model_folder, torch.float32, device=device)
        make_faster(module.model, settings, device)
        return module

    def _check_rows(self, rows: Sequence[ValueRow]) -> None:
        check_columns(rows, {name: [getattr(row, name) for row in rows] for name in ("values", "returns")})

    def _share(
        self, packed: PackedTokens, places: MicroBatch, batch: MiniBatch[ValueRow], selection: Tensor | None
    ) -> Share:
        values = self._module(packed)
        if not places:
            return Share(values.sum())
        rows = [batch.rows[place] for place in places]
        tokens = LossTokens.of(rows)
        old, returns = (
            tokens.take([getattr(row, name) for row in rows], self._device) for name in ("values", "returns")
        )
        per_token, metrics = value_loss(values, returns, old, cliprange_value=self.settings.cliprange_value)
        mode, norm_length = self.settings.loss_agg_mode, self.settings.loss_norm_length
        loss = (per_token * tokens.weights(mode, batch.totals, norm_length, self._device)).sum()
        sums = {"loss": loss.detach().double(), "token/vpred_mean": values.detach().double().sum()}
        return Share(loss, sums | {f"token/{name}": value.detach().double().sum() for name, value in metrics.items()})

    def _batch_metrics(
        self, sums: Mapping[str, float], largest: Mapping[str, float], batch: MiniBatch[ValueRow]
    ) -> dict[str, float]:
        return self._token_means(sums, batch.totals) | {"critic/vf_loss": sums["loss"]}

    def _summary(self, rows: Sequence[ValueRow], done: Sequence[dict[str, float]]) -> dict[str, float]:
        tokens, cpu = LossTokens.of(rows), torch.device("cpu")
        old, returns = (
            tokens.take([getattr(row, name) for row in rows], cpu).double() for name in ("values", "returns")
        )
        metrics = super()._summary(rows, done)
        # A variance takes two tokens.
        if len(returns) > 1:
            metrics["critic/vf_explained_var"] = explained_variance(old, returns)
        return metrics


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / (Var(returns) + 1e-5) over two tokens or more: 1 is all of it, 0 that of a constant.

    The small number is verl's; without variance in the returns it keeps the answer finite.
    """
    return float(1.0 - (returns - values).var() / (returns.var() + 1e-5))


def _values(
    module: ValueModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    max_tokens: int,
    device: torch.device,
) -> list[list[float]]:
    @torch.no_grad()
    def forward(packed: PackedTokens) -> list[Tensor]:
        return [module(packed)]

    return score(forward, prompts, completions, max_tokens=max_tokens, device=device)[0]
