"""Numbers that are not finite: in a loss, a gradient or a weight they end the update, in a diagnostic they are told."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ratchet.engines import objective
from ratchet.engines.critic import CriticTrainer
from ratchet.engines.trainer import Trainer, TrainRow
from ratchet.errors import NumericsError
from ratchet.store.manifest import finite_metrics
from tests.ratchet.engines.trainer_cases import CRITIC, POLICY, make_tiny_classifier, value_rows
from tests.tiny_models import make_tiny_model

Open = Callable[..., Any]
ROWS = [
    TrainRow([5, 6], [30, 31, 32], [1.0, -0.5, 0.25], [-6.0, -6.1, -5.9], [True] * 3, None),
    TrainRow([7], [33, 34], [-1.0, 0.5], [-6.2, -5.8], [True] * 2, None),
]


def _policy(folder: Path, **changed: Any) -> Trainer:
    if not folder.is_dir():
        make_tiny_model(folder)
    return Trainer.from_folder(folder, replace(POLICY, **changed), device="cpu")


def _critic(folder: Path, **changed: Any) -> CriticTrainer:
    make_tiny_classifier(folder)
    return CriticTrainer.from_folder(folder, replace(CRITIC, **changed), device="cpu")


def _bits(trainer: Any) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in trainer.export_weights("float32").items()}


@pytest.mark.parametrize(
    ("open_trainer", "changed", "rows", "named"),
    [
        pytest.param(_policy, {}, ROWS, r"model\.embed_tokens\.weight", id="policy"),
        pytest.param(_policy, {"lora_rank": 2, "lora_alpha": 2}, ROWS, r"lora_[AB]", id="LoRA"),
        pytest.param(_critic, {}, value_rows(), r"model\.layers\.0\.self_attn\.q_proj", id="critic"),
    ],
)
def test_a_weight_that_is_not_finite_ends_the_update_of_every_trainer(
    open_trainer: Open, changed: dict[str, Any], rows: list[Any], named: str, tmp_path: Path
) -> None:
    trainer = open_trainer(tmp_path / "model", lr=1e39, weight_decay=0.0, **changed)
    with pytest.raises(NumericsError, match=f"after step 1, got others in .*(?:{named})"):
        trainer.update(rows, step=1)
    assert trainer.policy_version == 0
    trainer.close()


def test_a_critics_loss_that_is_not_finite_moves_nothing(tmp_path: Path) -> None:
    trainer = _critic(tmp_path / "model")
    before = _bits(trainer)
    # Its square is beyond float32.
    huge = [replace(row, returns=[3e38] * len(row.returns)) for row in value_rows()]
    with pytest.raises(NumericsError, match="expected a finite loss and gradient in step 1, epoch 0"):
        trainer.update(huge, step=1)
    assert _bits(trainer) == before
    assert trainer.policy_version == 0
    trainer.close()


def test_a_gradient_that_is_not_finite_under_a_finite_loss_moves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _policy(tmp_path / "model")
    before, original = _bits(trainer), objective._policy_loss

    def root(*arguments: Any) -> Any:
        per_token, metrics = original(*arguments)
        # The root of 0 is 0, and its slope infinite.
        return per_token + (per_token - per_token).sqrt(), metrics

    monkeypatch.setattr(objective, "_policy_loss", root)
    with pytest.raises(NumericsError, match=r"got loss -?\d\S* and gradient norm nan"):
        trainer.update(ROWS, step=1)
    assert _bits(trainer) == before
    trainer.close()


def test_a_base_with_a_weight_that_is_not_finite_is_never_published(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", tied=False)
    file = tmp_path / "model/model.safetensors"
    weights = load_file(file)
    # Of a token that no row has: the loss does not see it.
    weights["model.embed_tokens.weight"][450] = math.nan
    save_file(weights, file, metadata={"format": "pt"})
    trainer = _policy(tmp_path / "model")
    with pytest.raises(NumericsError, match=r"after step 1, got others in model\.embed_tokens\.weight"):
        trainer.update(ROWS, step=1)
    assert trainer.policy_version == 0
    trainer.close()


def test_a_diagnostic_that_is_not_finite_is_counted_by_name_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, trainer = _policy(tmp_path / "model"), _policy(tmp_path / "model")
    expected = plain.update(ROWS, step=1)
    original = objective._policy_loss

    def measured(*arguments: Any) -> Any:
        per_token, metrics = original(*arguments)
        return per_token, {**metrics, "odd": per_token.detach() / 0.0}

    monkeypatch.setattr(objective, "_policy_loss", measured)
    metrics = trainer.update(ROWS, step=1)
    assert _bits(trainer) == _bits(plain)
    assert not math.isfinite(metrics["actor/odd"])
    assert finite_metrics(metrics) == {**expected, "nonfinite/actor/odd": 1.0}
    for one in (plain, trainer):
        one.close()
