"""Advantage estimators that judge each token: by its discounted return, or by what a critic expected.

Each is `name(batch, options)` and returns (advantages, returns), both [B, T] and 0 outside the mask. A tool's token,
a hole in the mask, is no step: nothing is discounted over it and its reward and value count nowhere. What is outside
the mask may be NaN; what is not finite inside raises ValueError naming the row. An empty completion is 0 throughout.

Trap: time runs along rows, and a column of a row-major matrix is one number a cache line. Rows are therefore taken in
blocks, and a block is transposed before time runs through it.
"""

import torch
from torch import Tensor

from ratchet.algorithms.batch import AdvantageBatch, AdvantageOptions
from ratchet.algorithms.masked import as_numbers, has_holes, output_dtype, read_inside, required, row_blocks
from ratchet.algorithms.whitening import masked_whiten

_SCAN_BLOCK = 2**22
"""Numbers of a block that time runs through: enough rows that a step of time costs more than calling it."""


def gae(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (https://arxiv.org/abs/1506.02438); returns are advantages plus values.

    `A_t = sum_k (gamma lam)^k delta_(t+k)` with `delta_t = r_t + gamma V_(t+1) - V_t`, over the row's tokens inside the
    mask; the value after the last is 0. The advantages are not whitened. Needs `values`.

    verl: advantages are whitened over the batch, returns are not, and neither is 0 outside the mask; NaN in padding
    reaches every advantage; a batch of fewer than two tokens raises ValueError.
    """
    required(batch, "gae", "values")
    assert batch.values is not None
    advantages, returns = _empty(batch), _empty(batch)
    holes = batch.mask if has_holes(batch.mask) else None
    is_verl = options.compat == "verl"
    if holes is not None:
        # The value of the next token inside the mask; in `returns`, which is not in use yet.
        for rows in row_blocks(returns):
            returns[rows] = read_inside(batch, "values", rows, _steps(batch, rows), options)
        _accumulate(returns, 0.0, holes)
    for rows in row_blocks(advantages):
        steps = _steps(batch, rows)
        value = read_inside(batch, "values", rows, steps, options)
        delta = torch.sub(read_inside(batch, "token_rewards", rows, steps, options), value, out=advantages[rows])
        # Right of a row's last token all is 0, as the value after it has to be.
        following = value if holes is None else returns[rows]
        delta[:, :-1].add_(following[:, 1:], alpha=options.gamma)
        if holes is not None:
            delta.mul_(steps)
        returns[rows] = batch.values[rows] if is_verl else value
    _accumulate(advantages, options.gamma * options.lam, holes)
    if holes is not None and not is_verl:
        for rows in row_blocks(advantages):
            advantages[rows].mul_(_steps(batch, rows))
    returns.add_(advantages)
    if is_verl:
        advantages = masked_whiten(advantages, batch.mask, compat="verl")
    return advantages, returns


def reinforce_plus_plus(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (https://arxiv.org/abs/2501.03262): discounted returns, whitened over the tokens of the batch.

    `G_t = r_t + gamma G_(t+1)`; the returns come back as they are. Fewer than two tokens, or returns that are all
    equal, give 0.

    verl: fewer than two tokens raise ValueError; equal returns become rounding divided by rounding.
    """
    returns = _returns(batch, options, options.gamma, is_masked=True)
    advantages = masked_whiten(returns, batch.mask, compat=options.compat)
    return (
        advantages.mul_(as_numbers(batch.mask, advantages.dtype)) if options.compat == "verl" else advantages
    ), returns


def remax(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """ReMax (https://arxiv.org/abs/2310.10505): undiscounted returns minus the greedy completion's reward.

    Needs `greedy_rewards`; groups are not read. verl: the returns run on through the holes of the mask, and so do the
    advantages there.
    """
    required(batch, "remax", "greedy_rewards")
    assert batch.greedy_rewards is not None
    baseline = batch.greedy_rewards.to(output_dtype(batch))
    bad = (~torch.isfinite(baseline)).nonzero()
    if len(bad) and options.compat != "verl":
        row = int(bad[0])
        raise ValueError(f"expected finite greedy_rewards, got {baseline[row].item()} in row {row}")
    returns = _returns(batch, options, 1.0, is_masked=options.compat != "verl")
    advantages = _empty(batch)
    for rows in row_blocks(returns):
        torch.sub(returns[rows], baseline[rows, None] * _steps(batch, rows), out=advantages[rows])
    return advantages, returns


def _returns(batch: AdvantageBatch, options: AdvantageOptions, gamma: float, *, is_masked: bool) -> Tensor:
    """Discounted returns [B, T], 0 right of the last token; they run on through holes unless `is_masked`."""
    returns = _empty(batch)
    for rows in row_blocks(returns):
        returns[rows] = read_inside(batch, "token_rewards", rows, _steps(batch, rows), options)
    holes = batch.mask if has_holes(batch.mask) else None
    _accumulate(returns, gamma, holes)
    if is_masked and holes is not None:
        for rows in row_blocks(returns):
            returns[rows].mul_(_steps(batch, rows))
    return returns


def _accumulate(values: Tensor, decay: float, holes: Tensor | None) -> None:
    """In place, backwards: `values[:, t] += decay * values[:, t + 1]`, undiminished where `holes` [B, T] is False."""
    if decay == 1.0:
        for rows in row_blocks(values):
            values[rows] = values[rows].flip(1).cumsum_(1).flip(1)
        return
    for rows in row_blocks(values, _SCAN_BLOCK):
        # A copy, never a view as `contiguous` may be: both are worked on in place.
        terms = values[rows].t().clone(memory_format=torch.contiguous_format)
        steps = terms.unbind(0)
        if holes is None:
            for now, later in zip(steps[-2::-1], steps[:0:-1], strict=True):
                now.add_(later, alpha=decay)
        else:
            factors = as_numbers(holes[rows], values.dtype).t().clone(memory_format=torch.contiguous_format)
            decays = factors.mul_(decay - 1.0).add_(1.0).unbind(0)
            for now, later, factor in zip(steps[-2::-1], steps[:0:-1], decays[-2::-1], strict=True):
                now.addcmul_(factor, later)
        values[rows] = terms.t()


def _steps(batch: AdvantageBatch, rows: slice) -> Tensor:
    """The mask of some rows as 0.0 and 1.0."""
    return as_numbers(batch.mask[rows], output_dtype(batch))


def _empty(batch: AdvantageBatch) -> Tensor:
    return torch.empty(batch.token_rewards.shape, dtype=output_dtype(batch))
