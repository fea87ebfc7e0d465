"""Updates whose behaviour log-probs are their own: the policy gradient, the sampler's drift, truncated weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ratchet.algorithms.batch import LossOptions
from ratchet.engines.model import load_causal_lm
from ratchet.engines.scorer import Scorer
from ratchet.engines.trainer import Trainer, TrainRow
from ratchet.errors import ConfigError, DataError, NumericsError
from tests.ratchet.engines.test_trainer_losses import loss_settings, padded_log_probs, trained
from tests.ratchet.engines.trainer_cases import POLICY, POLICY_LOSS_NAMES, policy_rows
from tests.tiny_models import make_tiny_model

# AdamW's first step is lr * g / (|g| + eps): with a huge epsilon, and a rate as large, it is the gradient.
GRADIENT: dict[str, Any] = {"lr": 1e4, "adam_eps": 1e4, "weight_decay": 0.0, "grad_clip": None}
THRESHOLD = 1.1
Column = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def given(folder: Path) -> list[TrainRow]:
    """Rows of a behaviour policy that is near the folder's."""
    return policy_rows(folder)


@pytest.fixture(scope="module")
def rows(given: list[TrainRow]) -> list[TrainRow]:
    """The same without behaviour or weights."""
    return [replace(row, behaviour_log_probs=None, importance_weights=None) for row in given]


def with_sampler(rows: list[TrainRow], given: list[TrainRow], places: set[int]) -> list[TrainRow]:
    return [
        replace(row, sampler_log_probs=other.behaviour_log_probs if place in places else None)
        for place, (row, other) in enumerate(zip(rows, given, strict=True))
    ]


@pytest.mark.parametrize("name", POLICY_LOSS_NAMES)
def test_it_is_the_update_that_a_forward_before_it_gives(name: str, folder: Path, rows: list[TrainRow]) -> None:
    settings = loss_settings(name) | GRADIENT
    trainer = Trainer.from_folder(folder, POLICY, device="cpu")
    log_probs = trainer.log_probs([row.prompt_token_ids for row in rows], [row.completion_token_ids for row in rows])
    trainer.close()
    two = [replace(row, behaviour_log_probs=own) for row, own in zip(rows, log_probs, strict=True)]
    expected, weights = trained(folder, two, **settings)
    for split in ({}, {"micro_batch_size": 2}):
        metrics, found = trained(folder, rows, **settings, **split)
        assert not any(metric.startswith("training/") for metric in metrics)
        shared = {metric: value for metric, value in expected.items() if not metric.startswith("training/")}
        assert metrics == pytest.approx(shared, abs=1e-6, rel=1e-6 if not split else 1e-5)
        for of, tensor in found.items():
            # Gradients, whose norm is above 0.1.
            torch.testing.assert_close(tensor, weights[of], atol=1e-6, rtol=0, msg=of)


