"""What `ratchet status` finds out from object storage alone, about runs in every state."""

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratchet.errors import NotCommittedError
from ratchet.grains.status.advice import next_step
from tests.ratchet.grains.run_stories import KFP_RUN, OTHER_RUN, Story, ago, kubeflow, look, never, page


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(str(tmp_path / "runs"))


# -- from the store alone ----------------------------------------------------------------------------------------------


def test_a_run_that_nobody_knows_is_an_error(story: Story) -> None:
    with pytest.raises(NotCommittedError, match=r"nothing is known of a run at .*/runs/first"):
        look(story)


def test_a_run_that_was_claimed_a_moment_ago_is_starting(story: Story) -> None:
    story.claim().task("preflight", "succeeded", started=ago(20.0), updated=ago(8.0))
    status = look(story)
    assert (status.state, status.failure, status.now) == ("running", None, ())
    assert status.progress is not None
    assert (status.progress.steps, status.progress.total, status.progress.last_commit) == (0, 100, None)
    assert next_step(status).startswith("wait; ratchet status ")


def test_a_first_preflight_is_a_run_that_starts(story: Story) -> None:
    story.task("preflight", "running", started=ago(10.0), updated=ago(10.0))
    status = look(story)
    assert (status.state, status.owner, status.progress) == ("starting", None, None)
    assert [one.task for one in status.now] == ["preflight"]


def test_a_run_that_never_passed_preflight_shows_its_error(story: Story) -> None:
    message = "1 finding:\ndata.train_batch_size: 4 is smaller than the group of 8"
    advice = "correct the config or the data, and submit again with the same run id"
    fields: dict[str, Any] = {"exit_code": 2, "error": "ConfigError", "message": message, "advice": advice}
    story.task("preflight", "failed", updated=ago(60.0), **fields)
    status = look(story)
    assert status.state == "refused"
    assert status.failure is not None
    assert (status.failure.task, status.failure.meaning) == ("preflight", "config or data are wrong")
    assert next_step(status).startswith(f"{advice}: ratchet submit PIPELINE --config CONFIG.yaml --root ")
    assert "data.train_batch_size: 4 is smaller than the group of 8" in page(status)


def test_a_submission_without_work_says_why(story: Story) -> None:
    story.task("preflight", "succeeded", note="the training data are those of decision 3: nothing is trained")
    status = look(story)
    assert status.state == "skipped"
    assert next_step(status) == "nothing: the training data are those of decision 3: nothing is trained"


def test_a_running_segment_shows_its_step_pace_metrics_and_end(story: Story) -> None:
    story.prepared().steps(1, 37, ended=ago(12.0)).evaluate(25, ago(700.0), 0.481)
    story.commit("rollout", 38, ago(5.0), role="rollouts").task("segment", "running", step=1)
    status = look(story)
    progress = status.progress
    assert progress is not None
    assert (status.state, progress.steps, progress.total, progress.stages) == ("running", 37, 100, ("rollout",))
    assert (progress.seconds_per_step, progress.seconds_left) == (60.0, 63 * 60.0)
    assert (progress.first_reward, progress.reward) == (pytest.approx(0.405), pytest.approx(0.585))
    assert progress.metrics["response_length/mean"] == 180.0
    (accuracy,) = progress.accuracy
    assert (accuracy.step, accuracy.source, accuracy.mean) == (25, "openai/gsm8k", 0.481)
    (activity,) = status.now
    assert (activity.task, activity.step, activity.heard) == ("segment", 1, ago(12.0))


def test_the_pace_of_a_first_step_is_how_long_it_took(story: Story) -> None:
    story.prepared().steps(1, 1, ended=ago(5.0), pace=90.0)
    progress = look(story).progress
    assert progress is not None
    assert progress.seconds_per_step == 90.0


def test_without_a_number_of_steps_the_epochs_decide_once_prompts_are_committed(story: Story) -> None:
    story.config["trainer"] |= {"total_training_steps": None, "total_epochs": 2}
    story.claim()
    first = look(story).progress
    assert first is not None
    assert first.total is None
    assert "how many there will be is not known yet" in page(look(story))
    second = look(story.prepare(ago(5.0))).progress
    assert second is not None
    assert second.total == 2 * 32  # ceil(1000 prompts / 32 a step)


def test_a_status_that_says_running_is_done_once_its_commit_is_there(story: Story) -> None:
    # The first segment's pod could not write its last status; the chain knows better.
    story.prepared().steps(1, 50, ended=ago(120.0)).task("segment", "running", step=1, updated=ago(900.0))
    story.task("segment", "running", step=51, started=ago(60.0))
    status = look(story)
    assert (status.state, [one.step for one in status.now]) == ("running", [51])


