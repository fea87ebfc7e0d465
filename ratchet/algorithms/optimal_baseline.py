"""The optimal token baseline (https://arxiv.org/abs/2602.07078): a baseline for each token of a group of completions.

At each place t of a group, `B_t = sum_i G_ti W_ti / (sum_i W_ti + 1e-8)` over its rows that have a token there. `G` is
the undiscounted return from the token on, and `W` the energy so far: the running sum of `1 - 2 p + sum(p'^2)`, the
squared length of the gradient of a token's log-prob by its logits, times the square of the importance weight where
there is one. The advantage is `G_t - B_t`, the return `G_t`.

Where a single row of a group has a token, its baseline would be its own return and teach nothing: there `B_t = 0`.
A group of one: 0 throughout. Outside the mask: 0, and NaN there is harmless; what is not finite inside it raises
ValueError naming the row. Both need `log_probs` and `sum_pi_squared`.

Trap: the two forms differ in what "the same place" is once tool tokens stand between. Groups are taken in blocks of
one size, as a few million numbers that stay in a cache, never as matrices of the whole batch.
"""

import torch
from torch import Tensor

from ratchet.algorithms.batch import AdvantageBatch, AdvantageOptions
from ratchet.algorithms.groups import equal_groups
from ratchet.algorithms.masked import BLOCK, as_numbers, cleared, has_holes, output_dtype, read_inside, required

_EPSILON = 1e-8


def optimal_token_baseline(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """The optimal token baseline by place in the row: tool tokens take up places.

    verl: a group of one keeps its return; returns run on through holes; and with holes the baseline of the longest row
    is dropped from a place that was counted without them.
    """
    return _estimate(batch, options, is_compact=False)


def tir_optimal_token_baseline(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """The same for rows with tool tokens: the k-th tokens inside the mask are compared, wherever they stand.

    verl: a group of one keeps its return; returns run on through holes.
    """
    return _estimate(batch, options, is_compact=True)


def _estimate(batch: AdvantageBatch, options: AdvantageOptions, *, is_compact: bool) -> tuple[Tensor, Tensor]:
    required(batch, "the optimal token baseline", "log_probs", "sum_pi_squared")
    shape, dtype, is_verl = batch.token_rewards.shape, output_dtype(batch), options.compat == "verl"
    advantages, returns = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
    if shape[1] == 0:
        return advantages, returns
    for group_rows in equal_groups(batch.group_index, max_rows=max(1, BLOCK // max(1, shape[1]))):
        size, rows = group_rows.shape[1], _as_slice(group_rows.reshape(-1))
        mask = batch.mask[rows]
        steps = as_numbers(mask, dtype)
        to_go = read_inside(batch, "token_rewards", rows, steps, options).flip(1).cumsum_(1).flip(1)
        if is_verl:
            returns[rows] = to_go
            to_go = cleared(to_go, mask, steps) if is_compact else to_go
        else:
            returns[rows] = to_go.mul_(steps)
        if size == 1:
            baseline = torch.zeros_like(to_go) if is_verl else to_go
        else:
            energy = _energy(batch, rows, steps, options)
            if is_verl and not is_compact:
                baseline = _verl_baseline(to_go, energy.mul_(steps), mask, size)
            else:
                energy = cleared(energy, mask, steps) if is_verl else energy.mul_(steps)
                baseline = _peer_baseline(to_go, energy, mask, steps, size, is_compact=is_compact)
        ours = to_go - baseline
        advantages[rows] = cleared(ours, mask, steps) if is_verl and is_compact else ours.mul_(steps)
    return advantages, returns


def _energy(batch: AdvantageBatch, rows: slice | Tensor, steps: Tensor, options: AdvantageOptions) -> Tensor:
    """W [b, T] of some rows, which runs on outside the mask."""
    log_probs = read_inside(batch, "log_probs", rows, steps, options)
    energy = log_probs.exp_().mul_(-2.0).add_(1.0).add_(read_inside(batch, "sum_pi_squared", rows, steps, options))
    if batch.importance_weights is not None:
        energy.mul_(read_inside(batch, "importance_weights", rows, steps, options).square_())
    return energy.mul_(steps).cumsum_(1)


def _peer_baseline(
    to_go: Tensor, energy: Tensor, mask: Tensor, steps: Tensor, size: int, *, is_compact: bool
) -> Tensor:
    """B [b, T] of rows of which each `size` are a group; 0 where a single row of a group has a token."""
    weighted, length = to_go * energy, mask.shape[1]
    place: Tensor | None = None
    if is_compact and has_holes(mask):
        # A token's place among those of its row; a hole adds its 0 to the place before it.
        place = mask.cumsum(1).sub_(1).clamp_(min=0)
        weighted = torch.zeros_like(energy).scatter_add_(1, place, weighted)
        energy = torch.zeros_like(energy).scatter_add_(1, place, energy)
        steps = as_numbers(torch.arange(length) < mask.sum(1, keepdim=True), steps.dtype)
    baseline = _quotient(weighted, energy, size)
    baseline.masked_fill_(steps.view(-1, size, length).sum(1) < 2, 0)
    spread = _over_group(baseline, size)
    return spread if place is None else spread.gather(1, place)


def _verl_baseline(to_go: Tensor, energy: Tensor, mask: Tensor, size: int) -> Tensor:
    """The same, but dropped only for a group's one longest row, and from the second longest's token count on."""
    length = mask.shape[1]
    baseline = _over_group(_quotient(to_go * energy, energy, size), size).view(-1, size, length)
    count = mask.view(-1, size, length).sum(2)
    most = count.topk(2, dim=1).values
    longest, second = most[:, :1], most[:, 1:]
    is_longest = (count == longest) & (longest > second)
    is_tail = torch.arange(length) >= second
    return baseline.masked_fill_(is_longest[:, :, None] & is_tail[:, None, :], 0).view(-1, length)


def _quotient(weighted: Tensor, energy: Tensor, size: int) -> Tensor:
    """B [groups, T] from `G W` and `W` [b, T], which are 0 where a row has no token."""
    length = energy.shape[1]
    total = energy.view(-1, size, length).sum(1).add_(_EPSILON)
    return weighted.view(-1, size, length).sum(1).div_(total)


def _as_slice(rows: Tensor) -> slice | Tensor:
    """Row numbers as a slice where they follow one another, so that a block is a view and not a copy."""
    first, last = int(rows[0]), int(rows[-1])
    follows = last - first + 1 == len(rows) and bool((rows[1:] == rows[:-1] + 1).all())
    return slice(first, last + 1) if follows else rows


def _over_group(baseline: Tensor, size: int) -> Tensor:
    """[groups, T] to [groups * size, T], in memory of its own."""
    return baseline.repeat_interleave(size, dim=0)
