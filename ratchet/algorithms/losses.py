"""Policy losses per token: what each completion token adds to the objective, before any averaging.

Trap: the losses are not masked and not averaged here. Averaging is `aggregation`, whose weights are 0 outside the mask.
"""

import torch
from torch import Tensor


def ppo_clip_loss(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss (https://arxiv.org/abs/1707.06347) with unequal bounds and a dual clip.

    All tensors have one shape, one entry a completion token. The probability ratio r is clipped to
    [1 - clip_low, 1 + clip_high] (unequal bounds: https://arxiv.org/abs/2503.14476); where the advantage is negative
    the loss is at most -clip_c * advantage (dual clip: https://arxiv.org/abs/1912.09729). The log-ratio is clamped to
    20 either way, so that one wild token gives a large number and not an infinity.

    Returns the loss per token (to be minimised) and, per token and without gradient, what the metrics average:
    "pg_clipfrac" (1.0 where the clipped branch is the loss), "pg_clipfrac_lower" (1.0 where the dual clip is) and
    "ppo_kl" (behaviour_log_probs - log_probs, nats). Raises ValueError where `clip_c` is not above 1, a bound is
    negative, or shapes differ.
    """
    if not clip_c > 1.0:
        raise ValueError(f"expected clip_c above 1, got {clip_c}")
    if clip_low < 0.0 or clip_high < 0.0:
        raise ValueError(f"expected clip_low and clip_high of at least 0, got {clip_low} and {clip_high}")
    if not log_probs.shape == behaviour_log_probs.shape == advantages.shape:
        shapes = [list(tensor.shape) for tensor in (log_probs, behaviour_log_probs, advantages)]
        raise ValueError(f"expected log-probs, behaviour log-probs and advantages of one shape, got {shapes}")
    log_ratio = torch.clamp(log_probs - behaviour_log_probs, min=-20.0, max=20.0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    pessimistic = torch.maximum(unclipped, clipped)
    bound = -advantages * clip_c
    is_negative = advantages < 0
    loss = torch.where(is_negative, torch.minimum(pessimistic, bound), pessimistic)
    with torch.no_grad():
        metrics = {
            "pg_clipfrac": (clipped > unclipped).to(loss.dtype),
            "pg_clipfrac_lower": ((pessimistic > bound) & is_negative).to(loss.dtype),
            "ppo_kl": -log_ratio.detach(),
        }
    return loss, metrics
