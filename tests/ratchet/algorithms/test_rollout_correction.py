"""Importance weights, rejection and off-policy diagnostics against numbers worked by hand."""

import math

import pytest
import torch
from torch import Tensor

from ratchet.algorithms.batch import Compat
from ratchet.algorithms.rollout_bands import rejection_bounds, weight_band
from ratchet.algorithms.rollout_correction import importance_weights, rejection_mask
from ratchet.algorithms.rollout_correction_metrics import off_policy_metrics

NAN = math.nan
# Ratios of policy to sampler: 4 and 1/2 in the first row, 1 in the second, nothing in the third.
RATIOS = torch.tensor([[4.0, 0.5, NAN], [1.0, NAN, NAN], [NAN, NAN, NAN]], dtype=torch.float64)
LOG_RATIO = RATIOS.log()
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("level", "threshold", "expected"),
    [
        ("token", 3.0, [[3.0, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        ("token", "3", [[3.0, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        ("token", "0.75_5", [[4.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        ("sequence", 3.0, [[2.0, 2.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        ("sequence", 1.5, [[1.5, 1.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        ("sequence", "0.5_1.5", [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
    ],
)
def test_weights_are_the_numbers_worked_by_hand(
    level: str, threshold: float | str, expected: list[list[float]]
) -> None:
    log_ratio = LOG_RATIO.clone().requires_grad_()
    weights, _ = importance_weights(log_ratio, MASK, level, threshold)  # type: ignore[arg-type]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0.0)
    assert not weights.requires_grad


def test_normalised_weights_have_a_mean_of_one() -> None:
    by_token, metrics = importance_weights(LOG_RATIO, MASK, "token", 3.0, batch_normalize=True)
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(1.5)
    assert by_token[MASK > 0].tolist() == pytest.approx([2.0, 1 / 3, 2 / 3])
    by_row, metrics = importance_weights(LOG_RATIO, MASK, "sequence", 3.0, batch_normalize=True)
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(1.5)
    assert by_row[MASK > 0].tolist() == pytest.approx([4 / 3, 4 / 3, 2 / 3])


def test_weights_that_are_all_zero_are_left_as_they_are() -> None:
    weights, metrics = importance_weights(LOG_RATIO, MASK, "token", "5_6", batch_normalize=True)
    assert not weights.any()
    assert metrics["rollout_is_batch_norm_factor"] == 1.0
    assert metrics["rollout_is_eff_sample_size"] == 0.0
    assert metrics["rollout_is_oob_ratio"] == 1.0


def test_metrics_of_token_weights_are_the_numbers_worked_by_hand() -> None:
    _, metrics = importance_weights(LOG_RATIO, MASK, "token", 3.0)
    assert metrics == pytest.approx(
        {
            "rollout_is_mean": 1.5,
            "rollout_is_min": 0.5,
            "rollout_is_max": 3.0,
            "rollout_is_std": math.sqrt((1.5**2 + 1 + 0.5**2) / 3),
            "rollout_is_eff_sample_size": 4.5**2 / (3 * 10.25),
            "rollout_is_ratio_fraction_high": 1 / 3,
            "rollout_is_ratio_fraction_low": 0.0,
            "rollout_is_seq_mean": 1.375,  # rows of (3 + 0.5) / 2 and 1
            "rollout_is_seq_std": 0.75 / math.sqrt(2),
            "rollout_is_seq_max": 1.75,
            "rollout_is_seq_min": 1.0,
            "rollout_is_seq_max_deviation": 0.75,
            "rollout_is_seq_fraction_high": 0.0,
            "rollout_is_seq_fraction_low": 0.0,
        }
    )


def test_metrics_of_row_weights_count_rows_with_tokens() -> None:
    _, metrics = importance_weights(LOG_RATIO, MASK, "sequence", 1.5)
    assert metrics["rollout_is_max"] == pytest.approx(2.0)
    assert metrics["rollout_is_min"] == pytest.approx(1.0)
    assert metrics["rollout_is_ratio_fraction_high"] == 1 / 2
    assert metrics["rollout_is_seq_min"] == pytest.approx(1.0)
    _, theirs = importance_weights(LOG_RATIO, MASK, "sequence", 1.5, compat="verl")
    assert theirs["rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)
    assert theirs["rollout_is_seq_min"] == 0.0


def test_a_wild_ratio_gives_a_finite_weight() -> None:
    log_ratio = torch.tensor([[900.0, -900.0]])
    weights, _ = importance_weights(log_ratio, torch.ones(1, 2), "token", "1e-12_1e12")
    assert weights.tolist()[0] == pytest.approx([math.exp(20.0), math.exp(-20.0)], rel=1e-6)


@pytest.mark.parametrize(
    ("modes", "thresholds", "kept"),
    [
        # -log(4) and log(2) for the first row's tokens: the sampler over the policy is 1/4 and 2.
        ("token_k1", "0.2_3", [[1, 1], [1, 0]]),
        ("token_k1", "0.3_3", [[0, 1], [1, 0]]),
        ("token_k1", 1.9, [[0, 0], [1, 0]]),
        ("token_k2", 0.5, [[0, 1], [1, 0]]),  # halves of squares: 0.961 and 0.240
        ("token_k3", 0.2, [[0, 1], [1, 0]]),  # 4 - 1 - 1.386 = 1.614 and 0.5 - 1 + 0.693 = 0.193
        ("seq_sum_k1", "0.6_1", [[0, 0], [1, 0]]),  # log(1/2)
        ("seq_sum_k1", "0.4_1", [[1, 1], [1, 0]]),
        ("seq_sum_k2", 1.19, [[0, 0], [1, 0]]),  # 1.201
        ("seq_sum_k2", 1.21, [[1, 1], [1, 0]]),
        ("seq_sum_k3", 1.8, [[0, 0], [1, 0]]),  # 1.807
        ("seq_mean_k1", "0.72_1", [[0, 0], [1, 0]]),  # log(1/2) / 2, a ratio of 0.707
        ("seq_mean_k1", "0.70_1", [[1, 1], [1, 0]]),
        ("seq_mean_k2", 0.6, [[0, 0], [1, 0]]),  # 0.6006
        ("seq_mean_k3", 0.91, [[1, 1], [1, 0]]),  # 0.9034
        ("seq_max_k2", 0.97, [[1, 1], [1, 0]]),  # 0.961
        ("seq_max_k2", 0.95, [[0, 0], [1, 0]]),
        ("seq_max_k3", 1.6, [[0, 0], [1, 0]]),
        ("token_k2,seq_mean_k3", "0.5,0.91", [[0, 1], [1, 0]]),
        ("token_k2, seq_mean_k3", "0.5", [[0, 0], [1, 0]]),
    ],
)
def test_each_mode_rejects_what_is_beyond_its_threshold(
    modes: str, thresholds: float | str, kept: list[list[int]]
) -> None:
    mask, metrics = rejection_mask(LOG_RATIO, MASK, modes, thresholds)
    assert mask[:2, :2].tolist() == kept
    assert mask.dtype == MASK.dtype
    rejected = 3 - sum(map(sum, kept))
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(rejected / 3)
    assert metrics["rollout_rs_seq_masked_fraction"] == (0.5 if rejected else 0.0)


def test_a_mask_of_truth_values_stays_one() -> None:
    mask, _ = rejection_mask(LOG_RATIO, MASK > 0, "token_k2", 0.5)
    assert mask.tolist() == [[False, True, False], [True, False, False], [False, False, False]]


def test_metrics_of_a_rejection_by_token_are_the_numbers_worked_by_hand() -> None:
    _, metrics = rejection_mask(LOG_RATIO, MASK, "token_k1", "0.5_2")
    log2 = math.log(2.0)
    rows = -log2 / 2, 0.0  # means of (-2, 1) and (0) log2
    expected = {
        "mean": -log2 / 3,
        "max": log2,
        "min": -2 * log2,
        "std": log2 * math.sqrt(2 / 3),  # -1, 1 and 0 log2, once held to the band
        "fraction_high": 0.0,
        "fraction_low": 1 / 3,
        "seq_mean": sum(rows) / 2,
        "seq_std": log2 / 2 / math.sqrt(2),
        "seq_max": 0.0,
        "seq_min": rows[0],
        "seq_max_deviation": log2 / 2,
        "seq_fraction_high": 0.0,
        "seq_fraction_low": 0.0,
        "masked_fraction": 1 / 3,
        "seq_masked_fraction": 1 / 2,
    }
    own = {f"rollout_rs_token_k1_{name}": value for name, value in expected.items()}
    assert metrics == pytest.approx(
        own | {"rollout_rs_masked_fraction": 1 / 3, "rollout_rs_seq_masked_fraction": 1 / 2}, abs=1e-12
    )


@pytest.mark.parametrize(("compat", "share"), [("ratchet", 1 / 2), ("verl", 1 / 3)])
def test_rows_without_tokens_are_counted_by_verl_only(compat: Compat, share: float) -> None:
    _, metrics = rejection_mask(LOG_RATIO, MASK, "seq_max_k2", 0.5, compat=compat)
    assert metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(share)


def test_an_empty_mask_gives_no_weight_no_metric_and_no_error() -> None:
    nothing = torch.zeros_like(MASK)
    weights, metrics = importance_weights(LOG_RATIO, nothing, "sequence", 2.0, batch_normalize=True)
    assert not weights.any()
    assert metrics == {}
    mask, metrics = rejection_mask(LOG_RATIO, nothing, "seq_mean_k1", 2.0)
    assert not mask.any()
    assert metrics == {}
    assert off_policy_metrics(LOG_RATIO, LOG_RATIO, nothing) == {}


def test_diagnostics_are_the_numbers_worked_by_hand() -> None:
    sampler = torch.tensor([[0.125, 0.5, NAN], [0.25, NAN, NAN], [NAN] * 3], dtype=torch.float64).log()
    policy = sampler + LOG_RATIO  # probabilities 1/2, 1/4 and 1/4
    metrics = off_policy_metrics(policy, sampler, MASK)
    log2 = math.log(2.0)
    assert metrics == pytest.approx(
        {
            "training_ppl": (math.sqrt(8.0) + 4.0) / 2,
            "training_log_ppl": (1.5 + 2.0) * log2 / 2,
            "kl": -log2 / 3,
            "k3_kl": (4 + 0.5 + 1 - 3 - log2) / 3,
            "rollout_ppl": (4.0 + 4.0) / 2,
            "rollout_log_ppl": 2.0 * log2,
            "log_ppl_diff": -log2 / 4,
            "log_ppl_abs_diff": log2 / 4,
            "log_ppl_diff_max": 0.0,
            "log_ppl_diff_min": -log2 / 2,
            "ppl_ratio": (1 / math.sqrt(2.0) + 1.0) / 2,
            "chi2_token": (16 + 0.25 + 1) / 3 - 1,
            "chi2_seq": (4 + 1) / 2 - 1,
        },
        abs=1e-12,
    )
    theirs = off_policy_metrics(policy, sampler, MASK, compat="verl")
    assert theirs["rollout_ppl"] == pytest.approx((4.0 + 4.0 + 1.0) / 3)


def test_bands_are_read_from_numbers_and_text() -> None:
    assert weight_band(2) == (None, 2.0)
    assert weight_band(" 0.5_5 ") == (0.5, 5.0)
    bounds = rejection_bounds("token_k1,seq_max_k2,token_k1", "0.5_2,0.3")
    assert bounds == {"token_k1": (-math.log(2.0), math.log(2.0)), "seq_max_k2": (None, 0.3)}
    assert rejection_bounds("token_k1", 4) == {"token_k1": (-math.log(4.0), math.log(4.0))}


@pytest.mark.parametrize("threshold", [0.0, -1.0, math.nan, math.inf, True, "", "a", "1_", "2_1", "0_1", "1_2_3"])
def test_a_band_that_makes_no_sense_is_refused(threshold: float | str) -> None:
    with pytest.raises(ValueError, match="rollout_is_threshold"):
        importance_weights(LOG_RATIO, MASK, "token", threshold)


@pytest.mark.parametrize(
    ("modes", "thresholds"),
    [
        ("", 1.0),
        ("token_k4", 1.0),
        ("seq_max_k1", 2.0),
        ("token_k1", None),
        ("token_k1", 0.5),
        ("token_k2", "0.1_0.2"),
        ("token_k2,token_k3,token_k1", "1,2"),
    ],
)
def test_modes_and_thresholds_that_do_not_fit_are_refused(modes: str, thresholds: float | str | None) -> None:
    with pytest.raises(ValueError, match="rollout_rs"):
        rejection_mask(LOG_RATIO, MASK, modes, thresholds)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="'row'"):
        importance_weights(LOG_RATIO, MASK, "row", 2.0)  # type: ignore[arg-type]


def test_a_row_has_the_same_weights_in_any_batch_and_padding() -> None:
    def weights(rows: Tensor, mask: Tensor) -> Tensor:
        return importance_weights(rows, mask, "sequence", 3.0)[0]

    wide = torch.cat([LOG_RATIO, torch.full((3, 4), NAN, dtype=torch.float64)], dim=1)
    wide_mask = torch.cat([MASK, torch.zeros(3, 4)], dim=1)
    assert torch.equal(weights(wide, wide_mask)[:, :3], weights(LOG_RATIO, MASK))
    assert torch.equal(weights(LOG_RATIO[:1], MASK[:1]), weights(LOG_RATIO, MASK)[:1])
