"""A run through the compiled pipeline over S3, killed twice and submitted again, is the run that was never killed."""

import os
import signal
import time
from pathlib import Path

import pytest
import yaml

from ratchet.store.run import POLICY_UPDATE, Run
from tests.runs import train_in_a_process
from tests.warm import Program, Warm

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = REPOSITORY / "pipelines" / "grpo" / "pipeline.yaml"
STEPS = 12
KILLED_AFTER = (("rollout", 4), (POLICY_UPDATE, 8))
"""Stages and steps after whose commits everything is killed: in the middle of a step, and between two."""

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1200)]


def config_text(model: Path, data: str, tracking: list[str]) -> str:
    config = yaml.safe_load((REPOSITORY / "configs" / "tiny.yaml").read_text())
    config["data"] |= {
        "train_files": data,
        "val_files": "ratchet/word-problems?level=1&size=8",
        "train_max_samples": 64,
    }
    config["actor_rollout_ref"]["model"]["path"] = str(model)
    # A random model earns nothing on GSM8K: the entropy bonus moves the weights at every step all the same.
    config["actor_rollout_ref"]["actor"]["entropy_coeff"] = 0.01
    config["trainer"] |= {"logger": tracking, "trainer_state_freq": 3, "val_before_train": False}
    return yaml.safe_dump(config)


def submit_pipeline(warm: Warm, root: str, config: str, folder: Path) -> Program:
    """Start the pipeline and everything of it in a process group of its own."""
    arguments = [f"root={root}", "run_id=killed", f"config={config}", f"total_steps={STEPS}", "steps_per_segment=4"]
    environment = {**os.environ, "RATCHET_KFP_ROOT": str(folder / "kfp")}
    return warm.start(folder / "pipeline.log", environment, "pipelines.local", str(GOLDEN), *arguments)


def kill_after(process: Program, run: Run, stage: str, step: int, log: Path) -> str:
    """SIGKILL the pipeline and every task of it as soon as `stage` of `step` is committed; return that attempt."""
    deadline = time.monotonic() + 300
    while run.manifest(stage, step) is None:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return run.require(stage, step).provenance.attempt


def policies(run: Run) -> list[str]:
    return [run.require(POLICY_UPDATE, step).content_digest for step in range(STEPS + 1)]


def test_killed_twice_and_resumed_it_ends_with_the_same_policy(
    s3_root: str, tiny_model: Path, warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = REPOSITORY.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
    data = str(real) if real.is_file() else "ratchet/word-problems?level=3&size=64"
    tracking_uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
    config = config_text(tiny_model, data, ["console", "mlflow"])
    run, log = Run(s3_root, "killed"), tmp_path / "pipeline.log"
    committed = {}
    for stage, step in KILLED_AFTER:
        committed[stage, step] = kill_after(submit_pipeline(warm, s3_root, config, tmp_path), run, stage, step, log)
        assert run.last_step() < STEPS
    assert submit_pipeline(warm, s3_root, config, tmp_path).wait(600) == 0, log.read_text()[-3000:]
    run.forget()

    overrides = [f"trainer.total_training_steps={STEPS}", "trainer.grain=step", "trainer.logger=[]"]
    other = train_in_a_process(s3_root, "whole", config, overrides, tmp_path, warm)
    assert policies(run) == policies(other)
    # What was committed before a kill is used, not made again.
    assert {key: run.require(*key).provenance.attempt for key in committed} == committed
    assert len(set(policies(run))) == STEPS + 1
    assert run.newest_epoch() == len(KILLED_AFTER) + 1
    assert run.manifest("checkpoint_export", STEPS) is not None
    _every_step_is_in_mlflow_once(tracking_uri, run)


def _every_step_is_in_mlflow_once(tracking_uri: str, run: Run) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri)
    (experiment,) = [found for found in client.search_experiments() if found.name == "ratchet"]
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert tracked.data.tags["ratchet.root"] == run.uri
    for name in ("critic/score/mean", "actor/pg_loss", "response_length/mean"):
        points = client.get_metric_history(tracked.info.run_id, name)
        assert sorted(point.step for point in points) == list(range(1, STEPS + 1)), name