def test_a_task_that_was_not_heard_of_for_minutes_is_lost(story: Story) -> None:
    story.prepared().steps(1, 3, ended=ago(2000.0)).task("segment", "running", step=1, updated=ago(1900.0))
    status = look(story)
    assert status.state == "lost"
    assert status.failure is not None
    assert "nothing was heard of it for minutes" in status.failure.message
    assert next_step(status).startswith("is the pod there (kubectl get pod grpo-x-segment-1)? if not, ratchet submit")
    assert "--keep-alive" in next_step(status)


def test_commits_are_heartbeats_too(story: Story) -> None:
    story.prepared().steps(1, 3, ended=ago(20.0)).task("segment", "running", step=1, updated=ago(1900.0))
    assert look(story).state == "running"


def test_of_a_failure_in_the_loop_the_first_is_shown_and_its_consequences_are_counted(story: Story) -> None:
    story.prepared().steps(1, 20, ended=ago(1000.0))
    story.task("segment", "failed", step=1, updated=ago(990.0), exit_code=5, error="NumericsError",
               message="expected a finite loss and gradient in step 21", advice="change the config")  # fmt: skip
    for number, start in enumerate((51, 101, 151)):
        story.task("segment", "failed", step=start, updated=ago(900.0 - 40 * number), exit_code=3,
                   error="NotCommittedError", message="step-000050/policy_update is not committed")  # fmt: skip
    status = look(story)
    assert status.state == "failed"
    failure = status.failure
    assert failure is not None
    assert (failure.step, failure.error, failure.exit_code, failure.consequences) == (1, "NumericsError", 5, 3)
    # What fails again with the same config is not to be submitted again as it is.
    assert next_step(status) == "change the config"
    assert "3 later tasks failed because of it" in page(status)


def test_a_fence_without_another_failure_is_shown_itself(story: Story) -> None:
    story.prepared().task("segment", "failed", step=51, exit_code=3, error="NotCommittedError", message="not committed")
    failure = look(story).failure
    assert failure is not None
    assert (failure.exit_code, failure.meaning, failure.consequences) == (3, "an earlier task failed", 0)


def test_a_terminated_run_goes_on_by_submitting_it_again(story: Story) -> None:
    story.prepared().steps(1, 5, ended=ago(130.0))
    story.task("segment", "terminated", step=1, updated=ago(120.0), exit_code=143)
    status = look(story)
    assert status.state == "terminated"
    assert next_step(status).startswith("nothing committed is lost; to go on, ratchet submit")


def test_a_pipeline_that_starts_no_further_task_has_stopped(story: Story) -> None:
    story.prepared()
    assert look(story).state == "stopped"
    assert look(story, pipeline_run=kubeflow("RUNNING")).state == "running"


def test_a_finished_run_says_so_whatever_its_pods_said_last(story: Story) -> None:
    story.prepared().finish().task("checkpoint_export", "running", updated=ago(9000.0))
    status = look(story)
    assert (status.state, status.failure) == ("finished", None)
    export = f"{story.root}/first/step-000100/checkpoint_export/0001-a/export"
    assert next_step(status) == f"nothing: the run is finished; its export is at {export}"


def test_a_run_is_finished_only_with_its_evaluation_and_its_export(story: Story) -> None:
    story.prepared().steps(95, 100, ended=ago(20.0))
    assert look(story).state != "finished"
    story.export(100, ago(10.0))
    assert look(story).state != "finished"
    story.evaluate(100, ago(5.0), 0.5)
    assert look(story).state == "finished"
    story.config["data"]["val_files"] = ""
    story.claim()
    assert look(story).state == "finished"


def test_a_run_that_may_grow_is_finished_by_what_its_newest_submission_asks_for(story: Story) -> None:
    story.prepared().finish()
    story.config["trainer"]["total_training_steps"] = 120
    story.claim(OTHER_RUN)
    status = look(story)
    assert status.state != "finished"
    assert status.progress is not None
    assert (status.progress.steps, status.progress.total) == (100, 120)


def test_the_newest_submission_owns_the_run_and_the_older_ones_are_counted(story: Story) -> None:
    story.prepared().steps(1, 3, ended=ago(100.0))
    story.task("segment", "failed", step=1, exit_code=4, error="OwnershipLostError", message="lost it to epoch 2")
    story.claim(OTHER_RUN, host="grpo-y-preflight-1")
    story.task("preflight", "succeeded", submission_id=OTHER_RUN, started=ago(90.0), updated=ago(60.0))
    story.task("segment", "running", step=4, submission_id=OTHER_RUN, started=ago(50.0))
    status = look(story)
    assert (status.state, status.failure) == ("running", None)
    assert status.owner is not None
    assert (status.owner.epoch, status.owner.submission_id, status.owner.host) == (2, OTHER_RUN, "grpo-y-preflight-1")
    assert "claim 2 by grpo-y-preflight-1; 1 earlier one has lost the run" in page(status)


