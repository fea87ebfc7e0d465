"""The compiled pipeline at stage grain: a process for each stage, and the same content as a process for everything."""

import os
from pathlib import Path

import pytest
import yaml

from ratchet.store.run import Run
from tests.runs import train_in_a_process
from tests.warm import Warm

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("pipeline", "steps", "algorithm", "more"),
    [
        ("grpo", 2, {"adv_estimator": "grpo"}, {"reference_scores"}),
        ("ppo", 1, {"adv_estimator": "gae", "lam": 0.9}, {"reference_scores", "values", "critic_update"}),
    ],
    ids=["grpo", "ppo"],
)
def test_a_process_for_each_stage_commits_what_one_process_commits(
    pipeline: str,
    steps: int,
    algorithm: dict[str, object],
    more: set[str],
    s3_root: str,
    tiny_model: Path,
    warm: Warm,
    tmp_path: Path,
) -> None:
    config = yaml.safe_load((REPOSITORY / "configs" / "tiny.yaml").read_text())
    config["data"] |= {
        "train_files": "ratchet/word-problems?level=2&size=16",
        "val_files": "ratchet/word-problems?size=4",
    }
    config["actor_rollout_ref"]["model"]["path"] = str(tiny_model)
    config["actor_rollout_ref"]["actor"] |= {"entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.01}
    config["algorithm"] = algorithm
    config["trainer"] |= {"logger": []}
    text = yaml.safe_dump(config)
    log = tmp_path / "pipeline.log"
    golden = REPOSITORY / "pipelines" / pipeline / "pipeline_stages.yaml"
    arguments = [f"root={s3_root}", "run_id=pods", f"config={text}", f"total_steps={steps}"]
    environment = {**os.environ, "RATCHET_KFP_ROOT": str(tmp_path / "kfp")}
    code = warm.run(log, environment, "pipelines.local", str(golden), *arguments)
    assert code == 0, log.read_text(errors="replace")[-3000:]

    overrides = [f"trainer.total_training_steps={steps}", "trainer.grain=segment"]
    other = train_in_a_process(s3_root, "process", text, overrides, tmp_path, warm)
    pods = Run(s3_root, "pods")
    for step in range(steps + 1):
        expected = {item.content.stage: item.content_digest for item in other.step_manifests(step)}
        assert {item.content.stage: item.content_digest for item in pods.step_manifests(step)} == expected
    always = {"rollout", "reward", "advantage", "policy_update", "evaluate", "checkpoint_export"}
    assert always | more == {item.content.stage for step in range(1, steps + 1) for item in pods.step_manifests(step)}
