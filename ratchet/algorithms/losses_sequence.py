"""Policy losses whose ratio belongs to a whole completion.

Trap: both are given per token, so that one aggregation serves all losses; every token of a row then carries the row's
ratio (gspo) or the row's loss (geo_mean), and only a mean over the row's tokens gives the paper's objective.
"""

import torch

from ratchet.algorithms.batch import LossBatch, LossOptions
from ratchet.algorithms.loss_terms import (
    check_batch,
    clip_bounds,
    held_log_ratio,
    row_means,
    surrogates,
    token_metrics,
    weighted,
)
from ratchet.algorithms.losses import Loss

_MAX_ROW_LOG_RATIO = 10.0
_SMALLEST_WEIGHT = 1e-10


def gspo(batch: LossBatch, options: LossOptions) -> Loss:
    """GSPO (https://arxiv.org/abs/2507.18071): PPO's clip with the ratio s of the sequence, exp(mean log-ratio).

    In its token form: each token's ratio is s, and its gradient is s times that of its own log-prob, so that
    advantages may differ within a row. log s is held to 10. There is no dual clip. Defined with seq-mean-token-mean.
    """
    check_batch(batch)
    log_ratio = (batch.log_probs - batch.behaviour_log_probs).detach()
    of_row = row_means(log_ratio, batch)[batch.row_index].to(log_ratio.dtype)
    held = (batch.log_probs - batch.log_probs.detach() + of_row).clamp(max=_MAX_ROW_LOG_RATIO)
    plain, clipped = surrogates(held.exp(), batch.advantages, options)
    return weighted(torch.maximum(plain, clipped), batch), token_metrics(-log_ratio, clipped > plain)


def geo_mean(batch: LossBatch, options: LossOptions) -> Loss:
    """GMPO (https://arxiv.org/abs/2507.20673): minus the mean advantage times the geometric mean of clipped ratios.

    Log-ratios (not ratios) are clipped to [-clip_ratio_low, clip_ratio_high], where that lowers the objective. Each
    token carries its row's loss; defined with seq-mean-token-mean, which is then the mean over rows, and a row without
    tokens counts nowhere. Importance weights enter as their geometric mean over the row, each at least 1e-10.
    "pg_clipfrac" is 1 where a log-ratio is outside the band and A > 0, "pg_clipfrac_lower" where A < 0.

    `compat="verl"` counts rows without tokens in the mean over this micro-batch, and holds no log-ratio.
    """
    check_batch(batch)
    low, high = clip_bounds(options)
    is_verl = options.compat == "verl"
    log_ratio = batch.log_probs - batch.behaviour_log_probs if is_verl else held_log_ratio(batch)
    advantages = batch.advantages
    clipped = log_ratio.clamp(-low, high)
    lower = torch.where(advantages < 0, torch.maximum(log_ratio, clipped), torch.minimum(log_ratio, clipped))
    of_row = -row_means(advantages, batch) * row_means(torch.where(advantages == 0, 0.0, lower), batch).exp()
    if batch.importance_weights is not None:
        weights = batch.importance_weights.detach().double()
        of_row = of_row * row_means((weights + _SMALLEST_WEIGHT).log(), batch).exp()
    if is_verl:
        of_row = of_row * torch.bincount(batch.row_index).count_nonzero().double() / max(batch.num_rows, 1)
    loss = of_row[batch.row_index].to(log_ratio.dtype)
    is_outside = log_ratio != clipped
    return loss, token_metrics(-log_ratio, is_outside & (advantages > 0), is_outside & (advantages < 0))