def test_a_later_submission_that_was_refused_is_told_beside_what_runs(story: Story) -> None:
    story.prepared().steps(1, 3, ended=ago(30.0)).task("segment", "running", step=1)
    story.task("preflight", "failed", submission_id=OTHER_RUN, started=ago(100.0), updated=ago(90.0), exit_code=2,
               error="ConfigError", message="run first exists with another configuration")  # fmt: skip
    status = look(story)
    assert (status.state, status.failure) == ("running", None)
    assert status.refused is not None
    assert "a later submission was refused: preflight" in page(status)


def test_a_failed_run_that_is_submitted_again_is_starting(story: Story) -> None:
    story.prepared().task("segment", "failed", step=1, updated=ago(600.0), exit_code=70, error="ValueError")
    assert look(story).state == "failed"
    story.task("preflight", "running", submission_id=OTHER_RUN, started=ago(10.0), updated=ago(10.0))
    status = look(story)
    assert (status.state, [one.task for one in status.now]) == ("starting", ["preflight"])


def test_a_submission_that_found_the_run_complete_changes_nothing(story: Story) -> None:
    story.prepared().finish()
    story.task("preflight", "succeeded", submission_id=OTHER_RUN, started=ago(60.0), note="run first is complete")
    status = look(story)
    assert (status.state, status.said) == ("finished", "run first is complete")


def test_a_process_of_this_machine_is_looked_for(story: Story) -> None:
    story.claim(None, host=socket.gethostname(), pid=os.getpid()).prepare(ago(900.0)).steps(1, 2, ended=ago(800.0))
    running = look(story, open_cluster=never, pipeline_run=never)
    assert (running.state, running.notes) == ("running", ())
    assert f"process {os.getpid()} on {socket.gethostname()}, which is alive" in page(running)
    story.claim(None, host=socket.gethostname(), pid=2**22 + 1)
    stopped = look(story)
    assert stopped.state == "stopped"
    assert "ratchet train --config CONFIG.yaml --root" in next_step(stopped)


def test_a_process_elsewhere_lives_as_long_as_it_commits(story: Story) -> None:
    story.claim(None, host="gpu-box", pid=7).prepare(ago(900.0)).steps(1, 2, ended=ago(100.0))
    assert look(story).state == "running"
    story.steps(1, 2, ended=ago(4000.0))
    status = look(story)
    assert status.state == "unknown"
    assert next_step(status).startswith("does process 7 on gpu-box live? if not, ratchet train")


def test_a_damaged_status_is_noted_and_hides_nothing(story: Story) -> None:
    story.prepared().steps(1, 3, ended=ago(30.0)).task("segment", "running", step=1)
    story.run.store.put(f"status/{KFP_RUN}/rollout-000009.json", b"{")
    status = look(story)
    assert status.state == "running"
    assert status.notes == (f"{story.run.uri}/status/{KFP_RUN}/rollout-000009.json is damaged",)


def test_a_damaged_submission_is_noted_and_hides_nothing_else(story: Story) -> None:
    story.prepared().steps(1, 3, ended=ago(4000.0)).claim(OTHER_RUN, host="grpo-y-preflight-1")
    place = f"{story.run.uri}/submissions/0002.json"
    story.run.store.put("submissions/0002.json", b"{")
    status = look(story)
    (note,) = status.notes
    assert note.startswith(f"{place} is damaged: Expecting property name ")
    assert (status.state, status.setup.algorithm) == ("unknown", "")
    assert status.progress is not None
    assert (status.progress.steps, status.progress.total, status.progress.reward) == (3, None, 0.4 + 3 / 200)
    assert "owner process 1 on grpo-y-preflight-1, its submission is damaged, claim 2; " in page(status)
    assert "outside a pipeline" not in page(status)
    assert next_step(status) == (
        f"restore submissions/0002.json from a copy, and look again; ratchet verify {story.run.uri} names all that is "
        "damaged"
    )


def test_a_damaged_submission_of_an_earlier_claim_is_only_noted(story: Story) -> None:
    story.prepared().steps(1, 3, ended=ago(30.0)).claim(OTHER_RUN).task("segment", "running", submission_id=OTHER_RUN)
    whole = look(story)
    story.run.store.put("submissions/0001.json", b"")
    status = look(story)
    assert status.notes == (f"{story.run.uri}/submissions/0001.json is damaged: it is empty",)
    assert replace(status, notes=()) == whole
