"""`ratchet status` and `ratchet logs` as an operator types them, against a Kubernetes API in this process."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet import grains
from ratchet.cli import status as verbs
from ratchet.errors import ClusterError, StoreError, StoreUnavailableError
from ratchet.grains.status import RunStatus
from tests.command_line import Ratchet, in_this_process
from tests.conftest import use_s3_server
from tests.kfp_endpoint import kfp_server
from tests.kube_api import KubeApi, kube_api
from tests.ratchet.grains.run_stories import KFP_RUN, OTHER_RUN, Story, container, pod
from tests.runs import Stopped, stop_at, tiny_config, train_tiny, write_problems


@pytest.fixture
def ratchet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Ratchet:
    """Run the command line in this process, away from any cluster that this machine may know."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    for name in (
        "KF_PIPELINES_ENDPOINT",
        "KF_PIPELINES_UI_ENDPOINT",
        "KF_PIPELINES_NAMESPACE",
        "KUBERNETES_SERVICE_HOST",
    ):
        monkeypatch.delenv(name, raising=False)
    return in_this_process(monkeypatch, capsys)


@pytest.fixture
def story(tmp_path: Path) -> Story:
    """A run whose segment was heard of a moment ago."""
    return Story(str(tmp_path / "runs"))


@pytest.fixture
def api(ratchet: Ratchet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    with kube_api() as found:
        monkeypatch.setenv("KUBECONFIG", str(found.write_kubeconfig(tmp_path / "kubeconfig")))
        yield found


def place(story: Story) -> str:
    return f"{story.root}/{story.run_id}"


# -- status ------------------------------------------------------------------------------------------------------------


def test_a_run_that_nobody_knows_is_an_error(ratchet: Ratchet, tmp_path: Path) -> None:
    finished = ratchet("status", tmp_path / "absent")
    assert (finished.code, finished.out) == (2, "")
    assert finished.err.startswith("ratchet: nothing is known of a run at ")


def test_real_runs_are_shown_while_they_run_and_when_they_are_finished(
    ratchet: Ratchet, tmp_path: Path, tiny_model: Path
) -> None:
    problems = write_problems(tmp_path / "problems.jsonl")
    values = {"data.val_files": str(problems), "data.val_max_samples": 2, "trainer.val_before_train": False}
    config = tiny_config(tiny_model, problems, **values, **{"trainer.total_training_steps": 2})
    with pytest.raises(Stopped):
        train_tiny(tmp_path, "first", config, stop_at("step-000002/advantage", is_committed=False))
    shown = ratchet("status", tmp_path / "first")
    assert shown.code == 0
    # This very process claimed it, and lives.
    assert shown.out.split("\n")[0].endswith("RUNNING")
    assert "steps 1 of 2 [####################--------------------] 50%" in shown.words
    assert "which is alive; step 2: rollout, reward committed" in shown.words
    train_tiny(tmp_path, "first", config)
    shown = ratchet("status", tmp_path / "first", "--watch")
    assert shown.out.split("\n")[0].endswith("FINISHED")
    assert f"its export is at {tmp_path}/first/step-000002/checkpoint_export/" in shown.words
    assert "claim 2; 1 earlier one has lost the run" in shown.words
    assert "accuracy 0" in shown.words


def test_without_a_cluster_the_store_alone_is_shown_and_the_rest_noted(ratchet: Ratchet, story: Story) -> None:
    now = time.time()
    story.claim().prepare(now - 900.0).steps(1, 7, ended=now - 20.0)
    story.task("segment", "running", step=1, started=now - 500.0, updated=now - 10.0)
    shown = ratchet("status", place(story))
    assert shown.code == 0
    assert "steps 7 of 100" in shown.words
    assert "pods were not asked: no Kubernetes API to ask: this is no pod with a service account" in shown.words
    assert "Kubeflow was not asked: no endpoint is configured (--endpoint, KF_PIPELINES_ENDPOINT)" in shown.words


def test_status_as_json_has_everything_and_what_to_do_next(ratchet: Ratchet, story: Story) -> None:
    now = time.time()
    story.claim().prepare(now - 900.0).task("segment", "failed", step=1, updated=now, exit_code=75, error="E",
                                            message="m", advice="a")  # fmt: skip
    found = json.loads(ratchet("status", place(story), "--json").out)
    assert (found["run"], found["state"], found["progress"]["total"]) == (place(story), "failed", 100)
    assert (found["failure"]["exit_code"], found["failure"]["meaning"]) == (75, "object storage did not answer")
    assert found["next"].startswith("a: ratchet submit grpo --config CONFIG.yaml")


def test_pods_are_looked_for_where_the_kubeconfig_or_the_option_says(
    ratchet: Ratchet, api: KubeApi, story: Story
) -> None:
    story.claim()
    waits = container("waiting", "CreateContainerConfigError", 'secret "nope" not found')
    api.add("pods", "p", **pod("p", "preflight", phase="Pending", containers=[waits]))
    shown = ratchet("status", place(story))
    assert shown.out.split("\n")[0].endswith("WAITING")
    assert "kubectl -n team create secret generic nope" in shown.words
    assert "WAITING" not in ratchet("status", place(story), "--namespace", "other").out


def test_kubeflow_is_asked_about_the_newest_submission(ratchet: Ratchet, story: Story) -> None:
    with kfp_server() as server:
        endpoint = ("--endpoint", server.url)
        given = {"parameters": {"root": story.root, "run_id": story.run_id}}
        pipeline_run = server.add_run(display_name="a schedule's", state="PENDING", runtime_config=given)
        # No pod has said a word yet.
        first = ratchet("status", place(story), *endpoint)
        assert first.out.split("\n")[0].endswith("STARTING")
        assert f"pipeline run {pipeline_run} (" in first.words
        now = time.time()
        story.claim(OTHER_RUN).claim(pipeline_run).task(
            "plan", "succeeded", submission_id=pipeline_run, updated=now - 600
        )
        server.set_state(pipeline_run, "RUNNING")
        running = ratchet("status", place(story), *endpoint)
        assert running.out.split("\n")[0].endswith("RUNNING")
        assert f"pipeline run {pipeline_run} (RUNNING), claim 2" in running.words
        server.set_state(pipeline_run, "CANCELED")
        assert ratchet("status", place(story), *endpoint).out.split("\n")[0].endswith("TERMINATED")
    gone = ratchet("status", place(story), *endpoint)
    assert gone.code == 0
    assert "Kubeflow was not asked: cannot reach the Kubeflow endpoint" in gone.words


def test_watching_ends_when_the_run_stands_still(
    ratchet: Ratchet, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(seconds: float) -> None:
        waited.append(seconds)
        story.task("segment", "failed", step=1, started=now, updated=now, exit_code=2, error="E", message="m")

    waited: list[float] = []
    now = time.time()
    story.claim().prepare(now - 60.0).task("segment", "running", step=1, started=now, updated=now)
    monkeypatch.setattr(verbs.time, "sleep", wait)
    shown = ratchet("status", place(story), "--watch", "--every", "3")
    assert waited == [3.0]
    heads = [line.split()[1] for line in shown.out.split("\n") if line.startswith(place(story))]
    assert heads == ["RUNNING", "FAILED"]


def test_watching_goes_on_after_a_look_that_failed(
    ratchet: Ratchet, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(*arguments: object, **more: object) -> RunStatus:
        found = looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return collect(*arguments, **more)  # type: ignore[arg-type]

    collect = grains.status.collect
    monkeypatch.setattr(grains.status, "collect", look)
    monkeypatch.setattr(verbs.time, "sleep", lambda seconds: None)
    story.claim().finish()
    looks: list[Exception | None] = [StoreUnavailableError("503"), ClusterError("no route"), None]
    shown = ratchet("status", place(story), "--watch")
    assert (shown.code, shown.out.split("\n")[0].endswith("FINISHED")) == (0, True)
    assert "this look failed, and the next one is in 10 s: 503" in shown.err
    # What cannot be read at all will not be readable by waiting; nor is there a second look unless one asks for it.
    looks = [StoreError("no such bucket")]
    assert ratchet("status", place(story), "--watch").code == 2
    looks = [StoreUnavailableError("503")]
    assert ratchet("status", place(story)).code == 2


@pytest.fixture
def no_storage(ratchet: Ratchet, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run in a bucket that pods can reach and this machine cannot."""
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    use_s3_server(keys, monkeypatch)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    return "s3://bucket/runs/first"


def test_without_storage_pods_and_kubeflow_are_asked_all_the_same(
    ratchet: Ratchet, api: KubeApi, no_storage: str
) -> None:
    with kfp_server() as server:
        endpoint = ("--endpoint", server.url)
        given = {"parameters": {"root": "s3://bucket/runs", "run_id": "first"}}
        nobody = ratchet("status", no_storage, *endpoint)
        assert (nobody.code, nobody.out) == (2, "")
        pipeline_run = server.add_run(display_name="x", state="RUNNING", runtime_config=given)
        shown = ratchet("status", no_storage, *endpoint)
        assert shown.out.split("\n")[0].endswith("RUNNING")
        assert f"pipeline run {pipeline_run} (RUNNING)" in shown.words
        assert "object storage cannot be read from here, so what is committed is not known" in shown.words
        waits = container("waiting", "CreateContainerConfigError", 'secret "nope" not found')
        api.add("pods", "p", **pod("p", "segment", run=pipeline_run, phase="Pending", containers=[waits]))
        shown = ratchet("status", no_storage, *endpoint)
        assert shown.out.split("\n")[0].endswith("WAITING")
        assert "kubectl -n team create secret generic nope" in shown.words


def test_logs_are_printed_without_storage_too(ratchet: Ratchet, api: KubeApi, no_storage: str) -> None:
    with kfp_server() as server:
        given = {"parameters": {"root": "s3://bucket/runs", "run_id": "first"}}
        pipeline_run = server.add_run(display_name="x", state="RUNNING", runtime_config=given)
        api.add("pods", "q", **pod("q", "segment", run=pipeline_run))
        api.logs["q", "main"] = ["2026-01-01T00:00:00Z working"]
        shown = ratchet("logs", no_storage, "--endpoint", server.url)
        assert (shown.code, shown.out) == (0, "working\n")
        assert "what tasks said of themselves cannot be read from here" in shown.err
    # Whoever names the pipeline run needs no Kubeflow.
    assert ratchet("logs", no_storage, "--submission", pipeline_run).out == "working\n"
    refused = ratchet("logs", no_storage)
    assert refused.code == 2
    assert "nor was Kubeflow asked: " in refused.err


def test_a_terminal_gets_colours_and_a_file_none(
    ratchet: Ratchet, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    story.claim().finish()
    plain = ratchet("status", place(story)).out
    assert "\x1b" not in plain
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert "\x1b[32m\x1b[1mFINISHED\x1b[0m" in ratchet("status", place(story)).out


# -- logs --------------------------------------------------------------------------------------------------------------


def test_the_log_of_what_failed_is_printed(ratchet: Ratchet, api: KubeApi, story: Story) -> None:
    story.prepared().task("segment", "failed", step=1, exit_code=6, error="EngineError", message="no")
    name = "grpo-x-segment-1"
    over = container("terminated", "Error", exitCode=1)
    api.add("pods", name, **pod(name, "segment", phase="Failed", containers=[over]))
    api.logs[name, "main"] = [f"2026-01-01T00:00:0{second}Z line {second}" for second in range(5)]
    assert ratchet("logs", place(story)).out == "line 0\nline 1\nline 2\nline 3\nline 4\n"
    assert ratchet("logs", place(story), "--task", "segment", "--step", "7", "--tail", "2").out == "line 3\nline 4\n"
    assert ratchet("logs", place(story), "--submission", KFP_RUN, "--tail", "1").out == "line 4\n"
    api.is_finished.add(name)
    assert ratchet("logs", place(story), "--follow").out.endswith("line 4\n")


def test_without_a_cluster_the_tasks_last_words_are_printed(
    ratchet: Ratchet, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    story.prepared().task("segment", "failed", step=1, exit_code=6, error="EngineError", message="no vLLM", advice="do")
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", "http://kubeflow/")
    shown = ratchet("logs", place(story))
    assert (shown.code, shown.out) == (1, "")
    assert "pods cannot be asked: no Kubernetes API to ask" in shown.err
    assert "EngineError: no vLLM\ndo\nits pod is grpo-x-segment-1: kubectl logs grpo-x-segment-1 -c main\n" in shown.err
    assert f"http://kubeflow/#/runs/details/{KFP_RUN}, task segment, Logs" in shown.err


def test_a_pod_that_waits_has_no_log_but_a_reason(ratchet: Ratchet, api: KubeApi, story: Story) -> None:
    story.claim()
    waits = container("waiting", "CreateContainerConfigError", 'secret "nope" not found')
    api.add("pods", "p", **pod("p", "preflight", phase="Pending", containers=[waits]))
    shown = ratchet("logs", place(story))
    assert shown.code == 1
    assert 'pod p of preflight has no log yet: CreateContainerConfigError: secret "nope" not found' in shown.err


def test_the_log_of_a_first_preflight_is_found_although_it_claimed_nothing(
    ratchet: Ratchet, api: KubeApi, story: Story
) -> None:
    story.task("preflight", "failed", exit_code=2, error="ConfigError", message="m")
    api.add("pods", "grpo-x-preflight-0", **pod("grpo-x-preflight-0", "preflight", phase="Failed"))
    api.logs["grpo-x-preflight-0", "main"] = ["2026-01-01T00:00:00Z refused"]
    assert ratchet("logs", place(story)).out == "refused\n"


def test_what_has_no_log_on_a_cluster_is_refused(ratchet: Ratchet, api: KubeApi, story: Story) -> None:
    finished = ratchet("logs", place(story))
    assert (finished.code, finished.err) == (2, f"ratchet: nothing is known of a run at {place(story)}\n")
    story.claim(None, host="here", pid=1)
    assert "was submitted outside a pipeline last" in ratchet("logs", place(story)).err
    story.prepared()
    assert (
        "has no log of rollout; its tasks are plan, preflight" in ratchet("logs", place(story), "--task", "rollout").err
    )
