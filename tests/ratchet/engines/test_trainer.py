"""Policy updates in one process: against a plain loop, and at every edge of a batch."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, distributed
from torch.distributed.checkpoint.filesystem import FileSystemReader

from ratchet.algorithms.aggregation import LossAggMode
from ratchet.algorithms.batch import LossOptions
from ratchet.engines.model import load_causal_lm
from ratchet.engines.trainer import Trainer, TrainerSettings, TrainRow
from ratchet.errors import ConfigError, DataError, EngineError, NumericsError
from tests.tiny_models import make_tiny_model

SETTINGS = TrainerSettings(
    lr=1e-3,
    # Far above rounding: with a tiny epsilon, AdamW turns the sign of a rounding error into a whole step.
    adam_eps=1e-3,
    mini_batch_size=8,
    compute_dtype="float32",
    max_tokens_per_micro_batch=64,
)
LENGTHS = [3, 1, 5, 2, 4, 7]


def make_rows(lengths: list[int] = LENGTHS) -> list[TrainRow]:
    return [
        TrainRow(
            prompt_token_ids=[5 + row, 6, 7][: 1 + row % 3],
            completion_token_ids=[30 + row + place for place in range(length)],
            advantages=[1.0 - row % 3 + 0.1 * place for place in range(length)],
            behaviour_log_probs=[-6.0 - 0.1 * place for place in range(length)],
            loss_mask=[place != 3 for place in range(length)],
            reference_log_probs=[-6.1] * length,
        )
        for row, length in enumerate(lengths)
    ]


ROWS = make_rows()
MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    """A factory of trainers of one tiny model, by settings that differ from SETTINGS."""
    folder = tmp_path / "model"
    trainers: list[Trainer] = []

    def make(*, architecture: str = "llama", tied: bool = True, **changed: Any) -> Trainer:
        if not folder.exists():
            make_tiny_model(folder, architecture=architecture, tied=tied)
        trainers.append(Trainer.from_folder(folder, replace(SETTINGS, **changed), device="cpu"))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.close()
    assert not distributed.is_initialized()


def assert_equal(one: Trainer, other: Trainer) -> None:
    weights = other.export_weights("float32")
    for name, tensor in one.export_weights("float32").items():
        assert torch.equal(tensor, weights[name]), name


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], atol=tolerance, rtol=0, msg=name)


def plain_update(folder: Path, rows: list[TrainRow]) -> tuple[dict[str, Tensor], float, float]:
    """Weights, loss and gradient norm of one token-mean update, token by token with Hugging Face's logits."""
    model = load_causal_lm(folder, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.01)
    count = sum(sum(row.loss_mask) for row in rows)
    loss = torch.zeros(())
    for row in rows:
        ids = torch.tensor([row.prompt_token_ids + row.completion_token_ids])
        log_p = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0], dim=-1)
        for place, token in enumerate(row.completion_token_ids):
            if row.loss_mask[place]:
                ratio = torch.exp(log_p[len(row.prompt_token_ids) + place - 1, token] - row.behaviour_log_probs[place])
                gain = torch.minimum(ratio * row.advantages[place], ratio.clamp(0.8, 1.2) * row.advantages[place])
                loss -= (gain.clamp(min=3 * row.advantages[place]) if row.advantages[place] < 0 else gain) / count
    torch.autograd.backward(loss)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, loss.item(), norm.item()


