"""The recurring pipeline on kfp.local: a night without a champion, and one with the data of the last."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ratchet.store import champions
from ratchet.store.run import Run
from tests.runs import CONFIGS

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = REPOSITORY / "pipelines" / "nightly" / "pipeline.yaml"

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(600)]


def night(root: str, run_id: str, config: dict[str, dict[str, object]], folder: Path, *more: str) -> str:
    """Run the pipeline to its end and return its log."""
    log = folder / f"{run_id}.log"
    arguments = [f"root={root}", f"run_id={run_id}", f"config={yaml.safe_dump(config)}", "total_steps=1", *more]
    with log.open("wb") as sink:
        finished = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "pipelines.local", str(GOLDEN), *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RATCHET_KFP_ROOT": str(folder / "kfp")},
            stdout=sink,
            stderr=sink,
            check=False,
        )
    text = log.read_text(errors="replace")
    assert finished.returncode == 0, text[-3000:]
    return text


def test_the_first_night_makes_a_champion_and_the_same_data_are_not_trained_on_twice(
    s3_root: str, tiny_model: Path, tmp_path: Path
) -> None:
    config = yaml.safe_load((CONFIGS / "tiny.yaml").read_text())
    config["data"] |= {
        "train_files": "ratchet/word-problems?level=2&size=8",
        "val_files": "ratchet/word-problems?size=4",
        "max_response_length": 6,
    }
    config["actor_rollout_ref"]["model"]["path"] = str(tiny_model)
    config["actor_rollout_ref"]["actor"]["entropy_coeff"] = 0.01
    config["trainer"] |= {"logger": []}

    night(s3_root, "monday", config, tmp_path)
    first = champions.champion(s3_root, "policy")
    assert first is not None
    assert (first.verdict, first.run_id, first.step, first.compared_with) == ("promoted", "monday", 1, None)

    # Tuesday finds the data of Monday: one task runs, and no run comes to be.
    log = night(s3_root, "tuesday", config, tmp_path)
    assert "those of decision 1 on policy" in log
    assert log.count("Executing task") == 1
    assert Run(s3_root, "tuesday").newest_epoch() == 0
