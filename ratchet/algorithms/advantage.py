"""Group-relative advantages: how much better one completion is than the others of its prompt.

Trap: a group whose rewards are all equal teaches nothing, yet its computed standard deviation need not be exactly 0
(eight times 0.9 in float32 is not), and dividing by it turns rounding into advantages. Equality is therefore tested on
the rewards themselves, never on the standard deviation.
"""

import torch
from torch import Tensor


def grpo_advantages(rewards: Tensor, group_index: Tensor, *, norm_by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """Advantages of GRPO (https://arxiv.org/abs/2402.03300, eq. 3), or of Dr. GRPO with `norm_by_std=False`.

    `rewards` [B] is one reward a rollout and `group_index` [B] an integer a rollout, equal for the rollouts of one
    prompt, in any order. Returns float64 [B]: `(reward - mean) / (std + epsilon)`, or `reward - mean`, with the sample
    standard deviation (divided by size - 1).

    A group of one and a group of exactly equal rewards give 0. Raises ValueError naming the first row whose reward is
    not finite, or where the shapes differ. Unlike the paper, the standard deviation is the unbiased one, as in TRL and
    verl; unlike verl, a lone rollout gets 0, not its raw reward.
    """
    mean, std, _ = group_statistics(rewards, group_index)
    centred = rewards.double() - mean
    # `std` is exactly 0 for lone and constant groups, whose `centred` may be a rounding error away from 0.
    centred = torch.where(std == 0, torch.zeros_like(centred), centred)
    return centred / (std + epsilon) if norm_by_std else centred


def group_statistics(rewards: Tensor, group_index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [B], sample standard deviation [B] (both float64) and size [B] (int64) of each rollout's group.

    The standard deviation of a group of one and of a group of exactly equal rewards is exactly 0, and the mean of
    equal rewards is exactly that reward. Raises ValueError as `grpo_advantages` does.
    """
    _check(rewards, group_index)
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


def _check(rewards: Tensor, group_index: Tensor) -> None:
    if rewards.dim() != 1 or rewards.shape != group_index.shape:
        raise ValueError(
            f"expected rewards [B] and group_index [B], got {list(rewards.shape)} and {list(group_index.shape)}"
        )
    bad = (~torch.isfinite(rewards)).nonzero()
    if bad.numel():
        row = int(bad[0])
        raise ValueError(f"expected finite rewards, got {rewards[row].item()} in row {row}")
