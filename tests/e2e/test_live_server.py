"""A tiny run on a live Kubeflow Pipelines server.

`make e2e KF_PIPELINES_ENDPOINT=http://... RATCHET_IMAGE=... RATCHET_ROOT=s3://bucket/prefix RATCHET_MODEL=...`; the
image holds the project's CPU environment, and the AWS variables here and in the pods reach the same bucket.
"""

import os
import time
import uuid
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
NEEDED = ("KF_PIPELINES_ENDPOINT", "RATCHET_IMAGE", "RATCHET_ROOT", "RATCHET_MODEL")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture
def live() -> dict[str, str]:
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        pytest.skip(f"no live server: set {', '.join(missing)}")
    return {name: os.environ[name] for name in NEEDED}


def test_a_tiny_run_commits_every_step(live: dict[str, str], tmp_path: Path) -> None:
    from kfp import Client

    from pipelines.compile import compiled
    from pipelines.grpo.pipeline import grpo
    from ratchet.store.run import POLICY_UPDATE, Run

    config = yaml.safe_load((REPOSITORY / "configs" / "tiny.yaml").read_text())
    config["data"] |= {
        "train_files": "ratchet/word-problems?level=1&size=16",
        "val_files": "ratchet/word-problems?size=4",
    }
    config["actor_rollout_ref"]["model"]["path"] = live["RATCHET_MODEL"]
    package = tmp_path / "pipeline.yaml"
    # components/images.py reads RATCHET_IMAGE, so the compiled file names the image under test.
    package.write_text(compiled(grpo))
    run_id = f"e2e-{uuid.uuid4().hex[:8]}"
    client = Client(host=live["KF_PIPELINES_ENDPOINT"])
    submitted = client.create_run_from_pipeline_package(
        str(package),
        arguments={
            "root": live["RATCHET_ROOT"],
            "run_id": run_id,
            "config": yaml.safe_dump(config),
            "total_steps": 2,
            "steps_per_segment": 1,
        },
        run_name=run_id,
        enable_caching=False,
    )
    deadline = time.monotonic() + 3000
    state = ""
    while state not in ("SUCCEEDED", "FAILED", "CANCELED"):
        assert time.monotonic() < deadline, f"the run is still {state}"
        time.sleep(10)
        state = str(client.get_run(submitted.run_id).state)
    assert state == "SUCCEEDED"
    run = Run(live["RATCHET_ROOT"], run_id)
    assert [run.require(POLICY_UPDATE, step).content.policy_version for step in (0, 1, 2)] == [0, 1, 2]
    assert run.manifest("checkpoint_export", 2) is not None
