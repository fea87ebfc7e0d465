"""The critic's loss per token, averaged afterwards by the same aggregation as the policy's.

Trap: the half belongs to the loss, so that its gradient is the error; with and without clipping the loss is the larger
of two squares, never the smaller.
"""

import torch
from torch import Tensor


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor, *, cliprange_value: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped value loss (https://arxiv.org/abs/1707.06347, as in its reference code), of any one shape.

    max((v - R)^2, (v_clipped - R)^2) / 2, where v_clipped is `values` held within `cliprange_value` of `old_values`,
    those that the advantages were computed with. Returns the loss and, without gradient, "vf_clipfrac": 1 where the
    clipped square is the larger. Raises ValueError for a range that is not above 0 or shapes that differ.
    """
    if not cliprange_value > 0.0:
        raise ValueError(f"expected cliprange_value above 0, got {cliprange_value}")
    if not values.shape == returns.shape == old_values.shape:
        shapes = [list(tensor.shape) for tensor in (values, returns, old_values)]
        raise ValueError(f"expected values, returns and old values of one shape, got {shapes}")
    held = torch.maximum(torch.minimum(values, old_values + cliprange_value), old_values - cliprange_value)
    plain, clipped = (values - returns).square(), (held - returns).square()
    is_clipped = (clipped > plain).detach()
    return 0.5 * torch.maximum(plain, clipped), {"vf_clipfrac": is_clipped.to(values.dtype)}
