"""Every policy loss in training: against a float64 padded reference, and whatever the split of a mini-batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ratchet.algorithms.aggregation import LossTotals
from ratchet.algorithms.batch import LossBatch, LossOptions
from ratchet.algorithms.catalog import POLICY_LOSSES, Entry
from ratchet.engines.model import load_causal_lm
from ratchet.engines.sharded import MiniBatch
from ratchet.engines.trainer import Trainer, TrainRow
from ratchet.errors import DataError, EngineError
from tests.ratchet.engines.trainer_cases import OPTIONS, POLICY, POLICY_LOSS_NAMES, policy_rows
from tests.tiny_models import make_tiny_model

COMMON: dict[str, Any] = {"kl_loss_coef": 0.1, "entropy_coeff": 0.01, "kl_loss_type": "k1+"}
TAKE_ALL = replace(OPTIONS["clip_cov"], clip_cov_ratio=1.0)
"""So that what clip_cov draws is all that it may draw, and does not depend on the order of the rows."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("losses"))


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[TrainRow]:
    return policy_rows(folder)


def trained(folder: Path, rows: list[TrainRow], **changed: Any) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and weights after one step."""
    trainer = Trainer.from_folder(folder, replace(POLICY, **changed), device="cpu")
    try:
        return trainer.update(rows, step=1), trainer.export_weights("float32")
    finally:
        trainer.close()


def loss_settings(name: str, options: LossOptions | None = None) -> dict[str, Any]:
    return {"policy_loss": name, "loss_options": options or OPTIONS.get(name, LossOptions()), **COMMON}


def assert_equal_but_for_rounding(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    assert one[0] == pytest.approx(other[0], abs=1e-5, rel=1e-4)
    for name, tensor in one[1].items():
        torch.testing.assert_close(tensor, other[1][name], atol=2e-5, rtol=0, msg=name)


@pytest.mark.parametrize("name", POLICY_LOSS_NAMES)
def test_micro_batches_change_rounding_only(name: str, folder: Path, rows: list[TrainRow]) -> None:
    whole = trained(folder, rows, **loss_settings(name), max_tokens_per_micro_batch=4000)
    for split in ({"max_tokens_per_micro_batch": 40}, {"micro_batch_size": 1}):
        assert_equal_but_for_rounding(trained(folder, rows, **loss_settings(name), **split), whole)


@pytest.mark.parametrize("name", POLICY_LOSS_NAMES)
def test_the_order_of_rows_changes_rounding_only(name: str, folder: Path, rows: list[TrainRow]) -> None:
    settings = loss_settings(name, TAKE_ALL if name == "clip_cov" else None)
    shuffled = [rows[place] for place in (4, 8, 2, 0, 7, 6, 1, 3, 5)]
    assert_equal_but_for_rounding(trained(folder, shuffled, **settings), trained(folder, rows, **settings))


def padded_log_probs(model: Any, rows: list[TrainRow]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and entropies [B, T] of padded completions by plain logits, and the mask [B, T]."""
    width = max(len(row.completion_token_ids) for row in rows)
    log_probs, entropies, masks = [], [], []
    for row in rows:
        length = len(row.completion_token_ids)
        ids = [*row.prompt_token_ids, *row.completion_token_ids, *[3] * (width - length)]
        distribution = torch.log_softmax(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0], -1)
        start = len(row.prompt_token_ids)
        before = distribution[start - 1 : start - 1 + width]
        log_probs.append(before.gather(1, torch.tensor(ids[start:])[:, None])[:, 0])
        entropies.append(-(before.exp() * before).sum(-1))
        masks.append(torch.tensor([*row.loss_mask, *[False] * (width - length)]))
    return torch.stack(log_probs), torch.stack(entropies), torch.stack(masks)


