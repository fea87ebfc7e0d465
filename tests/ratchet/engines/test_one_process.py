"""Whole weights in one process train as sharded ones do; their copies and their state on the host are theirs alone."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ratchet.engines import placement
from ratchet.engines.critic import CriticTrainer
from ratchet.engines.sharding import Sharded
from ratchet.engines.trainer import Trainer, TrainRow
from ratchet.engines.trainer_state import StagedState, load_full_weights
from ratchet.errors import EngineError
from ratchet.store.artifacts import describe_folder
from tests.ratchet.engines.trainer_cases import CRITIC, POLICY, make_tiny_classifier, policy_rows, value_rows
from tests.tiny_models import make_tiny_model

MakeTrainer = Callable[..., Trainer]
SPLIT = {"mini_batch_size": 4, "max_tokens_per_micro_batch": 12}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
    ),
]


@pytest.fixture
def rows(tmp_path: Path) -> list[TrainRow]:
    return policy_rows(make_tiny_model(tmp_path / "model"))


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    made: list[Trainer] = []

    def make(device: str = "cpu", **changed: Any) -> Trainer:
        made.append(Trainer.from_folder(tmp_path / "model", replace(POLICY, **changed), device=device))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def sharded_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainers shard their model although they are alone."""
    monkeypatch.setattr(
        "ratchet.engines.sharded.place_model", lambda module, mesh, settings: Sharded(module, mesh, settings)
    )


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_trains_as_the_sharded_model_does_and_reads_its_state(
    dtype: str, device: str, rows: list[TrainRow], make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: Any
) -> None:
    whole = make_trainer(device, compute_dtype=dtype, **SPLIT)
    with monkeypatch.context() as patch:
        sharded_in_one(patch)
        sharded = make_trainer(device, compute_dtype=dtype, **SPLIT)
    assert isinstance(sharded._parameters[0][1], DTensor)
    assert not isinstance(whole._parameters[0][1], DTensor)
    for step in (1, 2):
        # In the same arithmetic: the same products in the same dtypes, the same sums in float32.
        assert whole.update(rows, step=step) == pytest.approx(sharded.update(rows, step=step), abs=1e-6, rel=1e-5)
    ours, theirs = whole.export_weights("float32"), sharded.export_weights("float32")
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=0, msg=name)
    for writer, reader in ((whole, sharded), (sharded, whole)):
        writer.save_state(tmp_path / "state")
        reader.load_state(tmp_path / "state")
        assert_equal(reader.export_weights("float32"), writer.export_weights("float32"))
        assert_equal(load_full_weights(tmp_path / "state"), writer.export_weights("float32"))
        (tmp_path / "state").rename(tmp_path / f"state_of_{type(writer._placement).__name__}")


@pytest.mark.parametrize("device", DEVICES)
def test_masters_are_float32_and_the_head_of_a_critic_computes_in_it(device: str, tmp_path: Path) -> None:
    folder = make_tiny_classifier(tmp_path)
    trainer = CriticTrainer.from_folder(folder, replace(CRITIC, compute_dtype="bfloat16"), device=device)
    trainer.update(value_rows(), step=1)
    masters, computed = dict(trainer._parameters), dict(trainer._module.named_weights())
    exported = trainer.export_weights("bfloat16", device="own")
    trainer.close()
    assert masters.keys() == computed.keys() == exported.keys()
    for name, master in masters.items():
        is_head = name == "score.weight"
        assert (computed[name] is master) is is_head
        assert master.dtype == torch.float32
        assert computed[name].dtype == exported[name].dtype == (torch.float32 if is_head else torch.bfloat16)
        assert torch.equal(master.to(exported[name].dtype), exported[name])
        assert master.grad is None
        assert computed[name].grad is None
        assert torch.equal(computed[name], exported[name])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_weights_are_copies_on_either_device(
    dtype: str, device: str, rows: list[TrainRow], make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(device, compute_dtype=dtype)
    for of in ("float32", "bfloat16"):
        own, on_cpu = trainer.export_weights(of, device="own"), trainer.export_weights(of)
        assert {tensor.device.type for tensor in own.values()} == {device}
        assert {tensor.device.type for tensor in on_cpu.values()} == {"cpu"}
        assert_equal({name: tensor.cpu() for name, tensor in own.items()}, on_cpu)
        held = {tensor.data_ptr() for tensor in trainer._module.parameters()}
        held |= {tensor.data_ptr() for _, tensor in trainer._parameters}
        assert held.isdisjoint(tensor.data_ptr() for tensor in own.values())
        assert held.isdisjoint(tensor.data_ptr() for tensor in on_cpu.values())


@pytest.mark.parametrize("device", DEVICES)
def test_a_staged_state_is_the_saved_one_byte_for_byte_however_late_it_is_written(
    device: str, rows: list[TrainRow], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(device)
    for step in (1, 2, 3):
        trainer.update(rows, step=step)
        staged = trainer.stage_state()
        writer = Thread(target=staged.write, args=(tmp_path / f"staged{step}",))
        if step == 1:
            trainer.save_state(tmp_path / "saved1")
            trainer.update(rows, step=2)
            writer.start()
            trainer.load_state(tmp_path / "saved1")
        else:
            writer.start()
            trainer.save_state(tmp_path / f"saved{step}")
        writer.join()
    for step in (1, 2, 3):
        saved, late = (describe_folder("", tmp_path / f"{name}{step}") for name in ("saved", "staged"))
        assert saved.digest == late.digest
    resumed = make_trainer(device)
    resumed.load_state(tmp_path / "staged3")
    assert resumed.policy_version == 3
    assert_equal(resumed.export_weights("float32"), trainer.export_weights("float32"))


@pytest.mark.parametrize("device", DEVICES)
def test_staged_states_share_no_memory_until_one_is_dropped(
    device: str, rows: list[TrainRow], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    def places(staged: StagedState) -> set[int]:
        return {tensor.data_ptr() for tensor in staged._tensors.values()}

    trainer = make_trainer(device)
    first, second = trainer.stage_state(), trainer.stage_state()
    assert places(first).isdisjoint(places(second))
    of_first = places(first)
    del first
    trainer.update(rows, step=1)
    third = trainer.stage_state()
    assert places(third) == of_first
    trainer.save_state(tmp_path / "saved")
    third.write(tmp_path / "third")
    assert describe_folder("", tmp_path / "third").digest == describe_folder("", tmp_path / "saved").digest


def test_many_ranks_do_not_stage(make_trainer: MakeTrainer, rows: list[TrainRow], monkeypatch: Any) -> None:
    trainer = make_trainer()
    monkeypatch.setattr(type(trainer._mesh), "size", lambda self: 2)
    with pytest.raises(EngineError, match="expected one process to stage"):
        trainer.stage_state()


def test_gradients_of_an_update_that_failed_are_gone_once_a_state_is_loaded(
    rows: list[TrainRow], make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: Any
) -> None:
    trainer, untouched = (
        make_trainer(compute_dtype="bfloat16", **SPLIT),
        make_trainer(compute_dtype="bfloat16", **SPLIT),
    )
    trainer.save_state(tmp_path / "state")
    with monkeypatch.context() as patch:
        patch.setattr(placement.OneProcess, "collect_gradients", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.update(rows, step=1)
    trainer.load_state(tmp_path / "state")
    assert trainer.update(rows, step=1) == untouched.update(rows, step=1)
    assert_equal(trainer.export_weights("float32"), untouched.export_weights("float32"))
