"""Row 30 of the promises: different GPU types for each stage."""

import json
from pathlib import Path
from typing import Any

from ratchet.grains import entry
from ratchet.grains.tasks import PlanTask, PreflightTask, PreprocessTask
from tests.runs import tiny_config

H200 = {"accelerator_count": 4, "node_selector": {"nvidia.com/gpu.product": "NVIDIA-H200"}}
L4 = {"accelerator_count": 1, "node_selector": {"nvidia.com/gpu.product": "NVIDIA-L4"}}
MIG = {"accelerator_count": 1, "accelerator_type": "nvidia.com/mig-1g.18gb"}


def test_row_30_each_stage_has_its_accelerator_and_its_nodes(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    config = tiny_config(tiny_model, problems, **{"trainer.grain": "stage", "trainer.total_training_steps": 1})
    tree: dict[str, Any] = config.model_dump(mode="json")
    # The config may say it, and the form of the pipeline over it.
    tree["device_map"] = {"rollout": L4, "policy_update": {"accelerator_count": 8}}
    at = {"root": str(tmp_path), "run_id": "run", "submission_id": "pipeline-run"}
    asked = {"policy_update": H200, "scores": MIG}
    entry.preflight(PreflightTask(**at, config=json.dumps(tree), grain="stage", device_map=asked))
    entry.preprocess(PreprocessTask(**at))
    (step,) = entry.plan(PlanTask(**at))

    def accelerators(stage: str) -> tuple[str, str, dict[str, str]]:
        return tuple(step[f"{stage}_{name}"] for name in ("accelerator_type", "accelerator_count", "node_selector"))

    assert accelerators("rollout") == ("nvidia.com/gpu", "1", {"nvidia.com/gpu.product": "NVIDIA-L4"})
    assert accelerators("scores") == ("nvidia.com/mig-1g.18gb", "1", {})
    assert accelerators("policy_update") == ("nvidia.com/gpu", "4", {"nvidia.com/gpu.product": "NVIDIA-H200"})