def reference_gradients(folder: Path, rows: list[TrainRow], name: str, options: LossOptions) -> dict[str, Tensor]:
    """Gradients in float64 of the whole mini-batch at once: pg - 0.01 entropy + 0.1 KL, from padded rows."""
    rows = [row for row in rows if any(row.loss_mask)]
    model = load_causal_lm(folder, torch.float32).double()
    log_probs, entropy, mask = padded_log_probs(model, rows)

    def column(of: str) -> Tensor:
        kept = [[value for value, used in zip(getattr(row, of), row.loss_mask, strict=True) if used] for row in rows]
        return torch.tensor([value for values in kept for value in values], dtype=torch.float64)

    entry = POLICY_LOSSES.get(name)
    scored, row_index = log_probs[mask], mask.nonzero()[:, 0]
    behaviour, advantages = column("behaviour_log_probs"), column("advantages")
    select = entry.selection()
    picked = select(scored.detach(), behaviour, advantages, options, torch.Generator()) if select else None
    batch = LossBatch(
        log_probs=scored,
        behaviour_log_probs=behaviour,
        advantages=advantages,
        row_index=row_index,
        num_rows=len(rows),
        importance_weights=column("importance_weights"),
        selection=picked,
    )
    per_token, _ = entry.function()(batch, options)
    if entry.loss_agg_mode == "seq-mean-token-mean":
        loss = torch.stack([per_token[row_index == row].mean() for row in range(len(rows))]).mean()
    else:
        loss = per_token.mean()
    # "k1+" has the gradient of k2, half the square.
    kl = 0.5 * (scored - column("reference_log_probs")).square()
    torch.autograd.backward(loss - 0.01 * entropy[mask].mean() + 0.1 * kl.mean())
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", POLICY_LOSS_NAMES)
def test_the_gradient_is_that_of_a_padded_float64_model(name: str, folder: Path, rows: list[TrainRow]) -> None:
    settings = loss_settings(name, TAKE_ALL if name == "clip_cov" else None)
    # AdamW's first step is lr * g / (|g| + eps): with a huge epsilon, and a rate as large, it is the gradient.
    scale = 1e4
    huge: dict[str, Any] = {"lr": scale, "adam_eps": scale, "weight_decay": 0.0, "grad_clip": None}
    metrics, weights = trained(folder, rows, **settings, **huge, max_tokens_per_micro_batch=20)
    expected = reference_gradients(folder, rows, name, settings["loss_options"])
    norm = torch.stack([gradient.square().sum() for gradient in expected.values()]).sum().sqrt().item()
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    before = dict(load_causal_lm(folder, torch.float32).named_parameters())
    assert expected.keys() == weights.keys()
    for of, gradient in expected.items():
        found = (before[of].double() - weights[of].double()).detach()
        torch.testing.assert_close(found, gradient, atol=1e-4 * norm, rtol=1e-3, msg=of)


def test_a_selection_sees_the_whole_mini_batch_and_draws_by_its_place_in_the_run(
    folder: Path, rows: list[TrainRow]
) -> None:
    used = [row for row in rows if any(row.loss_mask)]
    totals = LossTotals.of(sum(row.loss_mask) for row in used)

    def drawn(place: tuple[int, int, int], **changed: Any) -> list[bool]:
        options = replace(OPTIONS["clip_cov"], clip_cov_ratio=0.1)
        settings = replace(POLICY, policy_loss="clip_cov", loss_options=options, **changed)
        trainer = Trainer.from_folder(folder, settings, device="cpu")
        picked = trainer._select(MiniBatch(used, totals, *place))
        trainer.close()
        assert picked is not None
        return [bool(value) for value in picked]

    first = drawn((1, 0, 0))
    assert len(first) == totals.num_tokens
    assert sum(first) == int(0.1 * totals.num_tokens)
    assert drawn((1, 0, 0), micro_batch_size=1) == first
    others = [drawn(place) for place in ((2, 0, 0), (1, 1, 0), (1, 0, 1))]
    assert any(other != first for other in others)
    assert len({tuple(draw) for draw in [first, *others, drawn((1, 0, 0), seed=1)]}) > 2


def test_importance_weights_multiply_the_loss(folder: Path, rows: list[TrainRow]) -> None:
    doubled, plain = (
        trained(folder, [replace(row, importance_weights=[weight] * len(row.advantages)) for row in rows])[0]
        for weight in (2.0, 1.0)
    )
    assert doubled["actor/pg_loss"] == pytest.approx(2 * plain["actor/pg_loss"], rel=1e-6)
    without = trained(folder, [replace(row, importance_weights=None) for row in rows])[0]
    assert without == pytest.approx(plain)
    with pytest.raises(DataError, match="1 of 9"):
        trained(folder, [rows[0], *(replace(row, importance_weights=None) for row in rows[1:])])


def test_a_loss_of_ones_own_is_trained_on_and_its_metrics_are_means_over_tokens(
    folder: Path, rows: list[TrainRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(batch: LossBatch, options: LossOptions) -> tuple[Tensor, dict[str, Tensor]]:
        return -batch.log_probs * batch.advantages, {"positive": (batch.advantages > 0).float()}

    def of_one_number(batch: LossBatch, options: LossOptions) -> tuple[Tensor, dict[str, Tensor]]:
        return batch.log_probs.mean(), {}

    monkeypatch.setitem(POLICY_LOSSES._entries, "own", Entry("own", own))
    monkeypatch.setitem(POLICY_LOSSES._entries, "one", Entry("one", of_one_number))
    plain = [replace(row, importance_weights=None) for row in rows]
    metrics, weights = trained(folder, plain, policy_loss="own", micro_batch_size=2)
    used = [
        advantage for row in rows for advantage, is_used in zip(row.advantages, row.loss_mask, strict=True) if is_used
    ]
    assert metrics["actor/positive"] == pytest.approx(sum(advantage > 0 for advantage in used) / len(used))
    assert "actor/pg_clipfrac" not in metrics
    _, of_gpg = trained(folder, plain, policy_loss="gpg", micro_batch_size=2)
    assert all(torch.equal(tensor, of_gpg[name]) for name, tensor in weights.items())
    with pytest.raises(EngineError, match="one loss per token"):
        trained(folder, plain, policy_loss="one")
