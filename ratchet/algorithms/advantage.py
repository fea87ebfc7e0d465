"""Advantage estimators that know one reward a completion: how much better it is than the others of its prompt.

Each is `name(batch, options)` and returns (advantages, returns), both [B, T] and one tensor: such an estimator has no
other return. The token rewards are not read but through `batch.rewards`, their sum; an empty completion has no token
and yet counts in its group. Not finite rewards raise ValueError naming the row. Padding and the holes of tool tokens
are 0 in the result.

A group of one and a group of exactly equal rewards teach nothing: 0, where an estimator does not say otherwise.

Trap: `compat="verl"` repeats verl's arithmetic, its order of float32 sums included, and refuses nothing that verl
takes: a NaN goes where it goes there. docs/algorithms.md lists every difference.
"""

import torch
from torch import Tensor

from ratchet.algorithms.batch import AdvantageBatch, AdvantageOptions
from ratchet.algorithms.groups import (
    equal_groups,
    group_statistics,
    verl_segment_statistics,
    verl_statistics,
)
from ratchet.algorithms.masked import as_numbers, output_dtype, row_lengths
from ratchet.algorithms.whitening import EPSILON, masked_whiten

__all__ = [
    "gdpo",
    "gpg",
    "group_statistics",
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "opo",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_vectorized",
]

STD_EPSILON = 1e-6
"""Added to a group's standard deviation before it is divided by."""


