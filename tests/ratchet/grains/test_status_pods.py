"""What pods, workflows and Kubeflow add to a run's status, and what is said where they cannot be asked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.errors import ClusterError, ConfigError, NotCommittedError
from ratchet.grains.status.advice import next_step
from tests.kube_api import KubeApi, kube_api
from tests.ratchet.grains.run_stories import (
    KFP_RUN,
    OTHER_RUN,
    Story,
    Told,
    ago,
    container,
    kube_time,
    kubeflow,
    look,
    never,
    page,
    pod,
    with_pods,
)


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(str(tmp_path / "runs"))


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    """A Kubernetes API that this test's kubeconfig points to."""
    with kube_api() as found:
        monkeypatch.setenv("KUBECONFIG", str(found.write_kubeconfig(tmp_path / "kubeconfig")))
        yield found


# -- with the cluster --------------------------------------------------------------------------------------------------


def test_a_pod_that_waits_for_a_gpu_is_told_with_what_the_nodes_have(story: Story, api: KubeApi) -> None:
    story.prepared()
    message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. preemption: 0/1 nodes are available"
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    api.add("pods", "grpo-x-1", **pod("grpo-x-1", "segment", phase="Pending", conditions=[condition]))
    api.add_node("n-1")
    status = with_pods(story)
    assert status.state == "waiting"
    (activity,) = status.now
    assert activity.cause is not None
    assert (activity.task, activity.doing, activity.cause.kind) == ("segment", "waiting", "accelerator")
    assert next_step(status).startswith("no node has nvidia.com/gpu (the cluster has no accelerators)")
    # A view of the nodes is a privilege; without it less is said.
    api.rules = {("list", "pods"), ("list", "events")}
    assert next_step(with_pods(story)).startswith("wait until a nvidia.com/gpu is free")


def test_a_missing_secret_is_named_with_the_command_that_makes_it(story: Story, api: KubeApi) -> None:
    story.claim()
    waits = container("waiting", "CreateContainerConfigError", 'secret "nope" not found')
    api.add("pods", "grpo-x-1", **pod("grpo-x-1", "preflight", phase="Pending", containers=[waits]))
    status = with_pods(story)
    assert status.state == "waiting"
    assert next_step(status).startswith("create it: kubectl -n team create secret generic nope")


def test_a_pod_that_ran_out_of_memory_failed_although_its_status_says_running(story: Story, api: KubeApi) -> None:
    story.prepared().steps(1, 7, ended=ago(100.0)).task("segment", "running", step=1, updated=ago(80.0))
    over = container("terminated", "OOMKilled", exitCode=1, finishedAt=kube_time(ago(70.0)))
    api.add("pods", "grpo-x-segment-1", **pod("grpo-x-segment-1", "segment", phase="Failed", containers=[over]))
    status = with_pods(story)
    assert status.state == "failed"
    assert status.failure is not None
    assert status.failure.cause is not None
    assert (status.failure.cause.kind, status.failure.step, status.failure.at) == ("out_of_memory", 1, ago(70.0))
    assert next_step(status).startswith("raise device_map.segment.memory")


def test_a_killed_pod_that_never_wrote_a_status_is_found_too(story: Story, api: KubeApi) -> None:
    story.prepared()
    over = container("terminated", "StartError", 'exec: "python": executable file not found in $PATH', exitCode=128)
    api.add("pods", "grpo-x-9", **pod("grpo-x-9", "segment", phase="Failed", containers=[over]))
    status = with_pods(story)
    assert status.state == "failed"
    assert status.failure is not None
    assert (status.failure.task, status.failure.error) == ("segment", "start_error")


def test_a_pod_that_is_gone_is_lost_and_a_new_submission_resumes(story: Story, api: KubeApi) -> None:
    story.prepared().steps(1, 7, ended=ago(100.0)).task("segment", "running", step=1, updated=ago(100.0))
    status = with_pods(story)
    assert status.state == "lost"
    assert status.failure is not None
    assert status.failure.message == "its pod is gone and left no word: it was deleted or killed"
    assert next_step(status).startswith("ratchet submit grpo --config CONFIG.yaml")
    assert "nothing committed is lost" in next_step(status)
    goes_on = with_pods(story, pipeline_run=kubeflow("RUNNING"))
    assert next_step(goes_on).startswith("look again in a minute: Kubeflow may start a deleted pod again by itself")


def test_a_pod_that_is_not_listed_but_was_just_heard_of_is_no_loss(story: Story, api: KubeApi) -> None:
    # The wrong namespace, for one.
    story.prepared().steps(1, 7, ended=ago(100.0)).task("segment", "running", step=1, updated=ago(20.0))
    assert with_pods(story).state == "running"