def reference(folder: Path, rows: list[TrainRow], mode: str, threshold: float | None) -> dict[str, Tensor]:
    """The gradient in float64 of minus the weighted mean of advantage * log-prob: REINFORCE, without any ratio."""
    rows = [row for row in rows if any(row.loss_mask)]
    model = load_causal_lm(folder, torch.float32).double()
    log_probs, _, mask = padded_log_probs(model, rows)
    terms = torch.zeros_like(log_probs)
    for place, row in enumerate(rows):
        count = len(row.completion_token_ids)
        own = log_probs[place, :count]
        weight = torch.ones(count, dtype=torch.float64)
        if threshold is not None:
            assert row.sampler_log_probs is not None
            ratio = (own.detach() - torch.tensor(row.sampler_log_probs, dtype=torch.float64)).exp()
            weight = torch.minimum(ratio, torch.tensor(threshold))
        terms[place, :count] = -weight * torch.tensor(row.advantages, dtype=torch.float64) * own
    terms = torch.where(mask, terms, 0.0)
    loss = terms.sum() / mask.sum() if mode == "token-mean" else (terms.sum(-1) / mask.sum(-1)).mean()
    torch.autograd.backward(loss)
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("threshold", [None, THRESHOLD])
@pytest.mark.parametrize(
    ("name", "changed", "mode"),
    [
        ("vanilla", {}, "token-mean"),
        ("vanilla", {"loss_options": LossOptions(clip_ratio_low=0.2, clip_ratio_high=0.28)}, "token-mean"),
        ("vanilla", {"loss_agg_mode": "seq-mean-token-mean"}, "seq-mean-token-mean"),
        ("gspo", {}, "seq-mean-token-mean"),
        ("gpg", {}, "token-mean"),
    ],
)
def test_the_gradient_is_the_policy_gradient(
    name: str,
    changed: dict[str, Any],
    mode: str,
    threshold: float | None,
    folder: Path,
    rows: list[TrainRow],
    given: list[TrainRow],
) -> None:
    if threshold is not None:
        rows = with_sampler(rows, given, set(range(len(rows))))
    expected = reference(folder, rows, mode, threshold)
    norm = torch.stack([gradient.square().sum() for gradient in expected.values()]).sum().sqrt().item()
    before = dict(load_causal_lm(folder, torch.float32).named_parameters())
    for split in ({}, {"micro_batch_size": 2}):
        settings = {"policy_loss": name, "importance_threshold": threshold, **changed, **GRADIENT, **split}
        metrics, weights = trained(folder, rows, **settings)
        assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
        for of, gradient in expected.items():
            found = (before[of].double() - weights[of].double()).detach()
            torch.testing.assert_close(found, gradient, atol=1e-5 * norm, rtol=1e-3, msg=of)


def differences(folder: Path, rows: list[TrainRow], others: list[TrainRow]) -> tuple[Tensor, Tensor]:
    """Policy and other log-probs of the loss tokens, float64."""
    scorer = Scorer.from_folder(
        folder, compute_dtype="float32", temperature=1.0, max_tokens_per_micro_batch=64, device="cpu"
    )
    scored = scorer.log_probs([row.prompt_token_ids for row in rows], [row.completion_token_ids for row in rows])
    pairs = [
        (own, other)
        for row, mine, theirs in zip(rows, scored, others, strict=True)
        for own, other, is_used in zip(mine, theirs.behaviour_log_probs or [], row.loss_mask, strict=True)
        if is_used
    ]
    both = torch.tensor(pairs, dtype=torch.float64)
    return both[:, 0], both[:, 1]


@pytest.mark.parametrize("split", [{}, {"micro_batch_size": 1}])
@pytest.mark.parametrize("has_behaviour", [True, False])
def test_drift_is_measured_over_the_rows_that_the_sampler_scored(
    has_behaviour: bool, split: dict[str, int], folder: Path, rows: list[TrainRow], given: list[TrainRow]
) -> None:
    places = {0, 3, 6}
    sampled = with_sampler(
        [replace(row, importance_weights=None) for row in given] if has_behaviour else rows, given, places
    )
    some = [given[place] for place in sorted(places)]
    own, other = differences(folder, some, some)
    difference = (own.exp() - other.exp()).abs()
    metrics, _ = trained(folder, sampled, **split)
    for name in ("mean", "max", "std"):
        expected = getattr(difference, name)().item()
        assert metrics[f"training/rollout_probs_diff_{name}"] == pytest.approx(expected, abs=1e-6)


def test_drift_may_be_measured_in_some_mini_batches_only(folder: Path, given: list[TrainRow]) -> None:
    sampled = with_sampler(given, given, {0})
    metrics, _ = trained(folder, sampled, mini_batch_size=3)
    assert metrics["training/rollout_probs_diff_mean"] > 0
    none, _ = trained(folder, list(reversed(sampled)), mini_batch_size=3)
    assert none["actor/grad_norm"] > 0


