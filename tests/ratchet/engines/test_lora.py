"""Adapters are trained in place of the weights, and nothing beyond the trainer sees them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from ratchet.engines.critic import CriticTrainer
from ratchet.engines.placement import place_model
from ratchet.engines.scorer import Scorer
from ratchet.engines.trainer import Trainer
from ratchet.engines.trainer_state import load_full_weights
from ratchet.errors import ConfigError, EngineError
from tests.ratchet.engines.trainer_cases import CRITIC, POLICY, make_tiny_classifier, policy_rows, value_rows
from tests.tiny_models import make_tiny_model

SETTINGS = replace(POLICY, lora_rank=4, lora_alpha=8, lr=1e-2)
MakeTrainer = Callable[..., Trainer]
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    made: list[Trainer] = []

    def make(*, architecture: str = "llama", tied: bool = True, **changed: Any) -> Trainer:
        folder = tmp_path / "model"
        if not folder.is_dir():
            make_tiny_model(folder, architecture=architecture, tied=tied)
        made.append(Trainer.from_folder(folder, replace(SETTINGS, **changed), device="cpu"))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def base(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model/model.safetensors")


def assert_bits_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        integer = torch.int16 if tensor.itemsize == 2 else torch.int32
        assert torch.equal(tensor.view(integer), theirs[name].view(integer)), name


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_version_0_is_the_base_bit_for_bit(compute_dtype: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer()
    weights = base(tmp_path)
    # A zero with a sign, which an added 0 would lose.
    weights["model.layers.0.mlp.up_proj.weight"][0, :8] = -0.0
    save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    trainer = make_trainer(compute_dtype=compute_dtype)
    assert_bits_equal(trainer.export_weights("float32"), weights)
    narrow = {name: tensor.bfloat16() for name, tensor in weights.items()}
    assert_bits_equal(trainer.export_weights("bfloat16"), narrow)


@pytest.mark.parametrize(
    ("architecture", "tied", "targets", "moved"),
    [
        ("llama", True, (), LINEAR),
        ("qwen2", False, (), LINEAR),
        ("phi3", False, (), ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
        ("llama", False, ("q_proj", "self_attn.v_proj"), ["q_proj", "v_proj"]),
    ],
)
def test_only_the_chosen_layers_change(
    architecture: str, tied: bool, targets: tuple[str, ...], moved: list[str], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(architecture=architecture, tied=tied, lora_target_modules=targets)
    rows = policy_rows(tmp_path / "model")
    for step in (1, 2):
        trainer.update(rows, step=step)
    exported, weights = trainer.export_weights("float32"), base(tmp_path)
    assert exported.keys() == weights.keys()
    changed = {name for name, tensor in exported.items() if not torch.equal(tensor, weights[name])}
    assert changed == {name for name in weights if name.split(".")[-2] in moved and name.endswith(".weight")}


def test_the_merged_model_has_the_log_probs_of_the_adapted_one(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    rows = policy_rows(tmp_path / "model")
    sequences = [row.prompt_token_ids for row in rows], [row.completion_token_ids for row in rows]
    before = trainer.log_probs(*sequences)
    for step in (1, 2, 3):
        trainer.update(rows, step=step)
    adapted = trainer.log_probs(*sequences)
    scorer = Scorer.from_folder(
        tmp_path / "model", compute_dtype="float32", temperature=1.0, max_tokens_per_micro_batch=64, device="cpu"
    )
    scorer.load_weights(trainer.export_weights("float32"))
    for ours, theirs, first in zip(scorer.log_probs(*sequences), adapted, before, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
        assert not ours or ours != pytest.approx(first, abs=1e-2)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_the_loss_falls(compute_dtype: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(compute_dtype=compute_dtype, lr=1e-3)
    better = [replace(row, advantages=[1.0] * len(row.advantages)) for row in policy_rows(tmp_path / "model")]
    losses = [trainer.update(better, step=step)["actor/pg_loss"] for step in range(1, 7)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_a_resumed_trainer_is_equal_bit_for_bit(compute_dtype: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    changed = {"compute_dtype": compute_dtype, "mini_batch_size": 4, "max_tokens_per_micro_batch": 12}
    through = make_trainer(**changed)
    rows = policy_rows(tmp_path / "model")
    through.update(rows, step=1)
    through.save_state(tmp_path / "state")
    expected = through.update(rows, step=2)
    resumed = make_trainer(**changed, seed=7)
    resumed.load_state(tmp_path / "state")
    assert resumed.update(rows, step=2) == expected
    assert_bits_equal(resumed.export_weights("float32"), through.export_weights("float32"))


def test_a_state_holds_the_adapters_and_their_moments_alone(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(lora_target_modules=("q_proj",))
    trainer.update(policy_rows(tmp_path / "model"), step=1)
    trainer.save_state(tmp_path / "state")
    stored = FileSystemReader(tmp_path / "state").read_metadata().state_dict_metadata
    adapters = [f"model.layers.{layer}.self_attn.q_proj.lora_{part}.weight" for layer in (0, 1) for part in "AB"]
    moments = {f"optimizer.{name}.{key}" for name in adapters for key in ("step", "exp_avg", "exp_avg_sq")}
    assert stored.keys() == {"policy_version", *moments, *(f"weights.{name}" for name in adapters)}
    # Of 64 by 64 weights in rank 4.
    assert sum(entry.size.numel() for entry in stored.values() if len(entry.size)) == 3 * 4 * 4 * 64
    with pytest.raises(EngineError, match="got adapters"):
        load_full_weights(tmp_path / "state")
    full = make_trainer(lora_rank=0, lora_target_modules=())
    with pytest.raises(EngineError, match="does not fit"):
        full.load_state(tmp_path / "state")


def test_adapters_are_a_function_of_the_seed_and_draw_nothing_else(make_trainer: MakeTrainer) -> None:
    torch.manual_seed(1)
    one = dict(make_trainer(seed=3)._parameters)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), drawn)
    same, other = dict(make_trainer(seed=3)._parameters), dict(make_trainer(seed=4)._parameters)
    for name, parameter in one.items():
        assert torch.equal(parameter, same[name])
        assert torch.equal(parameter, other[name]) is ("lora_B" in name)
        assert bool(parameter.any()) is ("lora_A" in name)


def test_a_critic_trains_its_head_beside_the_adapters(tmp_path: Path) -> None:
    folder = make_tiny_classifier(tmp_path / "model")
    trainer = CriticTrainer.from_folder(folder, replace(CRITIC, lora_rank=2, compute_dtype="bfloat16"), device="cpu")
    before = trainer.export_weights("float32")
    assert_bits_equal(before, base(tmp_path))
    trainer.update(value_rows(), step=1)
    trainer.update(value_rows(), step=2)
    after = trainer.export_weights("float32")
    trainer.close()
    changed = {name.split(".")[-2] for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {*LINEAR, "score"}


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "proj", "attn"])
def test_a_layer_that_cannot_be_adapted_is_refused(target: str, make_trainer: MakeTrainer) -> None:
    with pytest.raises(ConfigError, match=f"linear layers q_proj.* got '{target}'"):
        make_trainer(lora_target_modules=(target,), tied=False)


def test_several_processes_are_refused() -> None:
    class Mesh:
        def size(self) -> int:
            return 2

    mesh: Any = Mesh()
    module: Any = None
    with pytest.raises(ConfigError, match="expected one process for lora_rank 4, got 2"):
        place_model(module, mesh, SETTINGS)
