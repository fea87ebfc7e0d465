"""Losses of pairs: what is preferred beside what is not.

Trap: a loss of a pair looks at a difference, so that what both sides have in common, the prompt's difficulty or a
reference's partition function, is gone; a side's own reward means nothing without the other's.
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

PreferenceLossType = Literal["sigmoid", "ipo", "hinge"]


def dpo_loss(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    *,
    beta: float,
    loss_type: PreferenceLossType,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Loss of each pair [P] from its log-ratios of policy to reference [P], [P], summed over tokens or their means.

    With the difference d of chosen and rejected: "sigmoid" -log sigmoid(beta d) (DPO,
    https://arxiv.org/abs/2305.18290), with `label_smoothing` s for labels that are wrong at that rate
    -(1 - s) log sigmoid(beta d) - s log sigmoid(-beta d) (conservative DPO, https://ericmitchell.ai/cdpo.pdf); "hinge"
    max(0, 1 - beta d) (SLiC, https://arxiv.org/abs/2305.10425); "ipo" (d - 1 / (2 beta))^2
    (https://arxiv.org/abs/2310.12036, equation 17). Without a reference, log-ratios are the policy's log-probs. TRL's
    "ipo" takes means over tokens. Raises ValueError for another loss, a `beta` that is not above 0, smoothing outside
    [0, 0.5) or of another loss than "sigmoid", and shapes that differ.
    """
    check_preference_loss(beta, loss_type, label_smoothing)
    _check_pairs(chosen_log_ratios, rejected_log_ratios)
    difference = chosen_log_ratios - rejected_log_ratios
    match loss_type:
        case "sigmoid":
            right, wrong = functional.softplus(-beta * difference), functional.softplus(beta * difference)
            return (1.0 - label_smoothing) * right + label_smoothing * wrong if label_smoothing else right
        case "hinge":
            return torch.relu(1.0 - beta * difference)
        case "ipo":
            return (difference - 1.0 / (2.0 * beta)).square()


def bradley_terry_loss(chosen_scores: Tensor, rejected_scores: Tensor) -> Tensor:
    """Loss of each pair [P]: -log sigmoid(chosen - rejected), from one score a text [P], [P].

    The negative log-likelihood of the preference (Bradley and Terry 1952, as in https://arxiv.org/abs/2203.02155,
    equation 1). Raises ValueError for shapes that differ.
    """
    _check_pairs(chosen_scores, rejected_scores)
    return functional.softplus(rejected_scores - chosen_scores)


def check_preference_loss(beta: float, loss_type: str, label_smoothing: float) -> None:
    """Raise ValueError for what `dpo_loss` refuses, before there is a tensor."""
    if loss_type not in get_args(PreferenceLossType):
        raise ValueError(f"expected a loss_type of {', '.join(get_args(PreferenceLossType))}, got {loss_type!r}")
    if not beta > 0.0:
        raise ValueError(f"expected beta above 0, got {beta}")
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"expected label_smoothing of at least 0 and below 0.5, got {label_smoothing}")
    if label_smoothing and loss_type != "sigmoid":
        raise ValueError(f"expected no label_smoothing beside loss_type {loss_type!r}, got {label_smoothing}")


def _check_pairs(chosen: Tensor, rejected: Tensor) -> None:
    if chosen.dim() != 1 or chosen.shape != rejected.shape:
        shapes = f"{list(chosen.shape)} and {list(rejected.shape)}"
        raise ValueError(f"expected a number for each of the pairs on both sides, [P] and [P], got {shapes}")
