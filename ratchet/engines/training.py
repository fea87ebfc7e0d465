"""What the policy's and the critic's training have in common below the trainer: settings, rows, a share of the loss.

Trap: the loss of a micro-batch is its share of the mini-batch's loss, not an average of its own; the shares of all
micro-batches on all ranks add up to the mini-batch's loss exactly.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from ratchet.algorithms.aggregation import LossTotals, token_weights
from ratchet.algorithms.catalog import LossAggMode
from ratchet.engines.optimizer import LRScheduler
from ratchet.errors import ConfigError, DataError, NumericsError


class Row(Protocol):
    """A completion to train on; its mask has one entry per completion token."""

    @property
    def prompt_token_ids(self) -> list[int]: ...

    @property
    def completion_token_ids(self) -> list[int]: ...

    @property
    def loss_mask(self) -> list[bool]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSettings:
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
    loss_agg_mode: LossAggMode = "token-mean"
    loss_norm_length: float | None = None
    """Tokens, the divisor of "seq-mean-token-sum-norm"."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of forward and backward; weights and optimizer stay float32."""
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        counts = ("mini_batch_size", "ppo_epochs", "max_tokens_per_micro_batch", "micro_batch_size", "total_steps")
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"expected {name} of at least 1, got {value}")
        self.check_bounds(0.0, "lr", "weight_decay", "warmup_steps")
        self.check_above(0.0, "grad_clip")
        if self.lr_scheduler != "constant" and self.total_steps is None:
            raise ConfigError(f"expected total_steps for lr_scheduler {self.lr_scheduler!r}, got None")
        if self.loss_agg_mode == "seq-mean-token-sum-norm" and not self.loss_norm_length:
            raise ConfigError(f"expected loss_norm_length for {self.loss_agg_mode}, got {self.loss_norm_length}")

    def check_bounds(self, bound: float, *names: str) -> None:
        """Raise ConfigError for a field below `bound`."""
        for name in names:
            if not getattr(self, name) >= bound:
                raise ConfigError(f"expected {name} of at least {bound:g}, got {getattr(self, name)}")

    def check_above(self, bound: float, *names: str) -> None:
        """Raise ConfigError for a field that is neither None nor above `bound`."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not value > bound:
                raise ConfigError(f"expected {name} above {bound}, got {value}")


@dataclass(frozen=True, slots=True)
class Share:
    """What one micro-batch contributes to its mini-batch."""

    loss: Tensor
    """With gradient; already divided by the totals of the mini-batch."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Name -> what adds up over micro-batches and ranks: scalars, float64, without gradient; "loss" among them."""
    largest: dict[str, Tensor] = field(default_factory=dict)
    """Name -> scalars of which the largest of all is wanted."""


def check_columns(index: int, row: Row, columns: Mapping[str, Sequence[float]]) -> None:
    """Raise DataError for a column or mask of another length than the completion of row `index`.

    NumericsError for a number inside the loss mask that is not finite; outside it may stand anything.
    """
    expected = len(row.completion_token_ids)
    for name, column in {**columns, "loss_mask": row.loss_mask}.items():
        if len(column) != expected:
            raise DataError(f"row {index} has {len(column)} {name} for {expected} completion tokens")
    if not row.prompt_token_ids and any(row.loss_mask):
        raise DataError(f"row {index} has no prompt token")
    mask = torch.tensor(row.loss_mask, dtype=torch.bool)
    for name, column in columns.items():
        if not bool(torch.isfinite(torch.tensor(column, dtype=torch.float64)[mask]).all()):
            raise NumericsError(f"row {index} has {name} in the loss that are not finite")


def loss_tokens(columns: Sequence[Sequence[float]], rows: Sequence[Row], device: torch.device) -> Tensor:
    """The entries of one column of each row inside the loss masks, one after another: float32 [N]."""
    values = [
        value
        for column, row in zip(columns, rows, strict=True)
        for value, is_used in zip(column, row.loss_mask, strict=True)
        if is_used
    ]
    return torch.tensor(values, dtype=torch.float32, device=device)


def loss_weights(
    rows: Sequence[Row], mode: LossAggMode, totals: LossTotals, norm_length: float | None, device: torch.device
) -> Tensor:
    """Weight of each loss token of `rows`, float32 [N]: the mini-batch's loss is the sum of loss * weight."""
    counts = torch.tensor([sum(row.loss_mask) for row in rows], dtype=torch.long)
    weights = token_weights(counts, mode=mode, totals=totals, norm_length=norm_length).repeat_interleave(counts)
    return weights.to(device, torch.float32)


def to_numbers(scalars: Mapping[str, Tensor]) -> dict[str, float]:
    """Bring scalars of one device to Python at once."""
    return dict(zip(scalars, torch.stack(list(scalars.values())).tolist(), strict=True)) if scalars else {}


def merge(parts: Sequence[Mapping[str, float]], put_together: Callable[[Iterable[float]], float]) -> dict[str, float]:
    """Put what the parts have under each name together, in their order; a part may lack names."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: put_together(part[name] for part in parts if name in part) for name in names}
