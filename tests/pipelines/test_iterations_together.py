"""What the Retry button does: it starts every failed iteration at once. None may harm the run."""

import os
from pathlib import Path

import pytest

from ratchet.grains import entry
from ratchet.grains.tasks import PreflightTask, PreprocessTask
from ratchet.store.run import POLICY_UPDATE, Run
from tests.runs import tiny_config, train_in_a_process, write_problems
from tests.warm import Program, Warm

STEPS = 4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def start_segment(warm: Warm, root: str, step: int) -> Program:
    task = f"SegmentTask(root={root!r}, run_id='together', submission_id='job', start={step})"
    imports = "from ratchet.grains import entry, program; from ratchet.grains.tasks import SegmentTask"
    program = f"{imports}; program.run('segment', entry.segment, {task})"
    return warm.start(Path(os.devnull), os.environ, "-c", program)


def test_four_iterations_started_together_leave_a_run_that_finishes(
    tiny_model: Path, warm: Warm, tmp_path: Path
) -> None:
    config = tiny_config(tiny_model, write_problems(tmp_path / "train.jsonl", 4))
    text, root = config.model_dump_json(), str(tmp_path / "runs")
    overrides = [f"trainer.total_training_steps={STEPS}", "trainer.steps_per_segment=1"]
    at = {"root": root, "run_id": "together", "submission_id": "job"}
    entry.preflight(PreflightTask(**at, config=text, total_steps=STEPS, steps_per_segment=1))
    entry.preprocess(PreprocessTask(**at))
    for process in [start_segment(warm, root, step) for step in range(1, STEPS + 1)]:
        process.wait()
    run = Run(root, "together")
    # Whichever got through its fence is committed in order, with no step missing before it.
    done = run.last_step()
    assert all(run.manifest(POLICY_UPDATE, step) for step in range(done + 1))
    for step in range(done + 1, STEPS + 1):
        assert start_segment(warm, root, step).wait() == 0
    alone = train_in_a_process(root, "alone", text, overrides, tmp_path, warm)
    run.forget()
    for step in range(STEPS + 1):
        assert run.require(POLICY_UPDATE, step).content_digest == alone.require(POLICY_UPDATE, step).content_digest
