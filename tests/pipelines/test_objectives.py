"""The pipelines of objectives that learn from examples, run whole: two steps of a tiny model, from data to export."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ratchet.store.run import Run
from tests.runs import CONFIGS
from tests.warm import Warm

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 2
GOLDEN = {
    "sft": "sft/pipeline.yaml",
    "dpo": "dpo/pipeline.yaml",
    "dpo_stages": "dpo/pipeline_stages.yaml",
    "reward_model": "reward_model/pipeline.yaml",
    "hybrid": "hybrid/pipeline.yaml",
}

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(600)]


def _config(objective: str, model: Path) -> str:
    """The objective's own config, smaller."""
    tree: dict[str, Any] = yaml.safe_load((CONFIGS / f"{objective}.yaml").read_text())
    tree["actor_rollout_ref"]["model"]["path"] = str(model)
    tree["data"] |= {"max_prompt_length": 256, "max_response_length": 128, "train_batch_size": 2}
    for key in ("train_files", "val_files"):
        tree["data"][key] = tree["data"][key].replace("size=2048", "size=4").replace("size=256", "size=2")
    if objective == "hybrid":
        tree["data"] |= {"max_response_length": 64, "val_files": ""}
        tree["actor_rollout_ref"]["rollout"] |= {"n": 2}
    tree["trainer"] = {"device": "cpu", "total_training_steps": STEPS, "logger": []}
    return yaml.safe_dump(tree)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, warm: Warm) -> dict[str, Run]:
    """The run of each pipeline, by kfp.local."""
    folder = tmp_path_factory.mktemp("objectives")
    root = str(folder / "runs")
    for name, golden in GOLDEN.items():
        log = folder / f"{name}.log"
        config = _config(name.removesuffix("_stages"), tiny_model)
        code = warm.run(
            log,
            {**os.environ, "RATCHET_KFP_ROOT": str(folder / "kfp")},
            "pipelines.local",
            str(REPOSITORY / "pipelines" / golden),
            *(f"root={root}", f"run_id={name}", f"config={config}"),
        )
        assert code == 0, log.read_text(errors="replace")[-3000:]
    return {name: Run(root, name) for name in GOLDEN}


@pytest.mark.parametrize(
    ("objective", "stages", "metric"),
    [
        ("sft", {"policy_update"}, "perplexity"),
        ("dpo", {"reference_scores", "policy_update"}, "margin"),
        ("reward_model", {"policy_update"}, "accuracy"),
        ("hybrid", {"rollout", "reward", "advantage", "policy_update"}, ""),
    ],
)
def test_a_pipeline_ends_with_a_model_that_transformers_loads(
    runs: dict[str, Run], objective: str, stages: set[str], metric: str
) -> None:
    run = runs[objective]
    for step in range(1, STEPS + 1):
        own = {item.content.stage for item in run.step_manifests(step)} - {"evaluate", "checkpoint_export"}
        assert own == stages
    if metric:
        for step in (0, STEPS):
            assert f"val-core/ratchet/word-problems/{metric}" in run.require("evaluate", step).provenance.metrics
    folder = Path(run.root) / run.run_id / run.require("checkpoint_export", STEPS).output("export").folder
    kind: Any = AutoModelForSequenceClassification if objective == "reward_model" else AutoModelForCausalLM
    model, told = kind.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"]
    assert objective != "reward_model" or model.config.num_labels == 1


def test_a_pod_for_each_stage_commits_what_one_for_all_steps_does(runs: dict[str, Run]) -> None:
    digests = [
        {
            f"{step}/{item.content.stage}": item.content_digest
            for step in range(STEPS + 1)
            for item in run.step_manifests(step)
        }
        for run in (runs["dpo"], runs["dpo_stages"])
    ]
    assert digests[0] == digests[1]
    assert {"1/reference_scores", "2/policy_update", "2/evaluate", "2/checkpoint_export"} <= digests[0].keys()
