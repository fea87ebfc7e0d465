"""Rows of a batch by their group: statistics, and blocks of rows whose groups have one size.

Trap: a group whose rewards are all equal teaches nothing, yet its computed standard deviation need not be exactly 0
(eight times 0.9 in float32 is not), and dividing by it turns rounding into advantages. Equality is therefore tested on
the rewards themselves, never on the standard deviation.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


def group_statistics(rewards: Tensor, group_index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [B], sample standard deviation [B] (both float64) and size [B] (int64) of each rollout's group.

    `rewards` [B] is one reward a rollout and `group_index` [B] an integer a rollout, equal for the rollouts of one
    prompt, in any order. The standard deviation (over size - 1) of a group of one and of a group of exactly equal
    rewards is exactly 0, and the mean of equal rewards is exactly that reward. Raises ValueError naming the first row
    whose reward is not finite, or where the shapes differ.
    """
    check_rewards(rewards, group_index)
    values = rewards.double()
    if values.numel() == 0:
        return values.clone(), values.clone(), group_index.long()
    _, group = torch.unique(group_index, return_inverse=True)
    num_groups = int(group.max()) + 1
    size = torch.bincount(group, minlength=num_groups)
    mean = values.new_zeros(num_groups).index_add_(0, group, values) / size
    squares = values.new_zeros(num_groups).index_add_(0, group, (values - mean[group]) ** 2)
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    low = values.new_zeros(num_groups).scatter_reduce_(0, group, values, "amin", include_self=False)
    high = values.new_zeros(num_groups).scatter_reduce_(0, group, values, "amax", include_self=False)
    is_constant = low == high
    std = torch.where(is_constant, torch.zeros_like(std), std)
    mean = torch.where(is_constant, low, mean)
    return mean[group], std[group], size[group]


def equal_groups(group_index: Tensor, *, max_rows: int | None = None) -> Iterator[Tensor]:
    """Row numbers int64 [groups, size] of the groups of each size, the rows of a group in their order.

    With `max_rows`, the groups of a size come in several blocks of at most that many rows, or of one group.
    """
    if group_index.numel() == 0:
        return
    _, group, counts = torch.unique(group_index, return_inverse=True, return_counts=True)
    order = torch.argsort(group, stable=True)
    starts = counts.cumsum(0) - counts
    for size in torch.unique(counts).tolist():
        rows = order[starts[counts == size][:, None] + torch.arange(size)]
        yield from torch.split(rows, len(rows) if max_rows is None else max(1, max_rows // size))


def check_rewards(rewards: Tensor, group_index: Tensor) -> None:
    """Raise ValueError where the shapes differ, or naming the first row whose reward is not finite."""
    if rewards.dim() != 1 or rewards.shape != group_index.shape:
        raise ValueError(
            f"expected rewards [B] and group_index [B], got {list(rewards.shape)} and {list(group_index.shape)}"
        )
    bad = (~torch.isfinite(rewards)).nonzero()
    if bad.numel():
        row = int(bad[0])
        raise ValueError(f"expected finite rewards, got {rewards[row].item()} in row {row}")


def verl_statistics(scores: Tensor, group_index: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [B] and standard deviation [B] of each row's group as verl has them, in the precision of `scores`.

    A group of one has mean 0 and standard deviation 1. The last place of a mean decides what equal scores become once
    they are divided by a standard deviation that is rounding too, so the mean is one contiguous sum a group, and the
    squares are summed in float64 around the mean as it was rounded.
    """
    mean, std = torch.zeros_like(scores), torch.ones_like(scores)
    for rows in equal_groups(group_index):
        size = rows.shape[1]
        if size == 1:
            continue
        members = scores[rows]
        centre = members.mean(1, keepdim=True)
        squares = (members.double() - centre.double()).square().sum(1, keepdim=True)
        mean[rows] = centre.expand_as(members)
        std[rows] = (squares / (size - 1)).sqrt().to(scores.dtype).expand_as(members)
    return mean, std


def verl_segment_statistics(scores: Tensor, group_index: Tensor) -> tuple[Tensor, Tensor]:
    """The same from running sums over all rows in their order, which round otherwise."""
    _, group, counts = torch.unique(group_index, return_inverse=True, return_counts=True)
    count = counts.to(scores.dtype)
    mean = torch.zeros_like(count).index_add_(0, group, scores) / count
    squares = torch.zeros_like(count).index_add_(0, group, (scores - mean[group]).square())
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    is_lone = counts == 1
    return mean.masked_fill(is_lone, 0.0)[group], std.masked_fill(is_lone, 1.0)[group]