def test_a_pod_that_argo_has_started_again_is_not_lost(story: Story, api: KubeApi) -> None:
    story.prepared().steps(1, 7, ended=ago(200.0)).task("segment", "running", step=1, updated=ago(150.0))
    making = container("waiting", "ContainerCreating")
    api.add("pods", "grpo-x-2", **pod("grpo-x-2", "segment", phase="Pending", containers=[making], created=ago(8.0)))
    status = with_pods(story)
    assert (status.state, status.failure, [one.doing for one in status.now]) == ("running", None, ["starting"])


def test_the_program_says_more_of_its_failure_than_its_pod(story: Story, api: KubeApi) -> None:
    story.prepared().task(
        "segment", "failed", step=1, exit_code=6, error="EngineError", message="vLLM is not installed"
    )
    over = container("terminated", "Error", exitCode=1)
    api.add("pods", "grpo-x-segment-1", **pod("grpo-x-segment-1", "segment", phase="Failed", containers=[over]))
    failure = with_pods(story).failure
    assert failure is not None
    assert (failure.error, failure.message, failure.exit_code) == ("EngineError", "vLLM is not installed", 6)


def test_pods_of_other_runs_and_drivers_say_nothing(story: Story, api: KubeApi) -> None:
    story.prepared().steps(1, 7, ended=ago(100.0)).task("segment", "running", step=1)
    running = [container("running")]
    api.add("pods", "grpo-x-segment-1", **pod("grpo-x-segment-1", "segment", containers=running))
    api.add("pods", "grpo-x-driver", **pod("grpo-x-driver", "segment", is_driver=True, phase="Succeeded"))
    failed = container("terminated", "OOMKilled", exitCode=137)
    api.add("pods", "other-1", **pod("other-1", "segment", run=OTHER_RUN, phase="Failed", containers=[failed]))
    status = with_pods(story)
    assert (status.state, [one.pod for one in status.now]) == ("running", ["grpo-x-segment-1"])


def test_a_driver_that_waits_holds_the_run_up_as_any_pod_does(story: Story, api: KubeApi) -> None:
    story.prepared()
    message = "0/1 nodes are available: 1 Insufficient cpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    waits = pod("grpo-x-driver", "segment", is_driver=True, phase="Pending", conditions=[condition])
    api.add("pods", "grpo-x-driver", **waits)
    assert with_pods(story).state == "waiting"


def test_a_finished_run_asks_nobody(story: Story) -> None:
    story.prepared().finish()
    assert look(story, open_cluster=never, pipeline_run=never).state == "finished"


def _workflow(**nodes: tuple[str, str, str]) -> dict[str, Any]:
    """A Workflow whose pods are given as id=(name, phase, message)."""
    told = {
        key: {
            "id": key,
            "type": "Pod",
            "name": name,
            "phase": phase,
            "message": message,
            "startedAt": kube_time(ago(60.0)),
        }
        for key, (name, phase, message) in nodes.items()
    }
    return {"metadata": {"labels": {"pipeline/runid": KFP_RUN}}, "status": {"phase": "Running", "nodes": told}}


def test_a_pod_that_no_quota_lets_in_is_known_from_the_workflow(story: Story, api: KubeApi) -> None:
    story.prepared()
    message = 'pods "x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: 4, limited: 4'
    api.add("workflows", "x", **_workflow(a=("x.root.for-loop-2.segment(0).executor(0)", "Pending", message)))
    status = with_pods(story)
    assert (status.state, [one.task for one in status.now]) == ("waiting", ["segment"])
    assert "pod not made yet, waiting, for 60 s" in page(status)
    assert "kubectl -n team edit resourcequota gpus" in next_step(status)


def test_what_ended_a_pod_that_is_gone_is_known_from_the_workflow(story: Story, api: KubeApi) -> None:
    story.prepared().steps(1, 7, ended=ago(200.0)).task("segment", "running", step=1, updated=ago(150.0))
    end = ("x.root.for-loop-2.segment(0).executor(0)", "Failed", "main: OOMKilled (exit code 1)")
    api.add("workflows", "x", **_workflow(a=end))
    status = with_pods(story)
    assert (status.state, status.failure and status.failure.error) == ("failed", "out_of_memory")
    # Whoever may not read workflows is told that the pod is gone.
    api.rules = {("list", "pods"), ("list", "events")}
    status = with_pods(story)
    assert (status.state, status.notes) == ("lost", ())


# -- with what cannot be asked -----------------------------------------------------------------------------------------


