"""The memory that a plan says training takes: against torch's own account on a CPU, and against peaks seen on a GPU.

Trap: torch's profiler sees what its allocator gives out, and nothing of what was there before it began.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig

from ratchet.engines.critic import CriticSettings, CriticTrainer, ValueRow
from ratchet.engines.model import load_config
from ratchet.engines.trainer import Trainer, TrainerSettings, TrainRow
from ratchet.engines.training import TrainingSettings
from ratchet.grains.plan.memory import Batch, training, weight_sizes
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[3]
PROMPT, COMPLETION, ROWS = 10, 54, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), tied=False)


def rows(of: Any, **columns: float) -> list[Any]:
    values = {name: [value] * COMPLETION for name, value in columns.items()}
    ids = {"prompt_token_ids": [60] * PROMPT, "completion_token_ids": [61] * COMPLETION}
    return [of(**ids, **values, loss_mask=[True] * COMPLETION) for _ in range(ROWS)]


def most_allocated(run: Any) -> int:
    """Bytes that torch's allocator has given out at most, beside those that were given out before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    held = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def actor(model: Path, settings: dict[str, Any]) -> tuple[Any, list[Any]]:
    trainer = Trainer.from_folder(model, TrainerSettings(lr=1e-3, mini_batch_size=ROWS, **settings), device="cpu")
    return trainer, rows(TrainRow, advantages=1.0, behaviour_log_probs=-2.0)


def critic(model: Path, settings: dict[str, Any]) -> tuple[Any, list[Any]]:
    trainer = CriticTrainer.from_folder(model, CriticSettings(lr=1e-3, mini_batch_size=ROWS, **settings), device="cpu")
    return trainer, rows(ValueRow, values=0.5, returns=1.0)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("policy", {"compute_dtype": "float32"}),
        ("policy", {"compute_dtype": "bfloat16", "max_tokens_per_micro_batch": 128}),
        ("policy", {"compute_dtype": "float32", "gradient_checkpointing": True}),
        ("policy", {"compute_dtype": "float32", "lora_rank": 4}),
        ("values", {"compute_dtype": "float32"}),
    ],
)
def test_an_update_allocates_what_the_plan_says(kind: Any, settings: dict[str, Any], model: Path) -> None:
    trainer, given = (actor if kind == "policy" else critic)(model, settings)
    try:
        trainer.update(given, step=1)  # what is made once is made
        seen = most_allocated(lambda: trainer.update(given, step=2))
    finally:
        trainer.close()
    length = PROMPT + COMPLETION
    each = min(settings.get("max_tokens_per_micro_batch", 16384) // length, ROWS)
    planned = training(
        load_config(model),
        TrainingSettings(lr=1e-3, mini_batch_size=ROWS, **settings),
        Batch(lengths=[length] * each, scored=each * COMPLETION),
        kind=kind,
        device="cpu",
        num_micro_batches=ROWS // each,
        base_dtype="float32",
    )
    assert planned.passing == pytest.approx(seen, rel=0.1)
    trained = sum(parameter.numel() for _, parameter in trainer_parameters(model, kind, settings))
    assert planned.optimizer == 8 * trained


def trainer_parameters(model: Path, kind: str, settings: dict[str, Any]) -> list[Any]:
    trainer, _ = (actor if kind == "policy" else critic)(model, settings)
    found = list(trainer._parameters)
    trainer.close()
    return found


SMOLLM2 = AutoConfig.for_model(
    "llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
LENGTH, SCORED = 356, 256


@pytest.mark.parametrize(
    ("gib", "rows_each", "num", "settings"),
    [
        (18.8, 86, 3, {}),
        (25.7, 86, 3, {"use_liger": False}),
        (27.0, 128, 2, {}),
        (7.7, 256, 1, {"gradient_checkpointing": True}),
        (25.2, 128, 2, {"lora_rank": 16}),
    ],
)
def test_the_peaks_of_docs_operations(gib: float, rows_each: int, num: int, settings: dict[str, Any]) -> None:
    """256 rows of 356 tokens on an H200; the numbers stand in docs/operations.md, "A segment on a GPU"."""
    assert f"| {gib} GiB |" in (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    batch = Batch(lengths=[LENGTH] * rows_each, scored=SCORED * rows_each)
    options = TrainingSettings(lr=1e-6, mini_batch_size=256, **settings)
    planned = training(SMOLLM2, options, batch, kind="policy", device="cuda", num_micro_batches=num)
    assert (planned.resident + planned.passing) / 2**30 == pytest.approx(gib, rel=0.25)


def test_parameters_are_counted_without_weights(model: Path) -> None:
    from safetensors import safe_open

    assert sum(weight_sizes(SMOLLM2).values()) == 134_515_008
    with safe_open(model / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
    assert weight_sizes(load_config(model)) == stored
    assert torch.get_default_dtype() == torch.float32


def test_a_segment_of_the_speed_benchmark() -> None:
    """Whole steps on an H200, sampler and KV cache included: docs/speed.md, from benchmarks/results/speed.json."""
    from ratchet.config import load_config as load_run_config
    from ratchet.grains.plan import pods
    from ratchet.grains.plan.facts import Facts, Model, Split

    found = json.loads((ROOT / "benchmarks/results/speed.json").read_text(encoding="utf-8"))
    for measured in found:
        if measured["system"] != "ratchet":
            continue
        prompts = int(measured["workload"].split()[1])
        config = load_run_config(
            ROOT / "configs/speed.yaml",
            [
                f"data.train_batch_size={prompts}",
                "trainer.total_training_steps=10",
                "data.max_prompt_length=256",
                "data.max_response_length=256",
                "actor_rollout_ref.rollout.n=8",
                f"actor_rollout_ref.rollout.max_num_seqs={prompts * 8}",
            ],
            is_quiet=True,
        )
        policy = Model(
            config=SMOLLM2, num_parameters=134_515_008, num_tensors=272, folder_bytes=0, texts_bytes=0, dtype="bfloat16"
        )
        split = Split(ids=[], prompts=torch.zeros(0).numpy(), table_bytes=0)
        facts = Facts(policy=policy, critic=None, splits={"train": split})
        lengths = [(LENGTH - SCORED, SCORED)] * (prompts * 8)
        engines = pods.engines(config, facts, lengths, "cuda", 141 * 10**9)
        (pod,) = pods.pods(config, facts, engines, "cuda")
        assert pod.peak - pods.OUTSIDE_TORCH == pytest.approx(measured["peak"], rel=0.25)
        assert pod.peak == pytest.approx(measured["device_peak"], rel=0.25)