@pytest.mark.parametrize(("architecture", "tied"), [("llama", True), ("qwen2", False)])
def test_an_update_is_that_of_a_plain_loop(
    architecture: str, tied: bool, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(architecture=architecture, tied=tied)
    weights, loss, norm = plain_update(tmp_path / "model", ROWS)
    metrics = trainer.update(ROWS, step=1)
    assert metrics["actor/pg_loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert_close(trainer.export_weights("float32"), weights, 2e-5)


@pytest.mark.parametrize(
    "mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
)
def test_micro_batches_change_rounding_only(mode: LossAggMode, make_trainer: MakeTrainer) -> None:
    common = {"loss_agg_mode": mode, "loss_norm_length": 16.0, "kl_loss_coef": 0.1, "entropy_coeff": 0.01}
    whole = make_trainer(**common)
    metrics = whole.update(ROWS, step=1)
    for changed in ({"max_tokens_per_micro_batch": 12}, {"micro_batch_size": 1}, {"micro_batch_size": 4}):
        split = make_trainer(**common, **changed)
        assert split.update(ROWS, step=1) == pytest.approx(metrics, abs=1e-5, rel=1e-5)
        assert_close(split.export_weights("float32"), whole.export_weights("float32"), 2e-5)
        split.close()


def test_metrics_have_verls_names_and_are_finite(make_trainer: MakeTrainer) -> None:
    metrics = make_trainer(kl_loss_coef=0.1).update(ROWS, step=1)
    names = "pg_loss pg_clipfrac pg_clipfrac_lower ppo_kl grad_norm lr entropy kl_loss kl_coef skipped_mini_batches"
    expected = {f"actor/{name}" for name in names.split()} | {"perf/total_num_tokens"}
    expected |= {f"training/rollout_probs_diff_{name}" for name in ("mean", "max", "std")}
    assert metrics.keys() == expected
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
    assert metrics["perf/total_num_tokens"] == sum(LENGTHS) + 2 * (1 + 2 + 3)


def test_the_difference_to_the_sampler_is_measured_before_the_first_optimizer_step(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(ppo_epochs=2, mini_batch_size=2, lr=0.1)
    log_probs = trainer.log_probs([row.prompt_token_ids for row in ROWS], [row.completion_token_ids for row in ROWS])
    mine = [
        math.exp(ours) - math.exp(theirs)
        for row, values in zip(ROWS[:2], log_probs[:2], strict=True)
        for ours, theirs, is_used in zip(values, row.behaviour_log_probs, row.loss_mask, strict=True)
        if is_used
    ]
    difference = torch.tensor(mine, dtype=torch.float64).abs()
    metrics = trainer.update(ROWS, step=1)
    for name in ("mean", "max", "std"):
        expected = getattr(difference, name)().item()
        assert metrics[f"training/rollout_probs_diff_{name}"] == pytest.approx(expected, abs=1e-6)


def test_two_trainers_are_equal_bit_for_bit(make_trainer: MakeTrainer) -> None:
    one, other = (make_trainer(compute_dtype="bfloat16", ppo_epochs=2, mini_batch_size=3) for _ in range(2))
    assert one.update(ROWS, step=1) == other.update(ROWS, step=1)
    assert_equal(one, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_trainer_is_equal_bit_for_bit_to_one_that_never_stopped(
    dtype: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    changed = {
        "compute_dtype": dtype,
        "mini_batch_size": 3,
        "lr_scheduler": "cosine",
        "total_steps": 4,
        "shuffle": True,
    }
    through = make_trainer(**changed)
    for step in (1, 2):
        through.update(ROWS, step=step)
    through.save_state(tmp_path / "state")
    expected = [through.update(ROWS, step=step) for step in (3, 4)]
    resumed = make_trainer(**changed)
    resumed.load_state(tmp_path / "state")
    assert resumed.policy_version == 2
    assert [resumed.update(ROWS, step=step) for step in (3, 4)] == expected
    assert_equal(resumed, through)


def test_a_state_that_is_missing_or_of_another_model_is_refused(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    with pytest.raises(EngineError, match="found none"):
        trainer.load_state(tmp_path / "nothing")
    trainer.save_state(tmp_path / "state")
    other = make_tiny_model(tmp_path / "other", architecture="qwen3")
    stranger = Trainer.from_folder(other, SETTINGS, device="cpu")
    with pytest.raises(EngineError, match="does not fit"):
        stranger.load_state(tmp_path / "state")
    stranger.close()


def test_equal_states_have_equal_bytes(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.update(ROWS, step=1)
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        trainer.save_state(folder)
    one, other = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert one == other


def test_a_signal_while_a_state_is_read_is_no_fault_of_the_state(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    trainer.save_state(tmp_path / "state")

    def end(*arguments: Any) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(FileSystemReader, "read_data", end)
    with pytest.raises(SystemExit):
        trainer.load_state(tmp_path / "state")


def test_a_state_whose_index_would_run_code_is_refused(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.save_state(tmp_path / "state")
    # As a pickle this calls os.mkdir.
    ran = tmp_path / "ran"
    (tmp_path / "state/.metadata").write_bytes(b"cos\nmkdir\n(V" + str(ran).encode() + b"\ntR.")
    with pytest.raises(EngineError, match=r"it names os\.mkdir"):
        trainer.load_state(tmp_path / "state")
    assert not ran.exists()


def test_a_model_that_cannot_be_trained_leaves_no_process_group(tmp_path: Path) -> None:
    with pytest.raises(EngineError):
        Trainer.from_folder(tmp_path, SETTINGS, device="cpu")
    assert not distributed.is_initialized()


@pytest.mark.parametrize("tied", [True, False])
def test_exported_weights_are_those_of_the_folder_under_its_names(
    tied: bool, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    exported = make_trainer(tied=tied).export_weights("bfloat16")
    with safe_open(tmp_path / "model/model.safetensors", framework="pt") as file:
        assert set(file.keys()) == exported.keys()
        assert ("lm_head.weight" in exported) is not tied
        for name, tensor in exported.items():
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor, file.get_tensor(name).bfloat16())


def test_exported_weights_do_not_change_with_the_next_update(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    exported = trainer.export_weights("float32")
    before = {name: tensor.clone() for name, tensor in exported.items()}
    trainer.update(ROWS, step=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in exported.items())
    after = trainer.export_weights("float32")
    assert all(not torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_masters_keep_what_bfloat16_would_round_away(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(compute_dtype="bfloat16", lr=1e-6, weight_decay=0.0)
    before = trainer.export_weights("float32")["model.embed_tokens.weight"]
    trainer.update(ROWS, step=1)
    moved = (trainer.export_weights("float32")["model.embed_tokens.weight"] - before).abs().max().item()
    assert 0 < moved < 2e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_checkpointing_changes_nothing(dtype: str, make_trainer: MakeTrainer) -> None:
    plain, checkpointed = (make_trainer(compute_dtype=dtype, gradient_checkpointing=is_on) for is_on in (False, True))
    assert plain.update(ROWS, step=1) == checkpointed.update(ROWS, step=1)
    assert_equal(plain, checkpointed)


def test_a_batch_without_a_token_in_the_loss_moves_nothing(make_trainer: MakeTrainer) -> None:
    trainer, untouched = make_trainer(mini_batch_size=3), make_trainer(mini_batch_size=3)
    masked = [replace(row, loss_mask=[False] * len(row.loss_mask)) for row in ROWS]
    metrics = trainer.update(masked, step=1)
    assert metrics == {"actor/lr": 1e-3, "actor/skipped_mini_batches": 2.0, "perf/total_num_tokens": 34.0}
    assert_equal(trainer, untouched)
    # The optimizer did not move either: the next step is the first for its moments.
    untouched.policy_version = 1
    assert trainer.update(ROWS, step=2) == untouched.update(ROWS, step=2)
    assert_equal(trainer, untouched)


def test_empty_completions_and_masked_rows_train_nothing_and_hurt_nothing(make_trainer: MakeTrainer) -> None:
    with_empty, without = make_trainer(mini_batch_size=99), make_trainer(mini_batch_size=99)
    empty = TrainRow([9, 9], [], [], [], [], [])
    # What is masked may hold anything.
    masked = TrainRow([9], [8], [float("nan")], [float("-inf")], [False], [float("nan")])
    with_empty.update([empty, *ROWS[:3], masked, *ROWS[3:], empty], step=1)
    without.update(ROWS, step=1)
    assert_equal(with_empty, without)
    assert with_empty.update([empty, empty], step=2)["actor/skipped_mini_batches"] == 1.0


@pytest.mark.parametrize("column", ["advantages", "behaviour_log_probs"])
def test_a_row_that_is_not_finite_is_refused_and_moves_nothing(column: str, make_trainer: MakeTrainer) -> None:
    trainer, untouched = make_trainer(), make_trainer()
    changed: dict[str, Any] = {column: [float("nan")]}
    bad = replace(ROWS[1], **changed)
    with pytest.raises(NumericsError, match=f"row 2 has {column}"):
        trainer.update([*ROWS[:2], bad], step=1)
    assert_equal(trainer, untouched)
    assert trainer.policy_version == 0


def test_a_loss_that_is_not_finite_is_refused_before_the_optimizer_moves(make_trainer: MakeTrainer) -> None:
    trainer, untouched = make_trainer(), make_trainer()
    huge = replace(ROWS[0], advantages=[3e38, 3e38, 3e38])
    with pytest.raises(NumericsError, match="step 1, epoch 0"):
        trainer.update([huge], step=1)
    assert_equal(trainer, untouched)


def test_a_weight_that_is_not_finite_is_refused_by_its_name(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(lr=1e39, weight_decay=0.0)
    with pytest.raises(NumericsError, match=r"after step 1, got others in model\.embed_tokens\.weight"):
        trainer.update(ROWS, step=1)
    assert trainer.policy_version == 0


def test_rows_that_do_not_fit_are_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(kl_loss_coef=0.1)
    for changed, message in (
        ({"advantages": [1.0]}, "1 advantages for 3"),
        ({"loss_mask": [True]}, "1 loss_mask for 3"),
        ({"reference_log_probs": None}, "no reference_log_probs"),
        ({"prompt_token_ids": []}, "no prompt token"),
    ):
        with pytest.raises(DataError, match=message):
            trainer.update([replace(ROWS[0], **changed)], step=1)


def test_steps_follow_each_other(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    with pytest.raises(EngineError, match="expected step 1"):
        trainer.update(ROWS, step=2)
    trainer.update(ROWS, step=1)
    assert trainer.policy_version == 1
    with pytest.raises(EngineError, match="expected step 2"):
        trainer.update(ROWS, step=1)


def test_a_skipped_step_counts_and_moves_nothing(make_trainer: MakeTrainer) -> None:
    skipped, plain = make_trainer(warmup_steps=4), make_trainer(warmup_steps=4)
    skipped.skip(1)
    assert skipped.policy_version == 1
    assert_equal(skipped, plain)
    with pytest.raises(EngineError, match="expected step 2"):
        skipped.skip(3)
    # The learning rate is the step's all the same.
    assert skipped.update(ROWS, step=2)["actor/lr"] == 1e-3 / 4


def test_epochs_and_mini_batches_are_optimizer_steps_in_order(make_trainer: MakeTrainer) -> None:
    at_once = make_trainer(ppo_epochs=2, mini_batch_size=3)
    at_once.update(ROWS, step=1)
    one_by_one = make_trainer()
    for step, part in enumerate([ROWS[:3], ROWS[3:]] * 2, start=1):
        one_by_one.update(part, step=step)
    assert_equal(at_once, one_by_one)


def test_shuffled_rows_are_a_function_of_seed_step_and_epoch(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(shuffle=True, seed=3, mini_batch_size=2)

    def order(step: int, epoch: int, of: Trainer = trainer) -> list[int]:
        return [ROWS.index(row) for batch in of._mini_batches(ROWS, step, epoch) for row in batch]

    assert sorted(order(1, 0)) == list(range(len(ROWS)))
    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(step, epoch)) for step in (1, 2) for epoch in (0, 1)}) == 4
    assert order(1, 0, make_trainer(shuffle=True, seed=4)) != order(1, 0)
    assert order(1, 0, make_trainer()) == list(range(len(ROWS)))


def test_the_kl_loss_pulls_towards_the_reference(make_trainer: MakeTrainer) -> None:
    flat = [replace(row, advantages=[0.0] * len(row.advantages)) for row in ROWS]
    trainer = make_trainer(kl_loss_coef=1.0, kl_loss_type="k2", weight_decay=0.0, lr=1e-4)
    losses = [trainer.update(flat, step=step)["actor/kl_loss"] for step in range(1, 6)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_the_entropy_bonus_raises_the_entropy(make_trainer: MakeTrainer) -> None:
    flat = [replace(row, advantages=[0.0] * len(row.advantages)) for row in ROWS]
    trainer = make_trainer(entropy_coeff=1.0, weight_decay=0.0, lr=1e-4)
    entropies = [trainer.update(flat, step=step)["actor/entropy"] for step in range(1, 4)]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0]


def test_the_learning_rate_follows_the_step(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(warmup_steps=2, lr_scheduler="linear", total_steps=4)
    assert [trainer.update(ROWS, step=step)["actor/lr"] for step in range(1, 6)] == [0.0, 5e-4, 1e-3, 5e-4, 0.0]


@pytest.mark.parametrize(
    "changed",
    [
        {"mini_batch_size": 0},
        {"micro_batch_size": 0},
        {"lr": -1.0},
        {"lr": float("nan")},
        {"temperature": 0.0},
        {"loss_options": LossOptions(clip_ratio_c=1.0)},
        {"loss_options": LossOptions(clip_ratio_low=-0.1)},
        {"policy_loss": "vanila"},
        {"lr_scheduler": "cosine"},
        {"loss_agg_mode": "seq-mean-token-sum-norm"},
    ],
)
def test_settings_that_cannot_work_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        replace(SETTINGS, **changed)
