"""What a policy update minimises: rows, settings, and the loss of one micro-batch.

Trap: the loss of a micro-batch is its share of the mini-batch's loss, not an average of its own; the shares of all
micro-batches on all ranks add up to the mini-batch's loss exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ratchet.algorithms.aggregation import LossAggMode, LossTotals, token_weights
from ratchet.algorithms.kl import KLKind, kl_estimate
from ratchet.algorithms.losses import ppo_clip_loss
from ratchet.engines.optimizer import LRScheduler
from ratchet.errors import ConfigError, DataError, NumericsError

SUMMED = ("loss", "pg_loss", "kl_loss", "entropy", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "diff", "diff_squared")
"""What a micro-batch contributes to the metrics, in the order of its sums."""


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
    """Log-probs (nats, at the temperature) under the policy that sampled."""
    loss_mask: list[bool]
    """False keeps a token in the attention and out of the loss."""
    reference_log_probs: list[float] | None = None
    """Needed where `kl_loss_coef` is not 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """How to train; names follow verl's configuration where it has one."""

    lr: float
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    grad_clip: float | None = 1.0
    """Largest gradient norm; None clips nothing."""
    lr_scheduler: LRScheduler = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_lr_ratio: float = 0.0
    ppo_epochs: int = 1
    mini_batch_size: int
    """Rows per optimizer step, over all ranks."""
    shuffle: bool = False
    """Whether mini-batches are drawn from a permutation of (seed, step, epoch) instead of in the order of the rows."""
    seed: int = 0
    max_tokens_per_micro_batch: int = 16384
    """Packed tokens that a rank runs at once, unless `micro_batch_size` is given; a longer row runs alone."""
    micro_batch_size: int | None = None
    """Rows that a rank runs at once."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_c: float = 3.0
    loss_agg_mode: LossAggMode = "token-mean"
    loss_norm_length: float | None = None
    """Tokens, the divisor of "seq-mean-token-sum-norm"."""
    entropy_coeff: float = 0.0
    kl_loss_coef: float = 0.0
    kl_loss_type: KLKind = "low_var_kl"
    temperature: float = 1.0
    """The sampling temperature; log-probs are compared at it."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of forward and backward; weights and optimizer stay float32."""
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        counts = ("mini_batch_size", "ppo_epochs", "max_tokens_per_micro_batch", "micro_batch_size", "total_steps")
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"expected {name} of at least 1, got {value}")
        for name in ("lr", "weight_decay", "warmup_steps", "clip_low", "clip_high", "entropy_coeff", "kl_loss_coef"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"expected {name} of at least 0, got {getattr(self, name)}")
        for name, bound in (("temperature", 0.0), ("grad_clip", 0.0), ("clip_c", 1.0)):
            value = getattr(self, name)
            if value is not None and not value > bound:
                raise ConfigError(f"expected {name} above {bound}, got {value}")
        if self.lr_scheduler != "constant" and self.total_steps is None:
            raise ConfigError(f"expected total_steps for lr_scheduler {self.lr_scheduler!r}, got None")
        if self.loss_agg_mode == "seq-mean-token-sum-norm" and not self.loss_norm_length:
            raise ConfigError(f"expected loss_norm_length for {self.loss_agg_mode}, got {self.loss_norm_length}")


def check_rows(rows: Sequence[TrainRow], settings: TrainerSettings) -> None:
    """Raise DataError for lists of unequal length, NumericsError for a number in the loss that is not finite."""
    for index, row in enumerate(rows):
        columns = {"advantages": row.advantages, "behaviour_log_probs": row.behaviour_log_probs}
        if settings.kl_loss_coef:
            if row.reference_log_probs is None:
                raise DataError(f"row {index} has no reference_log_probs, which kl_loss_coef needs")
            columns["reference_log_probs"] = row.reference_log_probs
        expected = len(row.completion_token_ids)
        for name, column in (columns | {"loss_mask": row.loss_mask}).items():
            if len(column) != expected:
                raise DataError(f"row {index} has {len(column)} {name} for {expected} completion tokens")
        if not row.prompt_token_ids and any(row.loss_mask):
            raise DataError(f"row {index} has no prompt token")
        mask = torch.tensor(row.loss_mask, dtype=torch.bool)
        for name, column in columns.items():
            if not bool(torch.isfinite(torch.tensor(column, dtype=torch.float64)[mask]).all()):
                raise NumericsError(f"row {index} has {name} in the loss that are not finite")


def micro_batch_loss(
    log_probs: Tensor, entropy: Tensor, rows: Sequence[TrainRow], totals: LossTotals, settings: TrainerSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """This micro-batch's share of the loss; its sums (float64, see SUMMED); the largest probability difference.

    `log_probs` and `entropy` [N] belong to the tokens of `rows` inside their loss masks, in order. Sums are weighted
    as the loss is, but "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl" and the differences between the probabilities
    under this policy and the behaviour policy, which are plain sums over tokens.
    """
    device = log_probs.device
    counts = torch.tensor([sum(row.loss_mask) for row in rows], dtype=torch.long)
    weights = token_weights(
        counts, mode=settings.loss_agg_mode, totals=totals, norm_length=settings.loss_norm_length
    ).repeat_interleave(counts)
    weights = weights.to(device, torch.float32)
    behaviour = _masked([row.behaviour_log_probs for row in rows], rows, device)
    per_token, metrics = ppo_clip_loss(
        log_probs,
        behaviour,
        _masked([row.advantages for row in rows], rows, device),
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        clip_c=settings.clip_c,
    )
    pg_loss = (per_token * weights).sum()
    weighted_entropy = (entropy * weights).sum()
    loss, kl_loss = pg_loss, torch.zeros_like(pg_loss)
    if settings.entropy_coeff:
        loss = loss - settings.entropy_coeff * weighted_entropy
    if settings.kl_loss_coef:
        reference = _masked([row.reference_log_probs or [] for row in rows], rows, device)
        kl_loss = (kl_estimate(log_probs, reference, settings.kl_loss_type) * weights).sum()
        loss = loss + settings.kl_loss_coef * kl_loss
    with torch.no_grad():
        difference = (log_probs.exp() - behaviour.exp()).abs().double()
        plain = [metrics[name].double().sum() for name in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl")]
        sums = torch.stack(
            [value.detach().double() for value in (loss, pg_loss, kl_loss, weighted_entropy)]
            + [*plain, difference.sum(), difference.square().sum()]
        )
        largest = difference.max() if difference.numel() else difference.new_zeros(())
    return loss, sums, largest


def _masked(columns: Sequence[Sequence[float]], rows: Sequence[TrainRow], device: torch.device) -> Tensor:
    values = [
        value
        for column, row in zip(columns, rows, strict=True)
        for value, is_used in zip(column, row.loss_mask, strict=True)
        if is_used
    ]
    return torch.tensor(values, dtype=torch.float32, device=device)
