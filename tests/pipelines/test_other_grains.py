"""The pipelines that no other test runs whole: a pod for each step, and PPO in segments."""

import os
from pathlib import Path

import pytest
import yaml

from ratchet.store.run import Run
from tests.runs import CONFIGS
from tests.warm import Warm

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("golden", "steps", "algorithm", "stages"),
    [
        ("grpo/pipeline_steps.yaml", 2, {"adv_estimator": "grpo"}, {"rollout", "reward", "advantage", "policy_update"}),
        ("ppo/pipeline.yaml", 1, {"adv_estimator": "gae"}, {"values", "critic_update", "policy_update"}),
    ],
    ids=["grpo-steps", "ppo"],
)
def test_every_step_is_committed(
    golden: str,
    steps: int,
    algorithm: dict[str, str],
    stages: set[str],
    s3_root: str,
    tiny_model: Path,
    warm: Warm,
    tmp_path: Path,
) -> None:
    config = yaml.safe_load((CONFIGS / "tiny.yaml").read_text())
    config["data"] |= {"train_files": "ratchet/word-problems?level=2&size=8", "max_response_length": 6}
    config["actor_rollout_ref"]["model"]["path"] = str(tiny_model)
    config |= {"algorithm": algorithm}
    config["trainer"] |= {"logger": []}
    arguments = [f"root={s3_root}", "run_id=run", f"config={yaml.safe_dump(config)}", f"total_steps={steps}"]
    log = tmp_path / "log"
    environment = {**os.environ, "RATCHET_KFP_ROOT": str(tmp_path / "kfp")}
    code = warm.run(log, environment, "pipelines.local", str(REPOSITORY / "pipelines" / golden), *arguments)
    assert code == 0, log.read_text(errors="replace")[-3000:]
    run = Run(s3_root, "run")
    assert run.last_step() == steps
    assert stages <= {manifest.content.stage for manifest in run.step_manifests(steps)}
    assert run.manifest("checkpoint_export", steps) is not None
