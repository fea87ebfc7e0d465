"""Policy losses that treat a few tokens differently: those whose log-prob and advantage vary together most.

Trap: which tokens those are is a property of a whole mini-batch. It is settled by `select_*` before any of it is
trained on, over all of its loss tokens in one order; the losses only read the answer.
"""

import torch
from torch import Tensor

from ratchet.algorithms.batch import LossBatch, LossOptions
from ratchet.algorithms.loss_terms import check_batch, held_log_ratio, surrogates, token_metrics, weighted
from ratchet.algorithms.losses import Loss


def clip_cov(batch: LossBatch, options: LossOptions) -> Loss:
    """Clip-Cov (https://arxiv.org/abs/2505.22617): PPO's clipped loss, and none for the tokens of `select_clip_cov`.

    "pg_clipfrac" is 1 for the selected tokens. There is no dual clip. `compat="verl"` holds no log-ratio.
    """
    selection = _selection(batch, "clip_cov")
    log_ratio = _log_ratio(batch, options)
    plain, clipped = surrogates(log_ratio.exp(), batch.advantages, options)
    loss = torch.where(selection, 0.0, torch.maximum(plain, clipped))
    return weighted(loss, batch), token_metrics(-log_ratio, selection)


def kl_cov(batch: LossBatch, options: LossOptions) -> Loss:
    """KL-Cov (https://arxiv.org/abs/2505.22617): -A r, plus ppo_kl_coef |x| for the tokens of `select_kl_cov`.

    x is log p minus the behaviour's log-prob; nothing is clipped. "ppo_kl" is |x|. `compat="verl"` holds no log-ratio.
    """
    selection = _selection(batch, "kl_cov")
    distance = (batch.log_probs - batch.behaviour_log_probs).abs()
    loss = -batch.advantages * _log_ratio(batch, options).exp()
    loss = loss + torch.where(selection, options.ppo_kl_coef * distance, 0.0)
    return weighted(loss, batch), token_metrics(distance)


def select_clip_cov(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    advantages: Tensor,
    options: LossOptions,
    generator: torch.Generator,
) -> Tensor:
    """Which of a mini-batch's tokens [M] `clip_cov` takes out, bool [M]: some at random, of those with a covariance.

    Candidates are tokens that PPO's clip does not hold and whose covariance (see `select_kl_cov`) lies between
    clip_cov_lb and clip_cov_ub; clip_cov_ratio * M of them (rounded down, at least one) are drawn without putting back.
    The draw depends on the generator and on the order of the tokens alone. ValueError: a ratio not above 0.
    """
    _check_ratio("clip_cov_ratio", options.clip_cov_ratio)
    plain, clipped = surrogates((log_probs - behaviour_log_probs).detach().exp(), advantages, options)
    covariance = _covariance(log_probs, advantages, options)
    is_candidate = (covariance > options.clip_cov_lb) & (covariance < options.clip_cov_ub) & ~(clipped > plain)
    candidates = is_candidate.nonzero()[:, 0]
    wanted = max(int(options.clip_cov_ratio * log_probs.numel()), 1)
    drawn = torch.randperm(len(candidates), generator=generator, device=generator.device)[:wanted]
    return _chosen(candidates[drawn.to(candidates.device)], log_probs)


def select_kl_cov(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    advantages: Tensor,
    options: LossOptions,
    generator: torch.Generator,
) -> Tensor:
    """Which of a mini-batch's tokens [M] `kl_cov` penalises, bool [M]: those with the largest covariance.

    A token's covariance is (A - mean of A) * (log p - mean of log p), with means over the mini-batch; kl_cov_ratio * M
    tokens (rounded down, at least one) are taken, the first in order where two are equal; `compat="verl"` computes in
    the tensors' own precision and takes any of two. Neither the behaviour nor the generator is read. ValueError: a
    ratio not above 0.
    """
    _check_ratio("kl_cov_ratio", options.kl_cov_ratio)
    wanted = max(int(log_probs.numel() * options.kl_cov_ratio), 1)
    covariance = _covariance(log_probs, advantages, options)
    if options.compat == "verl":
        return _chosen(covariance.topk(min(wanted, covariance.numel())).indices, log_probs)
    return _chosen(covariance.sort(descending=True, stable=True).indices[:wanted], log_probs)


def _covariance(log_probs: Tensor, advantages: Tensor, options: LossOptions) -> Tensor:
    # In float32 the mean of equal advantages is not always the advantage, and the sign of what is left is noise.
    dtype = log_probs.dtype if options.compat == "verl" else torch.float64
    values, scores = advantages.detach().to(dtype), log_probs.detach().to(dtype)
    return (values - values.mean()) * (scores - scores.mean()) if values.numel() else values


def _chosen(places: Tensor, log_probs: Tensor) -> Tensor:
    chosen = torch.zeros(log_probs.shape, dtype=torch.bool, device=log_probs.device)
    chosen[places] = True
    return chosen


def _check_ratio(name: str, ratio: float) -> None:
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"expected {name} above 0 and at most 1, got {ratio}")


def _selection(batch: LossBatch, name: str) -> Tensor:
    check_batch(batch)
    if batch.selection is None:
        raise ValueError(f"expected the tokens that select_{name} picked over the mini-batch, got none")
    return batch.selection


def _log_ratio(batch: LossBatch, options: LossOptions) -> Tensor:
    return batch.log_probs - batch.behaviour_log_probs if options.compat == "verl" else held_log_ratio(batch)
