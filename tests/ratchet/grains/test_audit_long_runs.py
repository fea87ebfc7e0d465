"""A run of 1,000 steps of 256 rollouts on a real S3 server: how long an audit takes, and what it reads."""

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from ratchet.grains.audit import audit, find_sample, find_subject
from ratchet.store import index, layout
from ratchet.store.run import Run
from ratchet.store.s3 import S3Store
from tests.long_runs import lengthen, upload
from tests.runs import tiny_config, train_tiny, write_problems

STEPS, SAMPLED = 1000, 500
SECONDS = 3.0


def _timed(*arguments: str) -> tuple[float, str]:
    """Seconds of the command, at best of three attempts, as other tests may run beside; and what it printed."""
    best, out = float("inf"), ""
    for _ in range(3):
        started = time.perf_counter()
        command = [sys.executable, "-m", "ratchet.cli", *arguments]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        assert finished.returncode == 0, finished.stderr[-2000:]
        best, out = min(best, time.perf_counter() - started), finished.stdout
        if best < SECONDS:
            break
    return best, out


def _is_left_out(key: str) -> bool:
    """Three of four manifests, to upload fewer: of steps that are indexed, an audit reads them from there alone."""
    step = layout.parse_step_folder(key.partition("/")[0])
    return bool(step) and step not in (SAMPLED, STEPS) and "/policy_update/" not in key


@pytest.mark.slow
def test_a_thousand_steps_are_audited_in_three_seconds_and_few_requests(
    tmp_path: Path, tiny_model: Path, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = write_problems(tmp_path / "problems.jsonl", 32)
    config = tiny_config(
        tiny_model,
        problems,
        **{"data.train_batch_size": 32, "actor_rollout_ref.rollout.n": 8, "trainer.total_training_steps": 1},
    )
    local = train_tiny(tmp_path / "runs", "long", config)
    lengthen(local, STEPS, tables_of=[SAMPLED])
    assert index.rebuild(local, STEPS) == list(range(index.STEPS, STEPS + 1, index.STEPS))
    run = upload(local, s3_root, leaving_out=_is_left_out)

    seconds, tree = _timed("audit", run.uri)
    assert f"{STEPS} steps, {STEPS * 256} rollouts" in tree
    sample_seconds, text = _timed("sample", run.uri, "--step", str(SAMPLED), "--id", "train-0000007/3")
    assert f"fed the update to policy version {SAMPLED}" in text
    # 1.4 s and 1.2 s on two idle cores, most of it the start of Python.
    assert max(seconds, sample_seconds) < SECONDS

    requests: Counter[str] = Counter()
    read: list[str] = []
    for name in ("get", "get_range", "size", "list_objects", "list_folders", "download_file"):
        monkeypatch.setattr(S3Store, name, _counted(getattr(S3Store, name), name, requests, read))
    found = audit(find_subject(run.uri))
    assert (len(found.steps), found.faults) == (STEPS, ())
    assert sum(requests.values()) <= 80  # 20 indexes, the ends of their steps, and what stands alone
    assert not any("parquet" in key for key in read)
    requests.clear()
    find_sample(Run(run.root, run.run_id), SAMPLED, "train-0000007/3")
    assert sum(requests.values()) <= 12
    tables = [key for key in read if "parquet" in key]
    assert sorted(key.split("/")[-2] for key in tables) == ["prompts", "rewards", "rollouts", "trajectories"]


def _counted(inner, name, requests, read):  # type: ignore[no-untyped-def]
    def counted(self, key, *arguments, **options):  # type: ignore[no-untyped-def]
        requests[name] += 1
        read.append(key)
        return inner(self, key, *arguments, **options)

    return counted