@pytest.mark.parametrize("split", [{}, {"micro_batch_size": 1}])
def test_weights_are_truncated_and_reported(
    split: dict[str, int], folder: Path, rows: list[TrainRow], given: list[TrainRow]
) -> None:
    own, other = differences(folder, given, given)
    raw = (own - other).exp()
    weights = raw.clamp(max=THRESHOLD)
    metrics, _ = trained(
        folder, with_sampler(rows, given, set(range(len(rows)))), importance_threshold=THRESHOLD, **split
    )
    expected = {
        "rollout_is_mean": weights.mean(),
        "rollout_is_max": weights.max(),
        "rollout_is_min": weights.min(),
        "rollout_is_ratio_fraction_high": (raw > THRESHOLD).double().mean(),
    }
    assert 0 < expected["rollout_is_ratio_fraction_high"] < 1
    for name, value in expected.items():
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(value.item(), abs=1e-5)


def test_rows_that_do_not_go_together_are_refused(folder: Path, rows: list[TrainRow], given: list[TrainRow]) -> None:
    everywhere = set(range(len(rows)))
    plain = [replace(row, importance_weights=None) for row in given]
    bad = replace(rows[0], sampler_log_probs=[0.0, float("nan"), 0.0])
    for error, message, refused, changed in (
        (DataError, "behaviour_log_probs in all rows or in none, got 1 of 9", [plain[0], *rows[1:]], {}),
        (DataError, "9 rows in 2 optimizer steps", rows, {"ppo_epochs": 2}),
        (DataError, "9 rows in 3 optimizer steps", rows, {"mini_batch_size": 4}),
        (DataError, "got 8 of 9", with_sampler(rows, given, everywhere - {2}), {"importance_threshold": 2.0}),
        (DataError, "no behaviour_log_probs", with_sampler(plain, given, everywhere), {"importance_threshold": 2.0}),
        (DataError, "row 1 has 2 sampler_log_probs for 1", [rows[0], replace(rows[1], sampler_log_probs=[0, 0])], {}),
        (NumericsError, "row 0 has sampler_log_probs", [bad, *rows[1:]], {}),
    ):
        with pytest.raises(error, match=message):
            trained(folder, refused, **changed)
    with pytest.raises(ConfigError, match="importance_threshold"):
        replace(POLICY, importance_threshold=0.0)


def test_arrays_train_as_lists_do(folder: Path, given: list[TrainRow]) -> None:
    arrays = [
        TrainRow(
            prompt_token_ids=np.array(row.prompt_token_ids, np.int32),
            completion_token_ids=np.array(row.completion_token_ids, np.int32),
            advantages=np.array(row.advantages),
            behaviour_log_probs=np.array(row.behaviour_log_probs),
            loss_mask=np.array(row.loss_mask, np.bool_),
            reference_log_probs=np.array(row.reference_log_probs),
            importance_weights=np.array(row.importance_weights),
        )
        for row in given
    ]
    for name in ("vanilla", "kl_cov"):
        metrics, weights = trained(folder, arrays, **loss_settings(name))
        expected, others = trained(folder, given, **loss_settings(name))
        assert metrics == expected
        assert all(torch.equal(tensor, others[of]) for of, tensor in weights.items())


def test_log_probs_at_another_temperature(folder: Path) -> None:
    prompts, completions = [[5, 6], np.array([7])], [np.array([8, 9, 10]), [11]]
    trainer = Trainer.from_folder(folder, POLICY, device="cpu")
    budget = POLICY.max_tokens_per_micro_batch
    for temperature in (0.5, 2.0):
        scorer = Scorer.from_folder(
            folder, compute_dtype="float32", temperature=temperature, max_tokens_per_micro_batch=budget, device="cpu"
        )
        assert trainer.log_probs(prompts, completions, temperature=temperature) == scorer.log_probs(
            [[5, 6], [7]], [[8, 9, 10], [11]]
        )
    trainer.close()