def grpo(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """GRPO (https://arxiv.org/abs/2402.03300), or Dr. GRPO (https://arxiv.org/abs/2503.20783) without `norm_by_std`.

    `(reward - mean) / (std + 1e-6)`, or `reward - mean`, with the group's mean and sample standard deviation (over
    size - 1, unlike the paper's, as in TRL and verl).

    verl: a group of one keeps its raw reward, and equal rewards that float32 cannot hold become rounding divided by
    rounding (eight times 0.9: -0.056).
    """
    if options.compat == "verl":
        return _verl_spread(_normalised(_scores(batch), *_verl_groups(batch), options.norm_by_std), batch)
    return _spread(_grpo_scalars(batch.rewards, batch.group_index, options), batch)


def grpo_vectorized(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """The same as `grpo`; with `compat="verl"`, as rounded by the function that has this name in verl."""
    if options.compat == "verl":
        scores = _scores(batch)
        mean, std = verl_segment_statistics(scores, batch.group_index)
        return _verl_spread(_normalised(scores, mean, std, options.norm_by_std), batch)
    return grpo(batch, options)


def grpo_passk(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Pass@k with GRPO's groups (https://arxiv.org/abs/2503.19595): only the best of a group is reinforced.

    Its advantage is the best reward minus the second best, divided by (std + 1e-6) with `norm_by_std`; 0 for all others
    and for all where two share the best reward. A group of one: 0.

    verl: a group of one raises ValueError.
    """
    scores = _scores(batch) if options.compat == "verl" else batch.rewards.double()
    if options.compat == "verl":
        _, std = _verl_groups(batch)
    else:
        _, std, _ = group_statistics(batch.rewards, batch.group_index)
    scalars = torch.zeros_like(scores)
    for rows in equal_groups(batch.group_index):
        if rows.shape[1] == 1:
            if options.compat == "verl":
                raise ValueError(f"expected at least two rollouts of each prompt, got one in row {int(rows[0, 0])}")
            continue
        best, place = scores[rows].topk(2, dim=1)
        lead = best[:, 0] - best[:, 1]
        winner = rows.gather(1, place[:, :1])[:, 0]
        scalars[winner] = lead / (std[winner] + STD_EPSILON) if options.norm_by_std else lead
    return _verl_spread(scalars, batch) if options.compat == "verl" else _spread(scalars, batch)


def gdpo(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """GDPO (https://arxiv.org/abs/2601.05242): GRPO for each part of the reward, weighted, summed, then whitened.

    `sum_k weight_k * grpo(part_k)`, whitened over the tokens of the batch. Parts and weights: `options.part_weights`,
    or all of `batch.reward_parts` with weight 1. A rollout whose parts teach nothing has 0 before whitening, and so
    minus the batch's mean, over its deviation, after. Raises ValueError without parts, or for a part that is missing.
    """
    parts = batch.reward_parts
    weights = dict(options.part_weights) or dict.fromkeys(parts, 1.0)
    if not weights:
        raise ValueError("expected the parts of each reward, got none; gdpo compares them one by one")
    missing = sorted(set(weights) - set(parts))
    if missing:
        raise ValueError(f"expected reward parts {sorted(weights)}, got {sorted(parts)}: {missing[0]!r} is missing")
    if options.compat == "verl":
        total: Tensor | None = None
        for name, weight in weights.items():
            part = parts[name].to(output_dtype(batch))
            mean, std = verl_statistics(part, batch.group_index)
            term, _ = _verl_spread(_normalised(part, mean, std, options.norm_by_std), batch)
            total = term.mul_(weight) if total is None else total.add_(term.mul_(weight))
        assert total is not None
        return _verl_whitened(total, batch)
    scalars = sum(
        (weight * _grpo_scalars(parts[name], batch.group_index, options) for name, weight in weights.items()),
        torch.zeros(len(batch.rewards), dtype=torch.float64),
    )
    return _spread(_whitened(scalars, batch.mask), batch)


def rloo(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """RLOO (https://arxiv.org/abs/2402.14740): the reward minus the mean reward of the others of the group.

    A group of one has no others: 0. verl: its raw reward.
    """
    if options.compat == "verl":
        scores = _scores(batch)
        mean, _ = _verl_groups(batch)
        size = _sizes(batch.group_index).to(scores.dtype)
        others = (size - 1).clamp(min=1)
        left_out = scores * size / others - mean * size / others
        return _verl_spread(torch.where(size > 1, left_out, scores), batch)
    mean, std, size = group_statistics(batch.rewards, batch.group_index)
    return _spread(_centred(batch.rewards, mean, std) * size / (size - 1).clamp(min=1), batch)


def rloo_vectorized(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """The same as `rloo`; with `compat="verl"`, what the function of this name gives: 0 for a group of one."""
    if options.compat == "verl":
        scores = _scores(batch)
        _, group = torch.unique(batch.group_index, return_inverse=True)
        size = torch.bincount(group)[group].to(scores.dtype)
        total = torch.bincount(group, weights=scores)[group]
        return _verl_spread((size * scores - total) / (size - 1).clamp(min=1) * (size > 1), batch)
    return rloo(batch, options)


def opo(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """OPO (https://arxiv.org/abs/2505.23585): the reward minus the group's mean reward weighted by length.

    `reward - sum(length * reward) / sum(length)`, lengths in tokens inside the mask. Groups without any token: 0.

    verl: a group of one keeps its raw reward; a group without any token is NaN.
    """
    length = row_lengths(batch.mask)
    if options.compat == "verl":
        scores, baseline = _scores(batch), torch.zeros_like(_scores(batch))
        for rows in equal_groups(batch.group_index):
            if rows.shape[1] > 1:
                weight = length[rows].to(scores.dtype)
                mean = (weight * scores[rows]).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
                baseline[rows] = mean.expand_as(weight)
        return _verl_spread(scores - baseline, batch)
    mean, std, _ = group_statistics(batch.rewards, batch.group_index)
    centred, weights = _centred(batch.rewards, mean, std), length.double()
    _, group = torch.unique(batch.group_index, return_inverse=True)
    total = torch.bincount(group, weights=weights).clamp(min=1)
    # Of rewards around the mean, so that nothing is lost where all are large.
    shift = torch.bincount(group, weights=weights * centred) / total
    return _spread(torch.where(std == 0, centred, centred - shift[group]), batch)


def gpg(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """GPG (https://arxiv.org/abs/2504.02546): `alpha * (reward - mean)`.

    `alpha` is the number of rollouts over the number of those in groups whose rewards differ, so that groups that teach
    nothing do not shrink the gradient; 1 where no rewards differ.

    verl: `alpha` is over the number of rollouts whose reward is not 0, so that adding a constant to all rewards changes
    the advantages; a group of one keeps `alpha` times its raw reward.
    """
    if options.compat == "verl":
        scores = _scores(batch)
        mean, _ = _verl_groups(batch)
        scale = len(scores) / torch.count_nonzero(scores).clamp(min=1)
        return _verl_spread(scale * (scores - mean), batch)
    mean, std, _ = group_statistics(batch.rewards, batch.group_index)
    teaching = int((std > 0).sum())
    alpha = len(std) / teaching if teaching else 1.0
    return _spread(_centred(batch.rewards, mean, std) * alpha, batch)


def reinforce_plus_plus_baseline(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with a baseline (https://arxiv.org/abs/2501.03262): `reward - mean`, whitened over all tokens.

    A group that teaches nothing has 0 before whitening, and so minus the batch's mean, over its deviation, after.
    Batches of fewer than two tokens, or in which all tokens are equal: 0.

    verl: a group of one enters with its raw reward; fewer than two tokens raise ValueError.
    """
    if options.compat == "verl":
        scores = _scores(batch)
        mean, _ = _verl_groups(batch)
        return _verl_whitened(_verl_spread(scores - mean, batch)[0], batch)
    mean, std, _ = group_statistics(batch.rewards, batch.group_index)
    return _spread(_whitened(_centred(batch.rewards, mean, std), batch.mask), batch)


def _grpo_scalars(rewards: Tensor, group_index: Tensor, options: AdvantageOptions) -> Tensor:
    mean, std, _ = group_statistics(rewards, group_index)
    centred = _centred(rewards, mean, std)
    return centred / (std + STD_EPSILON) if options.norm_by_std else centred


def _centred(rewards: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    # A lone or constant group's standard deviation is exactly 0; its difference may be a rounding error away from 0.
    return torch.where(std == 0, 0.0, rewards.double() - mean)


def _whitened(scalars: Tensor, mask: Tensor) -> Tensor:
    """`masked_whiten` of one number a row, float64 [B], as if it stood on each of the row's tokens."""
    length = row_lengths(mask).double()
    count = float(length.sum())
    present = scalars[length > 0]
    if count < 2 or bool((present == present[0]).all()):
        return torch.zeros_like(scalars)
    centred = scalars - (scalars * length).sum() / count
    variance = (centred.square() * length).sum() / (count - 1)
    whitened: Tensor = centred * torch.rsqrt(variance + EPSILON)
    return whitened


def _spread(scalars: Tensor, batch: AdvantageBatch) -> tuple[Tensor, Tensor]:
    """One number a row onto each of its tokens, 0 elsewhere."""
    dtype = output_dtype(batch)
    spread = torch.where(batch.mask, scalars.to(dtype)[:, None], torch.zeros((), dtype=dtype))
    return spread, spread


def _sizes(group_index: Tensor) -> Tensor:
    _, group, counts = torch.unique(group_index, return_inverse=True, return_counts=True)
    sizes: Tensor = counts[group]
    return sizes


def _normalised(scores: Tensor, mean: Tensor, std: Tensor, norm_by_std: bool) -> Tensor:
    return (scores - mean) / (std + STD_EPSILON) if norm_by_std else scores - mean


def _scores(batch: AdvantageBatch) -> Tensor:
    return batch.rewards.to(output_dtype(batch))


def _verl_groups(batch: AdvantageBatch) -> tuple[Tensor, Tensor]:
    return verl_statistics(_scores(batch), batch.group_index)


def _verl_spread(scalars: Tensor, batch: AdvantageBatch) -> tuple[Tensor, Tensor]:
    """Multiplied by the mask: what is not finite stays so outside it."""
    spread = scalars[:, None] * as_numbers(batch.mask, scalars.dtype)
    return spread, spread


def _verl_whitened(values: Tensor, batch: AdvantageBatch) -> tuple[Tensor, Tensor]:
    whitened = masked_whiten(values, batch.mask, compat="verl").mul_(as_numbers(batch.mask, values.dtype))
    return whitened, whitened
