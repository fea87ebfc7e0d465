"""The recurring pipeline on kfp.local: a night without a champion, and one with the data of the last."""

import os
from pathlib import Path

import pytest
import yaml

from ratchet.store import champions
from ratchet.store.run import Run
from tests.runs import CONFIGS
from tests.warm import Warm

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = REPOSITORY / "pipelines" / "nightly" / "pipeline.yaml"

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(600)]


def night(warm: Warm, root: str, run_id: str, config: dict[str, dict[str, object]], folder: Path) -> str:
    """Run the pipeline to its end and return its log."""
    log = folder / f"{run_id}.log"
    arguments = [f"root={root}", f"run_id={run_id}", f"config={yaml.safe_dump(config)}", "total_steps=1"]
    environment = {**os.environ, "RATCHET_KFP_ROOT": str(folder / "kfp")}
    code = warm.run(log, environment, "pipelines.local", str(GOLDEN), *arguments)
    text = log.read_text(errors="replace")
    assert code == 0, text[-3000:]
    return text


def test_the_first_night_makes_a_champion_and_the_same_data_are_not_trained_on_twice(
    s3_root: str, tiny_model: Path, warm: Warm, tmp_path: Path
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

    night(warm, s3_root, "monday", config, tmp_path)
    first = champions.champion(s3_root, "policy")
    assert first is not None
    assert (first.verdict, first.run_id, first.step, first.compared_with) == ("promoted", "monday", 1, None)

    # Tuesday finds the data of Monday: one task runs, and no run comes to be.
    log = night(warm, s3_root, "tuesday", config, tmp_path)
    assert "those of decision 1 on policy" in log
    assert log.count("Executing task") == 1
    assert Run(s3_root, "tuesday").newest_epoch() == 0
