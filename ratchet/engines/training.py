"""What the policy's and the critic's training have in common below the trainer: settings, rows, a share of the loss.

Trap: the loss of a micro-batch is its share of the mini-batch's loss, not an average of its own; the shares of all
micro-batches on all ranks add up to the mini-batch's loss exactly.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ratchet.algorithms.aggregation import LossTotals, token_weights
from ratchet.algorithms.catalog import LossAggMode
from ratchet.data.packing import Entries, flat
from ratchet.engines.optimizer import LRScheduler
from ratchet.engines.transfer import to_device
from ratchet.errors import ConfigError, DataError, NumericsError


class Row(Protocol):
    """A completion to train on; its mask has one entry per completion token."""

    @property
    def prompt_token_ids(self) -> Sequence[int] | np.ndarray: ...

    @property
    def completion_token_ids(self) -> Sequence[int] | np.ndarray: ...

    @property
    def loss_mask(self) -> Sequence[bool] | np.ndarray: ...


AnyRow = TypeVar("AnyRow")


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
    use_liger: bool = True
    """On a GPU, run Liger's kernels for norms, rotary embeddings and gated layers where the package is installed."""
    use_torch_compile: bool = False
    """On a GPU, compile the decoder's layers instead; the first update then takes a minute or more."""
    lora_rank: int = 0
    """Rank of the adapters that train in place of the weights; 0 trains the weights."""
    lora_alpha: int = 16
    """An adapter's product is scaled by lora_alpha / lora_rank."""
    lora_target_modules: tuple[str, ...] = ()
    """Last names of the linear layers with adapters; empty takes all but the head."""

    def __post_init__(self) -> None:
        counts = ("mini_batch_size", "ppo_epochs", "max_tokens_per_micro_batch", "micro_batch_size", "total_steps")
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"expected {name} of at least 1, got {value}")
        self.check_bounds(0.0, "lr", "weight_decay", "warmup_steps", "lora_rank")
        self.check_above(0.0, "grad_clip", "lora_alpha")
        if self.lora_target_modules and not self.lora_rank:
            raise ConfigError(f"expected a lora_rank of at least 1 for lora_target_modules, got {self.lora_rank}")
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
class MiniBatch(Generic[AnyRow]):
    """The rows of one optimizer step that have a token in the loss, in order."""

    rows: list[AnyRow]
    totals: LossTotals
    step: int
    epoch: int
    number: int
    """From 0 in each epoch, over all mini-batches."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one micro-batch contributes to its mini-batch."""

    loss: Tensor
    """With gradient; already divided by the totals of the mini-batch."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Name -> what adds up over micro-batches and ranks: scalars, float64, without gradient; "loss" among them."""
    largest: dict[str, Tensor] = field(default_factory=dict)
    """Name -> scalars of which the largest of all is wanted."""

    def scaled(self, factor: float) -> "Share":
        """The share of a loss that is multiplied by `factor`; what is only measured stays as it is."""
        return replace(self, loss=self.loss * factor, sums=self.sums | {"loss": self.sums["loss"] * factor})


@dataclass(frozen=True, slots=True)
class LossTokens:
    """Which completion tokens of some rows are in the loss: N of all, in the order of the rows."""

    mask: np.ndarray
    """bool: every completion token of the rows, one after another."""
    counts: np.ndarray
    """int64 [rows]: the tokens of each row that are in the loss; they sum to N."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "LossTokens":
        """Read the loss masks of `rows`."""
        masks = [row.loss_mask for row in rows]
        mask = flat(masks, np.bool_)
        ends = np.cumsum([len(one) for one in masks], dtype=np.int64)
        before = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
        return cls(mask, np.diff(before[ends], prepend=0))

    def take(self, columns: Sequence[Entries], device: torch.device) -> Tensor:
        """The entries of one column of each row inside the loss masks: float32 [N]."""
        return to_device(flat(columns, np.float32)[self.mask], device)

    def spread(self, of_rows: np.ndarray) -> np.ndarray:
        """What belongs to each row, given to each of its loss tokens: [rows] to [N]."""
        return np.repeat(of_rows, self.counts)

    def weights(self, mode: LossAggMode, totals: LossTotals, norm_length: float | None, device: torch.device) -> Tensor:
        """Weight of each loss token, float32 [N]: the mini-batch's loss is the sum of loss * weight."""
        of_rows = token_weights(torch.from_numpy(self.counts), mode=mode, totals=totals, norm_length=norm_length)
        return to_device(self.spread(of_rows.numpy()).astype(np.float32), device)


def check_columns(
    rows: Sequence[Row], columns: Mapping[str, Sequence[Entries | None]], *, of: str = "completion"
) -> None:
    """Raise DataError for a column or mask of another length than its row's completion; None is a column not given.

    NumericsError for a number inside the loss mask that is not finite; outside it may stand anything. `of` is what
    errors call the completion.
    """
    lengths = [len(row.completion_token_ids) for row in rows]
    for name, column in {**columns, "loss_mask": [row.loss_mask for row in rows]}.items():
        for index, (entries, length) in enumerate(zip(column, lengths, strict=True)):
            if entries is not None and len(entries) != length:
                raise DataError(f"row {index} has {len(entries)} {name} for {length} {of} tokens")
    tokens = LossTokens.of(rows)
    for index, row in enumerate(rows):
        if not len(row.prompt_token_ids) and tokens.counts[index]:
            raise DataError(f"row {index} has no prompt token")
    for name, column in columns.items():
        given = [
            np.zeros(length) if entries is None else entries for entries, length in zip(column, lengths, strict=True)
        ]
        is_bad = tokens.mask & ~np.isfinite(flat(given, np.float64))
        if is_bad.any():
            index = int(np.repeat(np.arange(len(rows)), lengths)[is_bad.argmax()])
            raise NumericsError(f"row {index} has {name} in the loss that are not finite")


def merge(parts: Sequence[Mapping[str, float]], put_together: Callable[[Iterable[float]], float]) -> dict[str, float]:
    """Put what the parts have under each name together, in their order; a part may lack names."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: put_together(part[name] for part in parts if name in part) for name in names}
