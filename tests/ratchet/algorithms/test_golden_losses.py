"""Losses, aggregation, KL estimates, value loss and rollout correction replayed against numbers computed by verl.

Trap: padded rows come in, and a mask may have holes and empty rows; what is outside it is compared nowhere but in
importance weights and rejection masks, which are defined there.
"""

import sys
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from ratchet.algorithms.aggregation import LossTotals, aggregate
from ratchet.algorithms.batch import LossBatch, LossOptions
from ratchet.algorithms.catalog import POLICY_LOSSES
from ratchet.algorithms.kl import kl_estimate
from ratchet.algorithms.rollout_correction import importance_weights, rejection_mask
from ratchet.algorithms.value_loss import value_loss
from tests.golden import Case, golden_case, golden_cases, golden_functions

OPTIONS = ("clip_ratio_c", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
SEED = 0
"""Which draw clip_cov's cases were made with, where more tokens stand to be chosen than are."""


def test_golden_functions_are_all_replayed_here_or_with_the_advantages() -> None:
    modules = [sys.modules[__name__], import_module("tests.ratchet.algorithms.test_golden_advantages")]
    marks = [mark for module in modules for test in vars(module).values() for mark in getattr(test, "pytestmark", [])]
    names = {
        name for mark in marks if mark.args[0] == "name" for parameter in mark.args[1] for name in parameter.values
    }
    assert golden_functions() == {golden_case(name).function for name in names if name is not None}


@pytest.mark.parametrize("name", golden_cases("agg_loss"))
def test_golden_aggregated_losses_agree_with_verl(name: str) -> None:
    case = golden_case(name)
    loss = _aggregated(case.arguments["loss_mat"], case.arguments["loss_mask"], case.options)
    _assert_close(loss, case.outputs[0], case)


@pytest.mark.parametrize("name", golden_cases("kl_penalty"))
def test_golden_kl_estimates_and_their_gradients_agree_with_verl(name: str) -> None:
    case = golden_case(name)
    log_probs = case.arguments["logprob"].requires_grad_()
    mask = case.arguments["response_mask"] > 0
    estimate = kl_estimate(log_probs, case.arguments["ref_logprob"], case.options["kl_penalty"])
    (gradient,) = torch.autograd.grad(estimate[mask].sum(), log_probs)
    _assert_close(estimate[mask], case.outputs[0][mask], case)
    _assert_close(gradient[mask], case.outputs[1][mask], case)


@pytest.mark.parametrize("name", golden_cases("compute_value_loss"))
def test_golden_value_losses_agree_with_verl(name: str) -> None:
    case = golden_case(name)
    arguments = case.arguments
    loss, metrics = value_loss(
        arguments["vpreds"],
        arguments["returns"],
        arguments["values"],
        cliprange_value=case.options["cliprange_value"],
    )
    _assert_close(_aggregated(loss, arguments["response_mask"], case.options), case.outputs[0], case)
    _assert_close(_mean(metrics["vf_clipfrac"][arguments["response_mask"] > 0]), case.outputs[1], case)


@pytest.mark.parametrize("name", golden_cases("policy_loss:"))
def test_golden_policy_losses_gradients_and_metrics_agree_with_verl(name: str) -> None:
    case = golden_case(name)
    entry = POLICY_LOSSES.get(case.function.removeprefix("policy_loss:"))
    options = _loss_options(case.options)
    mask = case.arguments["response_mask"] > 0
    log_probs = case.arguments["log_prob"].requires_grad_()
    batch = _loss_batch(case, log_probs, mask, options, entry.selection())
    per_token, metrics = entry.function()(batch, options)
    padded = torch.zeros_like(log_probs).masked_scatter(mask, per_token)
    mode: Any = entry.loss_agg_mode or case.options["loss_agg_mode"]
    if entry.name == "geo_mean":
        # verl takes a plain mean over rows, which is 0 for an empty mask and knows no totals.
        loss = aggregate(padded, mask, mode)
    else:
        loss = _aggregated(padded, mask, case.options | {"loss_agg_mode": mode})
    (gradient,) = torch.autograd.grad(loss, log_probs)
    _assert_close(loss, case.outputs[0], case)
    _assert_close(gradient[mask], case.outputs[1][mask], case, atol=1e-7)
    for key, value in case.metrics.items():
        own = _mean(metrics[key.removeprefix("actor/")]).item()
        assert own == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), f"{key} of {name}"


