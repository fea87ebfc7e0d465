"""SFT, DPO and reward model trainers: how rows are split and resumed, what they learn, what they refuse.

Losses and gradients themselves are held against another implementation in test_offline_golden.py.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ratchet.engines.offline_rows import PairRow
from ratchet.engines.scorer import Scorer
from ratchet.errors import ConfigError, DataError, EngineError, NumericsError
from tests.ratchet.engines.offline_cases import (
    DPO,
    REWARD,
    SFT,
    TRAINERS,
    causal_folder,
    classifier_folder,
    pair_rows,
    sft_rows,
)
from tests.tiny_models import make_tiny_model

KINDS: dict[str, tuple[Any, list[Any]]] = {
    "sft": (SFT, sft_rows()),
    "dpo": (DPO, pair_rows()),
    "reward": (REWARD, pair_rows()),
}
MakeTrainer = Callable[..., Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    causal = causal_folder(folder / "causal")
    return {"sft": causal, "dpo": causal, "reward": classifier_folder(folder / "classifier")}


@pytest.fixture
def make_trainer(folders: dict[str, Path]) -> Iterator[MakeTrainer]:
    """A factory of trainers of a kind, by settings that differ from its own."""
    trainers: list[Any] = []

    def make(kind: str, **changed: Any) -> Any:
        settings = replace(KINDS[kind][0], **changed)
        trainers.append(TRAINERS[type(settings)].from_folder(folders[kind], settings, device="cpu"))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.close()


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], atol=tolerance, rtol=0, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_and_the_order_of_rows_change_rounding_only(kind: str, make_trainer: MakeTrainer) -> None:
    rows = KINDS[kind][1]
    whole = make_trainer(kind)
    metrics, weights = whole.update(rows, step=1), whole.export_weights("float32")
    for given, split in ((rows, {"micro_batch_size": 1}), (rows[::-1], {"max_tokens_per_micro_batch": 20})):
        other = make_trainer(kind, **split)
        assert other.update(given, step=1) == pytest.approx(metrics, abs=1e-5, rel=1e-5)
        assert_close(other.export_weights("float32"), weights, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_trainer_is_equal_bit_for_bit_to_one_that_never_stopped(
    kind: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    changed = {"compute_dtype": "bfloat16", "mini_batch_size": 2, "shuffle": True, "ppo_epochs": 2}
    rows, through = KINDS[kind][1], make_trainer(kind, **changed)
    through.update(rows, step=1)
    through.save_state(tmp_path)
    expected = through.update(rows, step=2)
    resumed = make_trainer(kind, **changed)
    resumed.load_state(tmp_path)
    assert resumed.update(rows, step=2) == expected
    weights = through.export_weights("float32")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in resumed.export_weights("float32").items())


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_and_checkpointing_train_the_same_rows(kind: str, make_trainer: MakeTrainer) -> None:
    rows = KINDS[kind][1]
    before, *losses = (make_trainer(kind, gradient_checkpointing=is_on).update(rows, step=1) for is_on in (False, True))
    assert losses == [before]
    adapted = make_trainer(kind, lora_rank=2, lr=0.05)
    assert adapted.update(rows, step=1)["actor/loss"] == pytest.approx(before["actor/loss"], abs=1e-5)
    assert adapted.update(rows, step=2)["actor/loss"] < before["actor/loss"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_on_is_learnt_and_evaluated_without_training(kind: str, make_trainer: MakeTrainer) -> None:
    rows, trainer = KINDS[kind][1], make_trainer(kind, lr=3e-3, max_tokens_per_micro_batch=40)
    before = trainer.evaluate(rows)
    assert trainer.evaluate(rows) == before
    first = trainer.update(rows, step=1)
    weights = [1.0 if kind != "sft" else one["tokens"] for one in before]
    mean = sum(one["loss"] * weight for one, weight in zip(before, weights, strict=True)) / sum(weights)
    assert first["actor/loss"] == pytest.approx(mean, abs=1e-5)
    assert all(0.0 < trainer.update(rows, step=step)["actor/grad_norm"] < math.inf for step in range(2, 13))
    after = trainer.evaluate(rows)
    assert all(late["loss"] < early["loss"] for early, late in zip(before, after, strict=True))
    if kind != "sft":
        assert all(late["margin"] > early["margin"] for early, late in zip(before, after, strict=True))
        assert [one["accuracy"] for one in after] == [1.0] * len(rows)
        assert [one["tokens"] for one in before] == [4.0, 4.0, 5.0, 4.0, 8.0]


def test_sft_evaluates_the_mean_of_minus_log_p_over_the_mask(make_trainer: MakeTrainer, folders: Any) -> None:
    rows: list[Any] = [*sft_rows(), replace(sft_rows()[0], loss_mask=[False] * 3)]
    scorer = Scorer.from_folder(
        folders["sft"], compute_dtype="float32", temperature=1.0, max_tokens_per_micro_batch=999, device="cpu"
    )
    log_probs = scorer.log_probs([row.prompt_token_ids for row in rows], [row.completion_token_ids for row in rows])
    expected = []
    for row, found in zip(rows, log_probs, strict=True):
        inside = [-value for value, is_in in zip(found, row.loss_mask, strict=True) if is_in]
        expected.append({"loss": sum(inside) / len(inside) if inside else 0.0, "tokens": float(len(inside))})
    trainer = make_trainer("sft")
    for one, other in zip(trainer.evaluate(rows), expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    metrics = trainer.update(rows, step=1)
    total = sum(one["loss"] * one["tokens"] for one in expected) / sum(one["tokens"] for one in expected)
    assert metrics["actor/perplexity"] == pytest.approx(math.exp(total), rel=1e-5)
    names = "loss perplexity grad_norm lr skipped_mini_batches"
    assert metrics.keys() == {*(f"actor/{name}" for name in names.split()), "perf/total_num_tokens"}
    assert metrics["perf/total_num_tokens"] == sum(
        len(row.prompt_token_ids) + len(row.completion_token_ids) for row in rows
    )


def _with_reference(rows: list[PairRow], scorer: Any, shift: float) -> list[PairRow]:
    prompts = [row.prompt_token_ids for row in rows]
    chosen = scorer.log_probs(prompts, [row.chosen_token_ids for row in rows])
    rejected = scorer.log_probs(prompts, [row.rejected_token_ids for row in rows])
    return [
        replace(row, reference_chosen_log_probs=[value - shift for value in one], reference_rejected_log_probs=other)
        for row, one, other in zip(rows, chosen, rejected, strict=True)
    ]


def test_a_policy_that_is_its_reference_prefers_nothing_yet(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("dpo")
    assert [one["loss"] for one in trainer.evaluate(_with_reference(pair_rows(), trainer, 0.0))] == pytest.approx(
        [math.log(2)] * 5, abs=1e-5
    )
    # 0.5 nats more at each chosen token that counts: margins are beta times half the tokens, or half of beta.
    rows, tokens = _with_reference(pair_rows(), trainer, 0.5), [2, 1, 4, 2, 6]
    margins = [one["margin"] for one in trainer.evaluate(rows)]
    assert margins == pytest.approx([0.05 * count for count in tokens], abs=1e-5)
    normalized = make_trainer("dpo", length_normalized=True)
    assert [one["margin"] for one in normalized.evaluate(rows)] == pytest.approx([0.05] * 5, abs=1e-5)
    assert make_trainer("dpo", loss_type="ipo", beta=1.0).evaluate(rows)[0]["loss"] == pytest.approx(0.0, abs=1e-5)


def test_without_a_reference_log_probs_are_compared(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("dpo", reference_free=True)
    zeros = [
        replace(
            row,
            reference_chosen_log_probs=[0.0] * len(row.chosen_token_ids),
            reference_rejected_log_probs=[0.0] * len(row.rejected_token_ids),
        )
        for row in pair_rows()
    ]
    expected = make_trainer("dpo").evaluate(zeros)
    bare = [replace(row, reference_chosen_log_probs=None, reference_rejected_log_probs=None) for row in pair_rows()]
    for one, other in zip(trainer.evaluate(bare), expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    trainer.update(bare, step=1)
    with pytest.raises(DataError, match=r"row 0 has no reference_chosen_log_probs.*reference_free"):
        make_trainer("dpo").update(bare, step=1)


def test_pairs_that_cannot_be_compared_are_refused(make_trainer: MakeTrainer) -> None:
    first, second, *_ = pair_rows()
    for kind in ("dpo", "reward"):
        trainer = make_trainer(kind)
        with pytest.raises(DataError, match="row 1 has no rejected token in the loss"):
            trainer.update([first, replace(second, rejected_loss_mask=[False] * 4)], step=1)
        with pytest.raises(DataError, match="row 1 has 2 loss_mask for 1 chosen tokens"):
            trainer.update([first, replace(second, chosen_loss_mask=[True, True])], step=1)
        with pytest.raises(DataError, match="row 0 has no prompt token"):
            trainer.evaluate([replace(first, prompt_token_ids=[])])
        with pytest.raises(EngineError, match="expected step 1"):
            trainer.update([first], step=2)
    with pytest.raises(DataError, match="row 0 has 1 reference_rejected_log_probs for 2 rejected tokens"):
        make_trainer("dpo").update([replace(first, reference_rejected_log_probs=[-1.0])], step=1)
    with pytest.raises(NumericsError, match="row 0 has reference_rejected_log_probs"):
        make_trainer("dpo").update([replace(first, reference_rejected_log_probs=[math.nan, -1.0])], step=1)
    with pytest.raises(DataError, match="row 1 has nothing but padding tokens as its chosen completion"):
        make_trainer("reward").update([first, replace(second, chosen_token_ids=[3])], step=1)
    with pytest.raises(ConfigError, match="no label_smoothing beside"):
        replace(DPO, loss_type="hinge", label_smoothing=0.2)


def test_a_reward_model_needs_a_head(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no value or reward head"):
        TRAINERS[type(REWARD)].from_folder(make_tiny_model(tmp_path), REWARD, device="cpu")
