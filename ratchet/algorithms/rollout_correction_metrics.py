"""What rollout correction reports: weights, measures of rejection, and how far the policy is from the sampler.

Names are verl's, without "rollout_corr/" before them. Trap: some are means over tokens and some over rows; a row
without tokens has no weight and no perplexity, and counts in none of them unless verl's numbers are asked for.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from ratchet.algorithms.batch import Compat

MAX_LOG_RATIO = 20.0
"""Log-ratios are held to this either way before they are exponentiated."""
_TINY = 1e-8
"""What verl adds to a mean before it divides by it, which shows where all weights are tiny."""


def mean(values: Tensor) -> float:
    """Return the mean of numbers or truth values, in float64; 0 where there are none."""
    return float(values.double().mean()) if values.numel() else 0.0


def row_averages(values: Tensor, is_used: Tensor) -> Tensor:
    """Return the mean of `values` [B, T] over each row's used tokens, float64 [B]; 0 for a row that has none."""
    return torch.where(is_used, values, 0.0).sum(-1, dtype=torch.float64) / is_used.sum(-1).clamp(min=1)


def counted_rows(is_used: Tensor, compat: Compat) -> Tensor:
    """Return which rows [B] count in means over rows."""
    is_row = is_used.any(-1)
    return torch.ones_like(is_row) if compat == "verl" else is_row


def weight_metrics(
    weights: Tensor,
    raw: Tensor,
    logs: Tensor,
    is_used: Tensor,
    *,
    level: Literal["token", "sequence"],
    band: tuple[float, float],
    compat: Compat,
) -> dict[str, float]:
    """Return "rollout_is_*" of weights as applied and before (`raw`), whose logs are `logs`; all [B, T].

    "rollout_is_eff_sample_size" is the effective share of tokens, (mean of w)^2 / mean of w^2.
    """
    lowest, highest = band
    rows = counted_rows(is_used, compat)
    applied, raw_rows = weights[is_used].double(), row_averages(raw, is_used)[rows]
    if level == "sequence":
        measured, limits = logs[:, 0][rows], (math.log(lowest), math.log(highest))
        lowest_log, highest_log = (min(float(end), MAX_LOG_RATIO) for end in (measured.min(), measured.max()))
        extremes = math.exp(lowest_log), math.exp(highest_log)
    else:
        measured, limits = raw[is_used], band
        extremes = float(applied.min()), float(applied.max())
    squares = mean(applied.square())
    centre = mean(applied) + (_TINY if compat == "verl" else 0.0)
    own = _row_statistics(row_averages(weights, is_used)[rows], "rollout_is_seq", centre=1.0)
    return own | {
        "rollout_is_mean": mean(applied),
        "rollout_is_min": extremes[0],
        "rollout_is_max": extremes[1],
        "rollout_is_std": float(applied.std(correction=0)),
        "rollout_is_eff_sample_size": centre**2 / squares if squares else 0.0,
        "rollout_is_ratio_fraction_high": mean(measured > limits[1]),
        "rollout_is_ratio_fraction_low": mean(measured < limits[0]),
        "rollout_is_seq_fraction_high": mean(raw_rows > highest),
        "rollout_is_seq_fraction_low": mean(raw_rows < lowest),
    }


def rejection_metrics(
    mode: str, measure: Tensor, is_inside: Tensor, is_used: Tensor, bounds: tuple[float | None, float]
) -> dict[str, float]:
    """Return "rollout_rs_<mode>_*" of one mode's measure [B, T], the same along a row where rows are rejected whole.

    "_std" is that of the measure held to the bounds, over tokens.
    """
    lowest, highest = bounds
    is_row = is_used.any(-1)
    tokens = measure[is_used].double()
    rows = (row_averages(measure, is_used) if mode.startswith("token") else measure[:, 0].double())[is_row]
    of_level = tokens if mode.startswith("token") else rows
    below = -math.inf if lowest is None else lowest
    prefix = f"rollout_rs_{mode}"
    found = _row_statistics(rows, f"{prefix}_seq", centre=0.0) | {
        f"{prefix}_mean": mean(tokens),
        f"{prefix}_max": float(of_level.max()),
        f"{prefix}_min": float(of_level.min()),
        f"{prefix}_std": float(tokens.clamp(lowest or 0.0, highest).std(correction=0)),
        f"{prefix}_fraction_high": mean(of_level > highest),
        f"{prefix}_fraction_low": mean(of_level < below),
        f"{prefix}_seq_fraction_high": mean(rows > highest),
        f"{prefix}_masked_fraction": mean(~is_inside[is_used]),
        f"{prefix}_seq_masked_fraction": mean((is_used & ~is_inside).any(-1)[is_row]),
    }
    return found if lowest is None else found | {f"{prefix}_seq_fraction_low": mean(rows < lowest)}


def off_policy_metrics(
    log_probs: Tensor, sampler_log_probs: Tensor, mask: Tensor, *, compat: Compat = "ratchet"
) -> dict[str, float]:
    """Return how far the policy is from the sampler: perplexities, KL (k1 and k3), chi-squared; tensors are [B, T].

    An empty mask gives no metric. `compat="verl"` counts rows without tokens, with a perplexity of 1.
    """
    is_used = mask > 0
    if not bool(is_used.any()):
        return {}
    rows = counted_rows(is_used, compat)
    log_ratio = torch.where(is_used, (log_probs.detach() - sampler_log_probs.detach()).double(), 0.0)
    policy, sampler = (-row_averages(values.detach(), is_used)[rows] for values in (log_probs, sampler_log_probs))
    difference = policy - sampler
    of_token = log_ratio[is_used]
    of_row = log_ratio.sum(-1)[rows]
    return {
        "training_ppl": mean(policy.exp()),
        "training_log_ppl": mean(policy),
        "kl": mean(-of_token),
        "k3_kl": mean(of_token.exp() - of_token - 1.0),
        "rollout_ppl": mean(sampler.exp()),
        "rollout_log_ppl": mean(sampler),
        "log_ppl_diff": mean(difference),
        "log_ppl_abs_diff": mean(difference.abs()),
        "log_ppl_diff_max": float(difference.max()),
        "log_ppl_diff_min": float(difference.min()),
        "ppl_ratio": mean(difference.exp()),
        "chi2_token": mean((2.0 * of_token.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()) - 1.0,
        "chi2_seq": mean((2.0 * of_row.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()) - 1.0,
    }


def _row_statistics(rows: Tensor, prefix: str, *, centre: float) -> dict[str, float]:
    return {
        f"{prefix}_mean": mean(rows),
        f"{prefix}_std": float(rows.std()) if rows.numel() > 1 else 0.0,
        f"{prefix}_max": float(rows.max()),
        f"{prefix}_min": float(rows.min()),
        f"{prefix}_max_deviation": float((rows - centre).abs().max()),
    }
