"""What a policy update minimises: rows, settings, and the loss of one micro-batch.

Trap: a policy loss may come with an aggregation that it is defined with; entropy and KL are aggregated as configured
all the same. Where the policy that trains is the one that sampled, its own log-probs are the behaviour's: the ratio is
exactly 1, and only its gradient counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ratchet.algorithms.aggregation import LossTotals
from ratchet.algorithms.batch import LossBatch, LossOptions
from ratchet.algorithms.catalog import POLICY_LOSSES, Entry, LossAggMode
from ratchet.algorithms.kl import KLKind, kl_estimate
from ratchet.algorithms.rollout_correction_metrics import MAX_LOG_RATIO
from ratchet.data.packing import Entries
from ratchet.engines.training import LossTokens, Share, TrainingSettings, check_columns
from ratchet.engines.transfer import to_device
from ratchet.errors import ConfigError, DataError, EngineError


@dataclass(frozen=True, slots=True)
class TrainRow:
    """One trajectory to train on; every column but the prompt has one entry per completion token.

    Columns are lists or arrays. Example: TrainRow(prompt_token_ids=[1, 4093], completion_token_ids=[24, 2],
    advantages=[0.7, 0.7], behaviour_log_probs=[-0.11, -0.02], loss_mask=[True, True], reference_log_probs=None).
    """

    prompt_token_ids: Sequence[int] | np.ndarray
    completion_token_ids: Sequence[int] | np.ndarray
    advantages: Entries
    behaviour_log_probs: Entries | None
    """Log-probs (nats, at the temperature) under the policy that the ratio is taken against.

    None in all rows takes the update's own: for a step of one optimizer step whose policy is the behaviour policy.
    """
    loss_mask: Sequence[bool] | np.ndarray
    """False keeps a token in the attention and out of the loss."""
    reference_log_probs: Entries | None = None
    """Needed where `kl_loss_coef` is not 0."""
    importance_weights: Entries | None = None
    """Rollout correction's factors on the loss; all rows have them or none."""
    sampler_log_probs: Entries | None = None
    """What the sampler reported, in some rows or all: what the policy's probabilities are compared with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings(TrainingSettings):
    """How to train a policy."""

    policy_loss: str = "vanilla"
    """A name of `POLICY_LOSSES`."""
    loss_options: LossOptions = field(default_factory=LossOptions)
    entropy_coeff: float = 0.0
    kl_loss_coef: float = 0.0
    kl_loss_type: KLKind = "low_var_kl"
    temperature: float = 1.0
    """The sampling temperature; log-probs are compared at it."""
    importance_threshold: float | None = None
    """Truncated importance sampling: each token's loss is weighted by its probability over the sampler's, at most this.

    For rows without behaviour and with the sampler's log-probs.
    """
    sft_weight: float = 0.0
    """Share of the loss that SFT rows have beside the sampled ones, which have the rest; 0 for updates without them."""
    sft_scale: float = 1.0
    """Factor on the SFT rows' loss: their learning rate over the update's."""

    def __post_init__(self) -> None:
        TrainingSettings.__post_init__(self)
        self.check_bounds(0.0, "entropy_coeff", "kl_loss_coef")
        self.check_above(0.0, "temperature", "importance_threshold", "sft_scale")
        if not 0.0 <= self.sft_weight < 1.0:
            raise ConfigError(f"expected sft_weight of at least 0 and below 1, got {self.sft_weight}")
        self.loss_entry()
        options = self.loss_options
        if not (options.clip_ratio_low >= 0 and options.clip_ratio_high >= 0):
            bounds = f"{options.clip_ratio_low} and {options.clip_ratio_high}"
            raise ConfigError(f"expected clip_ratio_low and clip_ratio_high of at least 0, got {bounds}")
        if not options.clip_ratio_c > 1:
            raise ConfigError(f"expected clip_ratio_c above 1, got {options.clip_ratio_c}")

    def loss_entry(self) -> Entry:
        """The policy loss; ConfigError where there is none of the name."""
        try:
            return POLICY_LOSSES.get(self.policy_loss)
        except ValueError as error:
            raise ConfigError(f"expected a policy_loss of the catalog: {error}") from error


def check_rows(rows: Sequence[TrainRow], settings: TrainerSettings) -> None:
    """Raise DataError for columns of unequal length or that do not go together, or are missing.

    NumericsError for a number in the loss that is not finite.
    """
    columns = {name: [getattr(row, name) for row in rows] for name in _COLUMNS}
    given = {name: sum(column is not None for column in columns[name]) for name in columns}
    for name in ("behaviour_log_probs", "importance_weights"):
        if given[name] not in (0, len(rows)):
            raise DataError(f"expected {name} in all rows or in none, got {given[name]} of {len(rows)}")
    if rows and not given["behaviour_log_probs"]:
        _check_one_optimizer_step(len(rows), settings)
    if rows and settings.importance_threshold is not None:
        _check_correction(given, len(rows))
    if settings.kl_loss_coef:
        for index, reference in enumerate(columns["reference_log_probs"]):
            if reference is None:
                raise DataError(f"row {index} has no reference_log_probs, which kl_loss_coef needs")
    else:
        del columns["reference_log_probs"]
    check_columns(rows, {name: column for name, column in columns.items() if given[name]})


def micro_batch_loss(
    log_probs: Tensor,
    entropy: Tensor,
    rows: Sequence[TrainRow],
    totals: LossTotals,
    settings: TrainerSettings,
    selection: Tensor | None = None,
    *,
    has_sampler: bool = False,
) -> Share:
    """This micro-batch's share of the loss, with what the metrics are made of.

    `log_probs`, `entropy` and `selection` [N] belong to the tokens of `rows` inside their loss masks, in order.
    `has_sampler` says whether any row of the mini-batch has the sampler's log-probs. "loss", "pg_loss", "kl_loss" and
    "entropy" are weighted as the loss is; the others are plain sums over tokens: what the policy loss measures under
    its name with "token/" before it, and those of `_drift` and `_truncated_weights`.
    """
    device = log_probs.device
    entry = settings.loss_entry()
    tokens = LossTokens.of(rows)

    def column(name: str) -> Tensor | None:
        values = [getattr(row, name) for row in rows]
        return None if values[0] is None else tokens.take(values, device)

    def weights(mode: LossAggMode) -> Tensor:
        return tokens.weights(mode, totals, settings.loss_norm_length, device)

    given = column("behaviour_log_probs")
    compared = (
        _sampler_tokens(log_probs, rows, tokens) if has_sampler else None if given is None else (log_probs, given)
    )
    sums, largest = ({}, {}) if compared is None else _drift(*compared)
    importance = column("importance_weights")
    if settings.importance_threshold is not None:
        assert compared is not None
        importance, of_weights, most = _truncated_weights(*compared, settings.importance_threshold)
        sums, largest = sums | of_weights, largest | most
    advantages = column("advantages")
    assert advantages is not None
    batch = LossBatch(
        log_probs=log_probs,
        behaviour_log_probs=log_probs.detach() if given is None else given,
        advantages=advantages,
        row_index=to_device(tokens.spread(np.arange(len(rows))), device),
        num_rows=len(rows),
        importance_weights=importance,
        selection=selection,
    )
    per_token, metrics = _policy_loss(entry, batch, settings.loss_options)
    configured = weights(settings.loss_agg_mode)
    own = configured if entry.loss_agg_mode is None else weights(entry.loss_agg_mode)
    pg_loss = (per_token * own).sum()
    weighted_entropy = (entropy * configured).sum()
    loss, kl_loss = pg_loss, torch.zeros_like(pg_loss)
    if settings.entropy_coeff:
        loss = loss - settings.entropy_coeff * weighted_entropy
    if settings.kl_loss_coef:
        reference = column("reference_log_probs")
        assert reference is not None
        kl_loss = (kl_estimate(log_probs, reference, settings.kl_loss_type) * configured).sum()
        loss = loss + settings.kl_loss_coef * kl_loss
    named = {"loss": loss, "pg_loss": pg_loss, "kl_loss": kl_loss, "entropy": weighted_entropy}
    sums = {name: value.detach().double() for name, value in named.items()} | sums
    sums |= {f"token/{name}": value.detach().double().sum() for name, value in metrics.items()}
    return Share(loss, sums, largest)


_COLUMNS = (
    "advantages",
    "behaviour_log_probs",
    "importance_weights",
    "reference_log_probs",
    "sampler_log_probs",
)


def _check_one_optimizer_step(num_rows: int, settings: TrainerSettings) -> None:
    num_steps = settings.ppo_epochs * -(-num_rows // settings.mini_batch_size)
    if num_steps > 1:
        raise DataError(
            f"expected behaviour_log_probs for {num_rows} rows in {num_steps} optimizer steps, got none: the update's "
            "own log-probs are the behaviour's in a step of one optimizer step only"
        )


def _check_correction(given: Mapping[str, int], num_rows: int) -> None:
    for name in ("behaviour_log_probs", "importance_weights"):
        if given[name]:
            raise DataError(f"expected no {name} beside importance_threshold, got them")
    if given["sampler_log_probs"] != num_rows:
        got = f"{given['sampler_log_probs']} of {num_rows}"
        raise DataError(f"expected sampler_log_probs in all rows for importance_threshold, got {got}")


def _sampler_tokens(log_probs: Tensor, rows: Sequence[TrainRow], tokens: LossTokens) -> tuple[Tensor, Tensor] | None:
    """The policy's and the sampler's log-probs of the rows that have the latter; None where no row has them."""
    given = [row for row in rows if row.sampler_log_probs is not None]
    if not given:
        return None
    columns = [row.sampler_log_probs for row in given if row.sampler_log_probs is not None]
    sampler = LossTokens.of(given).take(columns, log_probs.device)
    if len(given) == len(rows):
        return log_probs, sampler
    places = np.flatnonzero(tokens.spread(np.array([row.sampler_log_probs is not None for row in rows])))
    return log_probs.detach()[to_device(places, log_probs.device)], sampler


@torch.no_grad()
def _drift(log_probs: Tensor, others: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """How far the probabilities are from the sampler's: "diff" and its square, summed over "diff_tokens"; the largest.

    Without the sampler's, from the behaviour policy's.
    """
    difference = (log_probs.exp() - others.exp()).abs().double()
    count = difference.new_full((), len(difference))
    sums = {"diff": difference.sum(), "diff_squared": difference.square().sum(), "diff_tokens": count}
    return sums, {"diff": difference.max()}


@torch.no_grad()
def _truncated_weights(
    log_probs: Tensor, sampler_log_probs: Tensor, threshold: float
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Weight of each token's loss [N]; "weight" and "truncated" (0 or 1) summed; the largest and minus the smallest."""
    raw = (log_probs - sampler_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights = raw.clamp(max=threshold)
    sums = {"weight": weights.double().sum(), "truncated": (raw > threshold).double().sum()}
    return weights, sums, {"weight": weights.double().max(), "minus_weight": -weights.double().min()}


def _policy_loss(entry: Entry, batch: LossBatch, options: LossOptions) -> tuple[Tensor, dict[str, Tensor]]:
    result = entry.function()(batch, options)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise EngineError(f"expected a loss per token and a dict of metrics from {entry.name!r}, got {result!r:.80}")
    per_token, metrics = result
    for name, value in {"loss": per_token, **metrics}.items():
        if not isinstance(value, Tensor):
            raise EngineError(f"expected a tensor as {name} from {entry.name!r}, got {value!r:.80}")
        if value.shape != batch.log_probs.shape:
            expected, got = list(batch.log_probs.shape), list(value.shape)
            raise EngineError(f"expected one {name} per token, {expected}, from {entry.name!r}, got {got}")
    return per_token, metrics
