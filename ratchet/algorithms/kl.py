"""Per-token estimates of KL(policy || reference) from the log-probs of the sampled tokens.

Trap: the gradient of an estimate is not the gradient of the KL it estimates. k1 has expected gradient 0 as a loss; k2
has that of the KL on policy; k3 saturates at 10 and has no gradient there. A "+" takes the value of a kind and the
gradient of k2.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

KLKind = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, kind: KLKind) -> Tensor:
    """One estimate per token, in nats, of any shape that both arguments share.

    With x = log_probs - reference_log_probs: "kl" or "k1" is x, "abs" is |x|, "mse" or "k2" is x^2 / 2, "low_var_kl" or
    "k3" is exp(-x) + x - 1 (http://joschu.net/blog/kl-approx.html) with the exponent clamped to 20 either way and the
    estimate to [-10, 10]. With a "+" behind it, the estimate has that value and the gradient of "k2", which is x times
    that of log_probs. Raises ValueError for another kind or where the shapes differ.
    """
    if log_probs.shape != reference_log_probs.shape:
        raise ValueError(
            f"expected log-probs of one shape, got {list(log_probs.shape)} and {list(reference_log_probs.shape)}"
        )
    if kind not in get_args(KLKind):
        raise ValueError(f"expected a KL estimate of {', '.join(get_args(KLKind))}, got {kind!r}")
    difference = log_probs - reference_log_probs
    value = _value(difference, kind.removesuffix("+"))
    if not kind.endswith("+"):
        return value
    half_square = 0.5 * difference.square()
    return value.detach() + (half_square - half_square.detach())


def _value(difference: Tensor, kind: str) -> Tensor:
    match kind:
        case "kl" | "k1":
            return difference
        case "abs":
            return difference.abs()
        case "mse" | "k2":
            return 0.5 * difference.square()
        case _:
            # Both terms are clamped: an estimate beyond the clamp is the difference of two saturated numbers.
            negative = torch.clamp(-difference, min=-20, max=20)
            return torch.clamp(negative.exp() - negative - 1, min=-10, max=10)
