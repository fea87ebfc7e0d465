"""How many accelerators a process holds, and what they are called."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.engines import model
from ratchet.stages.held import Held, accelerators, num_held
from tests.runs import tiny_config


@pytest.mark.parametrize(
    ("overrides", "training", "scoring", "sampling", "expected"),
    [
        ({}, False, False, False, 0),
        ({}, True, True, True, 1),
        ({"actor_rollout_ref.rollout.name": "vllm"}, False, True, False, 1),
        (
            {"actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size": 4},
            True,
            False,
            True,
            4,
        ),
        ({"trainer.n_gpus_per_node": 8, "trainer.grain": "stage"}, True, False, False, 8),
        (
            {"actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.rollout.dedicated_gpus": 3},
            True,
            True,
            True,
            4,
        ),
        # At stage grain nobody trains beside them.
        (
            {"actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.rollout.dedicated_gpus": 3},
            False,
            False,
            True,
            3,
        ),
    ],
)
def test_a_process_holds_what_its_engines_do(
    tmp_path: Path, overrides: dict[str, Any], training: bool, scoring: bool, sampling: bool, expected: int
) -> None:
    config = tiny_config(tmp_path, tmp_path / "problems.jsonl", **overrides)
    found = num_held(config, is_training=training, is_scoring=scoring, is_sampling=sampling)
    assert found == expected


def test_gpus_have_their_own_name_and_a_cpu_counts_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "accelerator_name", lambda: "NVIDIA H200")
    assert accelerators("cuda", 3) == Held("NVIDIA H200", 3)
    assert accelerators("cuda", 3).gpu_seconds(2.5) == 7.5
    assert accelerators("cpu", 3) == accelerators("cuda", 0) == Held("cpu", 0)
    assert accelerators("cpu", 3).gpu_seconds(2.5) == 0.0