@pytest.mark.parametrize("name", golden_cases("rollout_is"))
def test_golden_importance_weights_and_metrics_agree_with_verl(name: str) -> None:
    case = golden_case(name)
    options = case.options
    weights, metrics = importance_weights(
        case.arguments["log_ratio"],
        case.arguments["response_mask"],
        options["rollout_is"],
        options.get("rollout_is_threshold", 2.0),
        batch_normalize=options.get("rollout_is_batch_normalize", False),
        compat="verl",
    )
    # verl multiplies by the mask, so that NaN outside it stays NaN.
    is_used = case.arguments["response_mask"] > 0
    _assert_close(weights, torch.where(is_used, case.outputs[0], case.outputs[0].nan_to_num(nan=0.0)), case)
    _assert_same_metrics(metrics, case)


@pytest.mark.parametrize("name", golden_cases("rollout_rs"))
def test_golden_rejection_masks_and_metrics_agree_with_verl(name: str) -> None:
    case = golden_case(name)
    kept, metrics = rejection_mask(
        case.arguments["log_ratio"],
        case.arguments["response_mask"],
        case.options["rollout_rs"],
        case.options["rollout_rs_threshold"],
        compat="verl",
    )
    _assert_close(kept, case.outputs[0], case)
    _assert_same_metrics(metrics, case)


def _aggregated(loss: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    counts = (mask > 0).sum(-1)
    own = LossTotals.of(counts.tolist())
    tokens, sequences = options.get("batch_num_tokens"), options.get("global_batch_size")
    totals = LossTotals(
        num_tokens=own.num_tokens if tokens is None else tokens,
        num_sequences=own.num_sequences if sequences is None else sequences,
    )
    return aggregate(
        loss,
        mask,
        options.get("loss_agg_mode", "token-mean"),
        totals=totals,
        norm_length=options.get("loss_scale_factor"),
        num_ranks=options.get("dp_size", 1),
        compat="verl",
    )


def _loss_options(options: dict[str, Any]) -> LossOptions:
    both = options.get("clip_ratio", 0.2)
    low, high = options.get("clip_ratio_low"), options.get("clip_ratio_high")
    names = (*OPTIONS, "tau_pos", "tau_neg", "dro_beta")
    given = {name: options[name] for name in names if options.get(name) is not None}
    return LossOptions(
        clip_ratio_low=both if low is None else low,
        clip_ratio_high=both if high is None else high,
        compat="verl",
        **given,
    )


def _loss_batch(case: Case, log_probs: Tensor, mask: Tensor, options: LossOptions, select: Any) -> LossBatch:
    arguments = case.arguments
    tokens, behaviour, advantages = (
        values[mask] for values in (log_probs, arguments["old_log_prob"], arguments["advantages"])
    )
    weights = arguments.get("rollout_is_weights")
    selection = None
    if select is not None:
        generator = torch.Generator().manual_seed(case.options.get("seed", SEED))
        selection = select(tokens.detach(), behaviour, advantages, options, generator)
    return LossBatch(
        log_probs=tokens,
        behaviour_log_probs=behaviour,
        advantages=advantages,
        row_index=mask.nonzero()[:, 0],
        num_rows=mask.shape[0],
        importance_weights=None if weights is None else weights[mask],
        selection=selection,
    )


def _mean(values: Tensor) -> Tensor:
    return values.mean() if values.numel() else values.new_zeros(())


def _assert_close(ours: Tensor, golden: Tensor, case: Case, *, atol: float = 1e-6) -> None:
    torch.testing.assert_close(
        ours.detach().to(golden.dtype), golden, rtol=1e-5, atol=atol, equal_nan=True, msg=lambda m: f"{case.name}: {m}"
    )


def _assert_same_metrics(ours: dict[str, float], case: Case) -> None:
    assert ours.keys() == case.metrics.keys(), case.name
    for key, value in case.metrics.items():
        own = ours[key]
        is_near = own == pytest.approx(value, rel=1e-5, abs=1e-6)
        if key.endswith("_std") and not is_near:
            # verl takes a variance as a difference of squares in float32.
            noise = 1e-6 * (own**2 + ours[key.removesuffix("std") + "mean"] ** 2)
            is_near = own**2 == pytest.approx(value**2, rel=1e-5, abs=noise)
        assert is_near, f"{key} of {case.name}: {own} and {value}"
