"""Ratchet on a live Kubeflow Pipelines server, by the command line alone; the most telling first.

`make e2e KF_PIPELINES_ENDPOINT=... RATCHET_IMAGE=... RATCHET_ROOT=s3://...` (README.md of this folder). Trap: what a
server does with a deleted pod, a terminated run or a lost iteration differs from one installation to the next; what
must be committed in the end does not.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Works
    from tests.e2e.live import Live

logger = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(5400),
    # Libraries that speak to servers warn about their own future, which is no finding of this suite.
    pytest.mark.filterwarnings("default"),
]


def test_pipelines_are_uploaded_once(live: "Live") -> None:
    for pipeline in ("grpo", "nightly"):
        first, again = live.answer("upload", pipeline), live.answer("upload", pipeline)
        assert (again["version_id"], again["is_new"]) == (first["version_id"], False)


def test_every_step_of_a_run_is_committed_in_order(works: "Works") -> None:
    from tests.e2e.chain import check_chain
    from tests.e2e.scenarios import MAIN_STEPS

    main = works.main
    assert main.wait_for_end() == "SUCCEEDED", main.report()
    check_chain(main.store, MAIN_STEPS)
    status = main.status()
    assert status["state"] == "finished", main.screen()
    assert (status["progress"]["steps"], status["progress"]["total"]) == (MAIN_STEPS, MAIN_STEPS)
    assert main.store.newest_epoch() == 1
    assert {(one.task, one.state) for one in main.statuses()} >= {("preflight", "succeeded"), ("segment", "succeeded")}


def test_its_results_can_be_read(works: "Works", tmp_path: Path) -> None:
    from ratchet.data import schemas
    from tests.e2e.chain import check_export
    from tests.e2e.scenarios import MAIN_STEPS
    from tests.runs import table_rows

    main = works.main.finished()
    live, run = main.live, main.store
    assert all(len(table_rows(run, "rollout", "rollouts", schemas.ROLLOUTS, step)) == 16 for step in (1, MAIN_STEPS))
    assert "val-core" in " ".join(run.require("evaluate", MAIN_STEPS).provenance.metrics)
    shown = live.command("show", main.place).stdout
    assert len([line for line in shown.splitlines() if line.strip()]) >= MAIN_STEPS
    # The server lists no artifacts; of its tasks it says how they ended.
    tasks = main.on_server().tasks
    logger.info("tasks as the server tells them: %s", ", ".join(f"{task.name}={task.state}" for task in tasks))
    assert not tasks or any(task.state == "SUCCEEDED" for task in tasks)
    exported = tmp_path / "export"
    live.command("export", main.place, "--step", str(MAIN_STEPS), "--to", str(exported))
    check_export(exported)


def test_submitting_it_again_does_nothing_and_says_so(works: "Works") -> None:
    main = works.main.finished()
    arguments = main.arguments()
    assert "is complete: nothing started" in main.live.command("submit", *arguments).stdout
    assert len(main.pipeline_runs) == 1
    # Started all the same, the pipeline has nothing to do.
    answer = main.submit("--force")
    assert answer["what"] == "started"
    assert main.wait_for_end() == "SUCCEEDED", main.report()
    (preflight,) = main.statuses()
    assert (preflight.task, preflight.state) == ("preflight", "succeeded")
    assert "complete" in preflight.note
    assert main.store.newest_epoch() == 1
    assert main.status()["state"] == "finished"


def test_the_same_training_here_gives_the_same_content(works: "Works") -> None:
    from tests.e2e.chain import check_same_content
    from tests.e2e.scenarios import MAIN_STEPS

    main = works.main.finished()
    if works.local is None:
        pytest.skip(f"the model {main.live.model} cannot be read by this machine")
    check_same_content(main.store, works.local, MAIN_STEPS, is_exact=works.is_exact_here)


def test_a_run_outlives_its_pod(works: "Works", live: "Live") -> None:
    from tests.e2e.chain import STEPS_OF_REFERENCE
    from tests.e2e.scenarios import begin

    cluster = live.need_cluster("deleting a pod")
    run = begin(live, "loss")
    segment = run.wait_for(
        "its segment has begun", lambda: next((one for one in run.statuses() if one.task == "segment"), None)
    )
    run.wait_for_step(1)
    before = run.attempts()
    cluster.delete_pod(segment.host)
    at_deletion = run.store.last_step()
    assert at_deletion < STEPS_OF_REFERENCE, f"the pod was through before it could be deleted: {segment}"
    state = run.wait_for_end()
    logger.info("deleted pod %s after step %d; the pipeline run: %s", segment.host, at_deletion, state)
    if state != "SUCCEEDED":
        # This installation does not start a deleted pod again, and the run is gone on with by the same run id.
        assert run.status()["state"] in ("lost", "terminated", "failed", "stopped"), run.screen()
        run.go_on()
    after = run.attempts()
    assert {place: after.get(place) for place in before} == before, "what was committed was made again"
    works.check(run, STEPS_OF_REFERENCE)


def test_four_submissions_at_once_leave_one_owner(works: "Works", live: "Live") -> None:
    from ratchet.grains.exits import ExitCode
    from tests.e2e.scenarios import MAIN_STEPS, describe

    run = describe(live, "four")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: run.submit("--force"), range(4)))
    started = [answer["pipeline_run_id"] for answer in answers]
    assert len(set(started)) == 4
    states = {pipeline_run: run.wait_for_end(pipeline_run) for pipeline_run in started}
    logger.info("four submissions: %s", states)
    store = run.store
    winner = str(store.submission(store.newest_epoch())["submission_id"])
    assert states[winner] == "SUCCEEDED", f"{states}\n{run.report()}"
    for loser in set(started) - {winner}:
        failed = {one.exit_code for one in run.statuses(loser) if one.state == "failed"}
        # One that finds everything done has nothing to do; one that was at the same stage may lose its commit.
        has_lost = failed & {ExitCode.OWNERSHIP_LOST, ExitCode.STORED}
        assert states[loser] == "SUCCEEDED" or has_lost, f"{loser}: {failed}\n{run.report()}"
    assert run.status()["state"] == "finished", run.screen()
    works.check(run, MAIN_STEPS)


def test_four_iterations_started_together_harm_nothing(works: "Works", live: "Live", tmp_path: Path) -> None:
    from tests.e2e.scenarios import describe
    from tests.e2e.together import ITERATIONS, compile_together

    run = describe(live, "together")
    package = compile_together(live.environment, tmp_path / "together.yaml")
    run.submit("--force", pipeline=str(package))
    state = run.wait_for_end()
    done = run.store.last_step()
    segments = {one.step: (one.state, one.error) for one in run.statuses() if one.task == "segment"}
    logger.info("iterations started together: %s, %d committed, %s", state, done, segments)
    assert set(segments) == set(range(1, ITERATIONS + 1)), run.report()
    # Whichever came through its fence is committed in order; the others have done nothing.
    assert all(run.store.manifest("policy_update", step) for step in range(done + 1))
    assert all(segments[step][0] == "succeeded" for step in range(1, done + 1)), segments
    assert all(segments[step][0] == "failed" for step in range(done + 1, ITERATIONS + 1)), segments
    run.go_on()
    works.check(run, ITERATIONS)


def test_a_terminated_run_goes_on(works: "Works", live: "Live") -> None:
    from tests.e2e.live import END_LIMIT
    from tests.e2e.scenarios import begin

    run = begin(live, "ended")
    run.wait_for_step(1)
    said = live.command("terminate", run.place).stdout
    assert run.pipeline_runs[-1] in said
    state = run.wait_for_end(limit=END_LIMIT)
    assert state in ("FAILED", "CANCELED"), f"{state}\n{run.report()}"
    before, steps = run.attempts(), run.store.last_step()
    assert 1 <= steps < run.values["total_steps"]
    assert run.status()["state"] in ("terminated", "failed", "stopped", "lost"), run.screen()
    assert "no pipeline run works on it" in live.command("terminate", run.place).stdout
    run.go_on()
    after = run.attempts()
    assert {place: after.get(place) for place in before} == before, "what was committed was made again"
    works.check(run, run.values["total_steps"])


def test_a_schedule_brings_a_run_to_its_end(works: "Works", live: "Live") -> None:
    from tests.e2e.scenarios import MAIN_STEPS, describe
    from tests.e2e.schedules import runs_of, stop

    run = describe(live, "kept")
    options = ["--keep-alive", "--every", "1", "--name", run.run_id]
    made = live.answer("schedule", *run.arguments(), *options)
    run.is_scheduled = True
    assert made["what"] == "created"
    identity = made["schedule"]["id"]
    try:
        assert live.answer("schedule", *run.arguments(), *options)["what"] == "unchanged"
        first = live.wait(
            "the schedule has started a run (by the server's scheduled workflow controller)",
            lambda: next(iter(runs_of(live, identity)), None),
            limit=300,
            last_seen=lambda: live.command("schedules", may_fail=True).stdout,
        )
        run.pipeline_runs.append(first.id)
        assert run.wait_for_end() == "SUCCEEDED", run.report()
        works.check(run, MAIN_STEPS)
        later = live.wait(
            "the schedule has started another run",
            lambda: next((one for one in runs_of(live, identity) if one.id != first.id), None),
            limit=300,
            last_seen=lambda: live.command("schedules", may_fail=True).stdout,
        )
        run.pipeline_runs.append(later.id)
        assert run.wait_for_end() == "SUCCEEDED", run.report()
        # Of a finished run nothing but preflight is done, and it says so.
        assert [(one.task, one.state) for one in run.statuses()] == [("preflight", "succeeded")]
        assert run.store.newest_epoch() == 1
    finally:
        stop(live, run)
    assert not [line for line in live.command("schedules").stdout.splitlines() if line.startswith(f"{run.run_id} ")]


def test_nightly_promotes_and_then_finds_nothing_new(works: "Works", live: "Live") -> None:
    from ratchet.store.champions import champion, decisions
    from tests.e2e.scenarios import begin

    first = begin(live, "nightly")
    name = first.values["champion"]
    assert first.wait_for_end() == "SUCCEEDED", first.report()
    (decision,) = decisions(live.root, name)
    assert (decision.verdict, decision.run_id, decision.step) == ("promoted", first.run_id, 1), decision
    assert first.status()["state"] == "finished", first.screen()
    again = begin(live, "nightly-again")
    assert again.wait_for_end() == "SUCCEEDED", again.report()
    assert len(decisions(live.root, name)) == 1
    assert champion(live.root, name) == decision
    status = again.status()
    assert status["state"] == "skipped", again.screen()
    assert f"decision 1 on {name}" in status["said"]
    assert again.store.newest_epoch() == 0
    assert "promoted" in live.command("champions", name, "--root", live.root).stdout


def test_nightly_is_in_mlflow(works: "Works", live: "Live") -> None:
    from tests.e2e.scenarios import begin
    from tests.e2e.tracking import check_tracked, tracking_uri

    uri = tracking_uri(live)
    first = begin(live, "nightly")
    assert first.wait_for_end() == "SUCCEEDED", first.report()
    check_tracked(uri, first)


def test_what_cannot_work_is_refused_by_preflight(works: "Works", live: "Live") -> None:
    from tests.e2e.scenarios import begin

    run = begin(live, "refused")
    assert run.wait_for_end() == "FAILED", run.report()
    status = run.status()
    assert status["state"] == "refused", run.screen()
    assert "no-such-model" in status["failure"]["message"]
    assert "no-such-model" in run.screen()
    assert run.store.newest_epoch() == 0


def test_a_pod_that_waits_for_what_nobody_has_is_explained(works: "Works", live: "Live") -> None:
    from tests.e2e.live import END_LIMIT
    from tests.e2e.scenarios import LABEL_OF_NO_NODE, begin

    live.need_cluster("saying why a pod waits")
    run = begin(live, "waits")

    def stands_still() -> str | None:
        state = run.status()["state"]
        return state if state in ("waiting", "refused", "failed", "lost") else None

    state = live.wait("the run waits, or was refused", stands_still, limit=600, last_seen=run.report, every=10)
    screen = run.screen()
    # An account that may list nodes lets preflight refuse it; another one lets the pod wait.
    assert state in ("waiting", "refused"), screen
    if state == "refused":
        assert "nvidia.com/gpu" in screen or LABEL_OF_NO_NODE in screen, screen
        return
    causes = [one["cause"] for one in run.status()["now"] if one["doing"] == "waiting"]
    assert {cause["kind"] for cause in causes} & {"accelerator", "node_selector"}, f"{causes}\n{screen}"
    assert "nodes are available" in screen, screen
    assert "device_map.segment" in screen, screen
    live.command("terminate", run.place)
    assert run.wait_for_end(limit=END_LIMIT) in ("FAILED", "CANCELED")


def test_the_log_of_a_task_is_printed(works: "Works", live: "Live") -> None:
    live.need_cluster("reading a log")
    main = works.main.finished()
    done = live.command(
        *("logs", main.place, "--task", "segment", "--step", "1", "--submission", main.pipeline_runs[0]),
        *main.where(),
        may_fail=True,
    )
    # A server may have removed the pod by now; the verb then says what the task said last.
    assert done.returncode in (0, 1), done.stderr
    assert ("step-000001" in done.stdout) if done.returncode == 0 else done.stderr.strip(), done
