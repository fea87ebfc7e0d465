"""Policy losses that look at each token alone: what it adds to the objective, before any averaging.

Trap: a loss without a ratio in it (gpg, cispo, dppo, dro) has a value that means little; its gradient is what counts.
"""

import torch
from torch import Tensor

from ratchet.algorithms.batch import LossBatch, LossOptions
from ratchet.algorithms.loss_terms import (
    check_batch,
    clip_bounds,
    dual_clip,
    held_log_ratio,
    surrogates,
    token_metrics,
    weighted,
)

_TINY = 1e-8

Loss = tuple[Tensor, dict[str, Tensor]]
"""The loss of each token [N], to be minimised, and per token, without gradient, what the metrics average:
"pg_clipfrac", "pg_clipfrac_lower" and "ppo_kl" (behaviour minus policy log-prob, nats)."""


def ppo_clip(batch: LossBatch, options: LossOptions) -> Loss:
    """PPO's clipped loss (https://arxiv.org/abs/1707.06347) with unequal bounds and a dual clip.

    max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)) for the ratio r of policy to behaviour (unequal
    bounds: https://arxiv.org/abs/2503.14476); where the advantage A is negative at most -A clip_ratio_c (dual clip:
    https://arxiv.org/abs/1912.09729). "pg_clipfrac" is 1 where the clipped branch is the larger, "pg_clipfrac_lower"
    where the dual clip holds. ValueError: clip_ratio_c not above 1, a bound below 0, shapes that differ.
    """
    check_batch(batch)
    most = dual_clip(options)
    log_ratio = held_log_ratio(batch)
    plain, clipped = surrogates(log_ratio.exp(), batch.advantages, options)
    pessimistic = torch.maximum(plain, clipped)
    bound = -batch.advantages * most
    is_negative = batch.advantages < 0
    loss = torch.where(is_negative, torch.minimum(pessimistic, bound), pessimistic)
    return weighted(loss, batch), token_metrics(-log_ratio, clipped > plain, (pessimistic > bound) & is_negative)


def cispo(batch: LossBatch, options: LossOptions) -> Loss:
    """CISPO (https://arxiv.org/abs/2506.13585): REINFORCE weighted by the clipped ratio, as a constant.

    -clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high) A log p: clipped tokens keep a gradient. "pg_clipfrac" is 1 where
    the ratio was clipped.
    """
    check_batch(batch)
    low, high = clip_bounds(options)
    log_ratio = held_log_ratio(batch)
    ratio = log_ratio.detach().exp()
    held = ratio.clamp(1.0 - low, 1.0 + high)
    return weighted(-held * batch.advantages * batch.log_probs, batch), token_metrics(-log_ratio, ratio != held)


def sapo(batch: LossBatch, options: LossOptions) -> Loss:
    """SAPO (https://arxiv.org/abs/2511.20347): a soft gate in place of the clip.

    -A sigmoid(tau (r - 1)) 4 / tau, with tau = tau_pos where A > 0 and tau_neg elsewhere; on policy its gradient is
    REINFORCE's. Defined with seq-mean-token-mean. ValueError: a tau that is not above 0.
    """
    check_batch(batch)
    if not (options.tau_pos > 0.0 and options.tau_neg > 0.0):
        raise ValueError(f"expected tau_pos and tau_neg above 0, got {options.tau_pos} and {options.tau_neg}")
    log_ratio = held_log_ratio(batch)
    advantages = batch.advantages
    tau = torch.full_like(advantages, options.tau_neg).masked_fill(advantages > 0, options.tau_pos)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * (4.0 / tau)
    return weighted(-gate * advantages, batch), token_metrics(-log_ratio)


def gpg(batch: LossBatch, options: LossOptions) -> Loss:
    """GPG (https://arxiv.org/abs/2504.02546): -A log p, REINFORCE without a ratio; it reads no option."""
    check_batch(batch)
    return weighted(-batch.log_probs * batch.advantages, batch), token_metrics(-held_log_ratio(batch))


def dro(batch: LossBatch, options: LossOptions) -> Loss:
    """Direct reward optimisation (https://arxiv.org/abs/2405.19107) per token: -A log p + dro_beta / 2 x^2.

    x is log p minus the behaviour's log-prob, and is not held to any bound. ValueError: dro_beta not above 0.
    """
    check_batch(batch)
    if options.dro_beta is None or not options.dro_beta > 0.0:
        raise ValueError(f"expected dro_beta above 0 for the policy loss dro, got {options.dro_beta}")
    log_ratio = batch.log_probs - batch.behaviour_log_probs
    loss = 0.5 * options.dro_beta * log_ratio.square() - batch.advantages * batch.log_probs
    return weighted(loss, batch), token_metrics(-log_ratio)


def dppo_tv(batch: LossBatch, options: LossOptions) -> Loss:
    """DPPO with the binary total variation (https://arxiv.org/abs/2602.04879).

    -A min(r, clip_ratio_c) log p with the ratio as a constant; a token is left out where A > 0 and its probability has
    risen by more than clip_ratio_high, or A <= 0 and it has fallen by more than clip_ratio_low. "pg_clipfrac" is 1
    where a token is left out, "pg_clipfrac_lower" where the ratio of one that is not was truncated.
    """
    low, high = clip_bounds(options)
    change = batch.log_probs.detach().exp() - batch.behaviour_log_probs.exp()
    return _divergence_masked(batch, options, torch.where(batch.advantages > 0, change <= high, change >= -low))


def dppo_kl(batch: LossBatch, options: LossOptions) -> Loss:
    """DPPO with the binary KL (https://arxiv.org/abs/2602.04879): dppo_tv with another measure.

    The measure is KL(behaviour || policy) of the token against all others together; a token is left out where the
    measure is above clip_ratio_high with A > 0 and a probability that rose, or above clip_ratio_low with A <= 0 and
    one that fell.
    """
    low, high = clip_bounds(options)
    log_probs, behaviour_log_probs = batch.log_probs.detach(), batch.behaviour_log_probs
    policy, behaviour = log_probs.exp(), behaviour_log_probs.exp()
    # The small number keeps a token of probability 1 finite.
    others = (1.0 - behaviour) * torch.log((1.0 - behaviour + _TINY) / (1.0 - policy + _TINY))
    divergence = behaviour * (behaviour_log_probs - log_probs) + others
    may_rise = (divergence <= high) | (policy <= behaviour)
    may_fall = (divergence <= low) | (policy >= behaviour)
    return _divergence_masked(batch, options, torch.where(batch.advantages > 0, may_rise, may_fall))


def _divergence_masked(batch: LossBatch, options: LossOptions, is_kept: Tensor) -> Loss:
    check_batch(batch)
    most = dual_clip(options)
    log_ratio = held_log_ratio(batch)
    ratio = log_ratio.detach().exp()
    loss = torch.where(is_kept, -batch.advantages * ratio.clamp(max=most) * batch.log_probs, 0.0)
    return weighted(loss, batch), token_metrics(-log_ratio, ~is_kept, is_kept & (ratio > most))
