"""A policy update with SFT rows beside the sampled ones: its gradient is the weighted sum of the two."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ratchet.engines.offline_rows import SFTRow
from ratchet.engines.trainer import Trainer, TrainRow
from ratchet.errors import ConfigError, DataError
from tests.ratchet.engines.offline_cases import GRADIENT, SFT, causal_folder, gradient, sft_rows
from tests.ratchet.engines.trainer_cases import OPTIONS, POLICY, policy_rows

Update = Callable[..., tuple[dict[str, Tensor], dict[str, float]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return causal_folder(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[TrainRow]:
    return policy_rows(folder)


@pytest.fixture
def update(folder: Path) -> Iterator[Update]:
    """The change of each weight by one update of a new trainer, and the metrics; the gradient unless `lr` is given."""
    trainers: list[Trainer] = []

    def run(rows: list[TrainRow], sft: list[SFTRow], **changed: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
        given = changed if "lr" in changed else {**GRADIENT, **changed}
        trainers.append(Trainer.from_folder(folder, replace(POLICY, **given), device="cpu"))
        before = trainers[-1].export_weights("float32")
        metrics = trainers[-1].update(rows, step=1, sft_rows=sft)
        after = trainers[-1].export_weights("float32")
        return {name: before[name].double() - after[name].double() for name in before}, metrics

    yield run
    for trainer in trainers:
        trainer.close()


def assert_sum(found: dict[str, Tensor], *parts: tuple[float, dict[str, Tensor]]) -> None:
    for name, tensor in found.items():
        expected = sum(weight * part[name] for weight, part in parts)
        torch.testing.assert_close(tensor, expected, atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("split", [{}, {"max_tokens_per_micro_batch": 15}, {"micro_batch_size": 2}])
@pytest.mark.parametrize("loss_agg_mode", ["token-mean", "seq-mean-token-mean"])
def test_the_mixed_gradient_is_the_weighted_sum_of_the_two(
    split: dict[str, int], loss_agg_mode: str, folder: Path, rows: list[TrainRow], update: Update
) -> None:
    own: dict[str, Any] = {"loss_agg_mode": loss_agg_mode, "entropy_coeff": 0.01, "kl_loss_coef": 0.1}
    of_rl, rl_metrics = update(rows, [], **own)
    of_sft, sft_metrics = gradient(folder, SFT, sft_rows())
    mixed, metrics = update(rows, sft_rows(), sft_weight=0.3, sft_scale=0.5, **own, **split)
    assert_sum(mixed, (0.7, of_rl), (0.3 * 0.5, of_sft))
    assert max(float((mixed[name] - 0.7 * of_rl[name]).abs().max()) for name in mixed) > 1e-4
    # What is measured of the sampled rows is theirs alone.
    changed = {"actor/grad_norm", "perf/total_num_tokens"}
    for name in rl_metrics.keys() - changed:
        assert metrics[name] == pytest.approx(rl_metrics[name], abs=1e-5), name
    assert metrics["actor/sft_loss"] == pytest.approx(sft_metrics["actor/loss"], abs=1e-5)
    assert metrics["actor/sft_tokens"] == 15.0
    rl_loss = rl_metrics["actor/pg_loss"] - 0.01 * rl_metrics["actor/entropy"] + 0.1 * rl_metrics["actor/kl_loss"]
    assert metrics["actor/loss"] == pytest.approx(0.7 * rl_loss + 0.15 * metrics["actor/sft_loss"], abs=1e-5)


def test_imitation_is_at_temperature_1_whatever_is_sampled_at(
    folder: Path, rows: list[TrainRow], update: Update
) -> None:
    of_rl, _ = update(rows, [], temperature=0.7)
    of_sft, _ = gradient(folder, SFT, sft_rows())
    mixed, _ = update(rows, sft_rows(), temperature=0.7, sft_weight=0.4)
    assert_sum(mixed, (0.6, of_rl), (0.4, of_sft))


def test_a_selection_of_tokens_is_made_among_the_sampled_ones(
    rows: list[TrainRow], folder: Path, update: Update
) -> None:
    own: dict[str, Any] = {"policy_loss": "kl_cov", "loss_options": OPTIONS["kl_cov"], "max_tokens_per_micro_batch": 15}
    of_rl, _ = update(rows, [], **own)
    of_sft, _ = gradient(folder, SFT, sft_rows())
    mixed, _ = update(rows, sft_rows(), sft_weight=0.5, **own)
    assert_sum(mixed, (0.5, of_rl), (0.5, of_sft))


def test_rows_to_imitate_are_dealt_out_over_the_mini_batches(
    folder: Path, rows: list[TrainRow], update: Update
) -> None:
    # Two mini-batches of 5 and 4 rows: the first two SFT rows go with the first, the other three with the second.
    settings = replace(POLICY, sft_weight=0.3)
    at_once = Trainer.from_folder(folder, replace(settings, mini_batch_size=5), device="cpu")
    in_two = Trainer.from_folder(folder, settings, device="cpu")
    metrics = at_once.update(rows, step=1, sft_rows=sft_rows())
    for step, (some, sft) in enumerate([(rows[:5], sft_rows()[:2]), (rows[5:], sft_rows()[2:])], start=1):
        in_two.update(some, step=step, sft_rows=sft)
    weights = at_once.export_weights("float32")
    for name, tensor in in_two.export_weights("float32").items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-6, rtol=0, msg=name)
    assert metrics["actor/sft_tokens"] == 7.5
    at_once.close()
    in_two.close()


def test_where_nothing_sampled_is_in_the_loss_only_imitation_trains(
    folder: Path, rows: list[TrainRow], update: Update
) -> None:
    masked = [replace(row, loss_mask=[False] * len(row.loss_mask)) for row in rows]
    of_sft, _ = gradient(folder, SFT, sft_rows())
    for given in (masked, []):
        alone, metrics = update(given, sft_rows(), sft_weight=0.3)
        assert_sum(alone, (0.3, of_sft))
        assert "actor/pg_loss" not in metrics
    # The weight of the sampled rows does not depend on whether there was something to imitate.
    of_rl, _ = update(rows, [])
    without, metrics = update(rows, [], sft_weight=0.3)
    assert_sum(without, (0.7, of_rl))
    assert "actor/sft_loss" not in metrics


def test_what_does_not_go_together_is_refused(rows: list[TrainRow], update: Update) -> None:
    with pytest.raises(DataError, match="sft_weight above 0 for 5 SFT rows"):
        update(rows, sft_rows())
    with pytest.raises(DataError, match="row 1 has 2 loss_mask for 1 completion tokens"):
        update(rows, [sft_rows()[0], replace(sft_rows()[1], loss_mask=[True, True])], sft_weight=0.3)
    refused: list[dict[str, Any]] = [{"sft_weight": 1.0}, {"sft_weight": -0.1}, {"sft_scale": 0.0}]
    for wrong in refused:
        with pytest.raises(ConfigError, match="sft_"):
            replace(POLICY, **wrong)