def test_sources_that_refuse_are_noted_and_the_rest_is_shown(story: Story) -> None:
    def refuse() -> Any:
        raise ClusterError("no Kubernetes API to ask")

    def unreachable(submission_id: str) -> Any:
        raise ConfigError("cannot reach the Kubeflow endpoint http://kubeflow")

    story.prepared().steps(1, 7, ended=ago(10.0)).task("segment", "running", step=1)
    status = look(story, open_cluster=refuse, pipeline_run=unreachable)
    assert status.state == "running"
    assert status.notes == (
        "pods were not asked: no Kubernetes API to ask",
        "Kubeflow was not asked: cannot reach the Kubeflow endpoint http://kubeflow",
    )


@pytest.mark.parametrize(
    ("told", "state", "step"),
    [
        (
            "FAILED",
            "failed",
            "no task says why: look at the tasks on Kubeflow's page (http://kubeflow/#/runs/details/x)",
        ),
        ("CANCELED", "terminated", "nothing committed is lost; to go on, ratchet submit"),
        ("SUCCEEDED", "stopped", "nobody works on it any more; to go on, ratchet submit"),
        ("PENDING", "running", "wait"),
    ],
)
def test_kubeflow_says_what_tasks_do_not(story: Story, told: str, state: str, step: str) -> None:
    status = look(story.prepared(), pipeline_run=kubeflow(told))
    assert status.state == state
    assert next_step(status).startswith(step)


def test_a_claim_whose_runner_died_before_it_could_submit_is_shown(story: Story) -> None:
    story.claim().run.store.put("owner/0002.json", b'{"epoch":2,"host":"gone","pid":9}')
    status = look(story)
    assert status.owner is not None
    assert (status.owner.epoch, status.owner.submission_id) == (2, "")
    assert page(status)


def test_a_run_without_any_claim_but_with_steps_is_still_shown(story: Story) -> None:
    status = look(story.prepare(ago(50.0)).steps(1, 2, ended=ago(20.0)))
    assert status.owner is None
    assert "2 committed" in page(status)


def test_a_run_whose_first_pod_cannot_start_is_found_through_kubeflow(story: Story, api: KubeApi) -> None:
    pulls = container("waiting", "ErrImagePull", "manifest for ratchet-base:1 not found: manifest unknown")
    api.add("pods", "p", **pod("p", "preflight", run=OTHER_RUN, phase="Pending", containers=[pulls]))
    sources: dict[str, Any] = {"pipeline_run": kubeflow("RUNNING"), "active_runs": lambda: [Told("RUNNING")]}
    status = with_pods(story, **sources)
    assert (status.state, status.owner, status.progress) == ("waiting", None, None)
    assert next_step(status).startswith("push the image (make images)")
    assert f"pipeline run {OTHER_RUN} (RUNNING), which has not claimed the run yet" in page(status)
    api.objects.clear()
    assert with_pods(story, **sources).state == "starting"
    with pytest.raises(NotCommittedError):
        look(story, active_runs=lambda: [])


def test_a_run_that_failed_and_was_submitted_again_shows_what_the_new_pods_wait_for(story: Story, api: KubeApi) -> None:
    story.prepared().task("segment", "failed", step=1, updated=ago(600.0), exit_code=70, error="ValueError")
    again = [Told("RUNNING"), Told("RUNNING", id=KFP_RUN)]
    starting = with_pods(story, pipeline_run=kubeflow("RUNNING"), active_runs=lambda: again)
    assert (starting.state, starting.failure) == ("starting", None)
    # The loop of the failed one still walks to its end: that is no new submission.
    failed = with_pods(story, pipeline_run=kubeflow("RUNNING"), active_runs=lambda: again[1:])
    assert failed.state == "failed"
    assert "ratchet submit grpo" in next_step(failed)
    assert next_step(failed).endswith("--force")


def test_a_stale_status_before_a_task_that_runs_is_no_loss(story: Story) -> None:
    story.prepared().steps(1, 3, ended=ago(2000.0))
    story.task("scores", "running", step=4, started=ago(1900.0), updated=ago(1800.0))
    story.task("advantage", "running", step=4, started=ago(1000.0), updated=ago(10.0))
    status = look(story)
    assert (status.state, status.failure, [one.task for one in status.now]) == ("running", None, ["advantage"])


def test_a_first_preflight_that_was_killed_is_a_failure_and_no_refusal(story: Story, api: KubeApi) -> None:
    story.task("preflight", "running", started=ago(60.0), updated=ago(40.0))
    over = container("terminated", "OOMKilled", exitCode=137)
    api.add("pods", "grpo-x-preflight-0", **pod("grpo-x-preflight-0", "preflight", phase="Failed", containers=[over]))
    status = with_pods(story)
    assert (status.state, status.owner) == ("failed", None)
    assert next_step(status).startswith("raise memory in pipelines/bodies.py")
