"""What a policy update minimises: rows, settings, and the loss of one micro-batch.

Trap: a policy loss may come with an aggregation that it is defined with; entropy and KL are aggregated as configured
all the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ratchet.algorithms.aggregation import LossTotals
from ratchet.algorithms.batch import LossBatch, LossOptions
from ratchet.algorithms.catalog import POLICY_LOSSES, Entry, LossAggMode
from ratchet.algorithms.kl import KLKind, kl_estimate
from ratchet.engines.training import Share, TrainingSettings, check_columns, loss_tokens, loss_weights
from ratchet.errors import ConfigError, DataError, EngineError


@dataclass(frozen=True, slots=True)
class TrainRow:
    """One trajectory to train on; every list but the prompt's has one entry per completion token.

    Example: TrainRow(prompt_token_ids=[1, 4093], completion_token_ids=[24, 2], advantages=[0.7, 0.7],
    behaviour_log_probs=[-0.11, -0.02], loss_mask=[True, True], reference_log_probs=None).
    """

    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    advantages: list[float]
    behaviour_log_probs: list[float]
    """Log-probs (nats, at the temperature) under the policy that the ratio is taken against."""
    loss_mask: list[bool]
    """False keeps a token in the attention and out of the loss."""
    reference_log_probs: list[float] | None = None
    """Needed where `kl_loss_coef` is not 0."""
    importance_weights: list[float] | None = None
    """Rollout correction's factors on the loss; all rows have them or none."""


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

    def __post_init__(self) -> None:
        TrainingSettings.__post_init__(self)
        self.check_bounds(0.0, "entropy_coeff", "kl_loss_coef")
        self.check_above(0.0, "temperature")
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
    """Raise DataError for lists of unequal length, NumericsError for a number in the loss that is not finite."""
    num_weighted = sum(row.importance_weights is not None for row in rows)
    if num_weighted not in (0, len(rows)):
        raise DataError(f"expected importance_weights in all rows or in none, got {num_weighted} of {len(rows)}")
    for index, row in enumerate(rows):
        columns = {"advantages": row.advantages, "behaviour_log_probs": row.behaviour_log_probs}
        if row.importance_weights is not None:
            columns["importance_weights"] = row.importance_weights
        if settings.kl_loss_coef:
            if row.reference_log_probs is None:
                raise DataError(f"row {index} has no reference_log_probs, which kl_loss_coef needs")
            columns["reference_log_probs"] = row.reference_log_probs
        check_columns(index, row, columns)


def micro_batch_loss(
    log_probs: Tensor,
    entropy: Tensor,
    rows: Sequence[TrainRow],
    totals: LossTotals,
    settings: TrainerSettings,
    selection: Tensor | None = None,
) -> Share:
    """This micro-batch's share of the loss, with what the metrics are made of.

    `log_probs`, `entropy` and `selection` [N] belong to the tokens of `rows` inside their loss masks, in order. "loss",
    "pg_loss", "kl_loss" and "entropy" are weighted as the loss is; the others are plain sums over tokens: what the
    policy loss measures under its name with "token/" before it, and "diff" and "diff_squared", of the differences
    between the probabilities under this policy and the behaviour policy, whose largest is "diff" of `largest`.
    """
    device = log_probs.device
    entry = settings.loss_entry()

    def weights(mode: LossAggMode) -> Tensor:
        return loss_weights(rows, mode, totals, settings.loss_norm_length, device)

    behaviour = loss_tokens([row.behaviour_log_probs for row in rows], rows, device)
    per_token, metrics = _policy_loss(entry, log_probs, behaviour, rows, settings.loss_options, selection)
    configured = weights(settings.loss_agg_mode)
    own = configured if entry.loss_agg_mode is None else weights(entry.loss_agg_mode)
    pg_loss = (per_token * own).sum()
    weighted_entropy = (entropy * configured).sum()
    loss, kl_loss = pg_loss, torch.zeros_like(pg_loss)
    if settings.entropy_coeff:
        loss = loss - settings.entropy_coeff * weighted_entropy
    if settings.kl_loss_coef:
        reference = loss_tokens([row.reference_log_probs or [] for row in rows], rows, device)
        kl_loss = (kl_estimate(log_probs, reference, settings.kl_loss_type) * configured).sum()
        loss = loss + settings.kl_loss_coef * kl_loss
    with torch.no_grad():
        difference = (log_probs.exp() - behaviour.exp()).abs().double()
        named = {"loss": loss, "pg_loss": pg_loss, "kl_loss": kl_loss, "entropy": weighted_entropy}
        sums = {name: value.detach().double() for name, value in named.items()}
        sums |= {f"token/{name}": value.detach().double().sum() for name, value in metrics.items()}
        sums |= {"diff": difference.sum(), "diff_squared": difference.square().sum()}
    return Share(loss, sums, {"diff": difference.max()})


def _policy_loss(
    entry: Entry,
    log_probs: Tensor,
    behaviour: Tensor,
    rows: Sequence[TrainRow],
    options: LossOptions,
    selection: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    device = log_probs.device
    counts = torch.tensor([sum(row.loss_mask) for row in rows], dtype=torch.long)
    given = [row.importance_weights for row in rows if row.importance_weights is not None]
    batch = LossBatch(
        log_probs=log_probs,
        behaviour_log_probs=behaviour,
        advantages=loss_tokens([row.advantages for row in rows], rows, device),
        row_index=torch.arange(len(rows)).repeat_interleave(counts).to(device),
        num_rows=len(rows),
        importance_weights=loss_tokens(given, rows, device) if given else None,
        selection=selection,
    )
    result = entry.function()(batch, options)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise EngineError(f"expected a loss per token and a dict of metrics from {entry.name!r}, got {result!r:.80}")
    per_token, metrics = result
    for name, value in {"loss": per_token, **metrics}.items():
        if not isinstance(value, Tensor):
            raise EngineError(f"expected a tensor as {name} from {entry.name!r}, got {value!r:.80}")
        if value.shape != log_probs.shape:
            expected, got = list(log_probs.shape), list(value.shape)
            raise EngineError(f"expected one {name} per token, {expected}, from {entry.name!r}, got {got}")
    return per_token, metrics
