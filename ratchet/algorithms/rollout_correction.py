"""Rollout correction: what to do where the policy that trains is not quite the one that sampled.

Importance weights bring the mean back at the price of variance (truncated, or cut to a band); rejection leaves tokens
or completions out. Both read log_ratio [B, T], the policy's log-prob minus the sampler's.

Trap: modes with k1 measure the sampler over the policy, the inverse of the importance ratio, so that an asymmetric band
for them is the mirror image of one for importance weights.
"""

import math
from typing import get_args

import torch
from torch import Tensor

from ratchet.algorithms.batch import Compat
from ratchet.algorithms.rollout_bands import Level, rejection_bounds, weight_band
from ratchet.algorithms.rollout_correction_metrics import (
    MAX_LOG_RATIO,
    counted_rows,
    mean,
    rejection_metrics,
    row_averages,
    weight_metrics,
)


def importance_weights(
    log_ratio: Tensor,
    mask: Tensor,
    level: Level,
    threshold: float | str,
    *,
    batch_normalize: bool = False,
    compat: Compat = "ratchet",
) -> tuple[Tensor, dict[str, float]]:
    """Return the weight of each token [B, T], a constant and 0 outside `mask`, and the metrics "rollout_is_*".

    The weight is exp(log_ratio), by token or with the sum over the row ("sequence"). A number as `threshold` truncates
    weights there (https://fengyao.notion.site/off-policy-rl); "lo_hi" sets those outside the band to 0 (IcePop).
    `batch_normalize` divides by their mean over tokens, or over rows at the level "sequence".

    Rows without tokens count in no metric, and an empty mask gives no metric; `compat="verl"` counts such rows, with
    weight 0 and ratio 1. Raises ValueError for another level or a threshold that is no band of positive numbers.
    """
    if level not in get_args(Level):
        raise ValueError(f"expected an importance level of {', '.join(get_args(Level))}, got {level!r}")
    lowest, highest = weight_band(threshold)
    is_used = mask > 0
    logs = torch.where(is_used, log_ratio.detach(), 0.0)
    if level == "sequence":
        logs = logs.sum(-1, keepdim=True, dtype=torch.float64).to(logs.dtype).expand_as(logs)
    raw = torch.where(is_used, logs.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 0.0)
    is_outside = (raw > highest) if lowest is None else (raw < lowest) | (raw > highest)
    weights = raw.clamp(max=highest) if lowest is None else torch.where(is_outside, 0.0, raw)
    if not bool(is_used.any()):
        return weights, {}
    band = 1.0 / highest if lowest is None else lowest, highest
    metrics = weight_metrics(weights, raw, logs, is_used, level=level, band=band, compat=compat)
    if lowest is not None:
        metrics["rollout_is_oob_ratio"] = mean(is_outside[is_used])
    if batch_normalize:
        average = mean(weights[is_used] if level == "token" else row_averages(weights, is_used)[is_used.any(-1)])
        factor = average if average > 1e-8 else 1.0
        weights = weights / factor
        metrics["rollout_is_batch_norm_factor"] = factor
    return weights, metrics


def rejection_mask(
    log_ratio: Tensor,
    mask: Tensor,
    modes: str,
    thresholds: float | str | None,
    *,
    compat: Compat = "ratchet",
) -> tuple[Tensor, dict[str, float]]:
    """Return `mask` [B, T] without what any of `modes` rejects, of the same dtype, and the metrics "rollout_rs_*".

    A mode is token_, seq_sum_, seq_mean_ or seq_max_ with k1 (sampler over policy, in logs), k2 (half the squared
    log-ratio) or k3 (ratio - 1 - log-ratio); token_ rejects tokens, the others whole rows. Several are separated by
    commas, each with its own threshold, or one for all. A threshold is the largest measure kept; for k1 it is a band
    "lo_hi" of the ratio, and one number t means "1/t_t".

    Rows without tokens count in no metric, and an empty mask gives no metric; `compat="verl"` counts such rows in
    "rollout_rs_seq_masked_fraction". Raises ValueError for another mode or thresholds that do not fit.
    """
    bounds = rejection_bounds(modes, thresholds)
    is_used = mask > 0
    if not bool(is_used.any()):
        return mask.clone(), {}
    held = torch.where(is_used, log_ratio.detach(), 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    is_kept = is_used
    metrics: dict[str, float] = {}
    for mode, (lowest, highest) in bounds.items():
        measure = _measure(held, is_used, mode)
        is_inside = (measure <= highest) & (measure >= (-math.inf if lowest is None else lowest))
        is_kept = is_kept & is_inside
        metrics |= rejection_metrics(mode, measure, is_inside, is_used, (lowest, highest))
    metrics["rollout_rs_masked_fraction"] = mean(~is_kept[is_used])
    metrics["rollout_rs_seq_masked_fraction"] = mean((is_used & ~is_kept).any(-1)[counted_rows(is_used, compat)])
    return torch.where(is_kept, mask, torch.zeros_like(mask)), metrics


def _measure(log_ratio: Tensor, is_used: Tensor, mode: str) -> Tensor:
    """Return a mode's measure of each token [B, T], the same along a row for modes that reject rows."""
    reach, _, estimator = mode.rpartition("_")
    match estimator:
        case "k1":
            measure = -log_ratio
        case "k2":
            measure = 0.5 * log_ratio.square()
        case _:
            measure = torch.expm1(log_ratio) - log_ratio
    match reach:
        case "token":
            return measure
        case "seq_sum":
            of_row = torch.where(is_used, measure, 0.0).sum(-1, dtype=torch.float64).to(measure.dtype)
        case "seq_mean":
            of_row = row_averages(measure, is_used).to(measure.dtype)
        case _:
            # No measure is below 0 here, so that 0 is what a row without tokens has.
            of_row = torch.where(is_used, measure, 0.0).amax(-1)
    return of_row[:, None].expand_as(measure)
