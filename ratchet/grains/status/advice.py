"""What to do next about a run, in one sentence with the command."""

import shlex

from ratchet.grains.exits import ExitCode
from ratchet.grains.status.records import Activity, Failure, RunStatus
from ratchet.store import layout

_KEEP_ALIVE = "a schedule with --keep-alive does that by itself"
_ACTIVE = ("PENDING", "RUNNING", "CANCELING", "PAUSED")
_NEW_RUN = (ExitCode.NUMERICS,)
"""Exits after which the same run id fails in the same way, since what has to change is semantic."""


def next_step(status: RunStatus) -> str:
    """Return what to do next; "nothing" and "wait" are answers too."""
    failure, again = status.failure, submit_command(status)
    match status.state:
        case "finished":
            exported = status.progress.export if status.progress is not None else ""
            return f"nothing: the run is finished; its export is at {exported}"
        case "skipped":
            return f"nothing: {status.said or 'this submission had no work'}"
        case "starting":
            return (
                f"wait: the first task begins within a minute; ratchet status {_quoted(status.run)} --watch follows it"
            )
        case "running":
            return f"wait; ratchet status {_quoted(status.run)} --watch follows it"
        case "waiting":
            waiting = _first_waiting(status)
            return waiting.cause.advice if waiting is not None and waiting.cause is not None else "wait"
        case "refused" | "failed" if failure is not None:
            return _after_failure(status, failure, again)
        case "failed":
            page = (
                f" ({status.pipeline_run.url})" if status.pipeline_run is not None and status.pipeline_run.url else ""
            )
            return f"no task says why: look at the tasks on Kubeflow's page{page}; then {again}"
        case "lost":
            return _after_loss(status, failure, again)
        case "terminated":
            return f"nothing committed is lost; to go on, {again}"
        case "stopped" | "unknown" if status.owner is not None and status.owner.has_damaged_submission:
            run = _quoted(status.run)
            return (
                f"restore {layout.submission(status.owner.epoch)} from a copy, and look again; ratchet verify {run} "
                "names all that is damaged"
            )
        case "stopped":
            return f"nobody works on it any more; to go on, {again}"
        case _:
            return _unknown(status, again)


def submit_command(status: RunStatus) -> str:
    """Return how the run is submitted again, in the way in which it was submitted last."""
    root, _, run_id = status.run.rpartition("/")
    place = f"--root {_quoted(root or '/')} --run-id {_quoted(run_id)}"
    if status.owner is not None and not status.owner.submission_id:
        return f"ratchet train --config CONFIG.yaml {place}"
    # A pipeline run that still walks through its loop would stand in the way.
    is_active = status.pipeline_run is not None and status.pipeline_run.state in _ACTIVE
    return f"ratchet submit {_pipeline(status)} --config CONFIG.yaml {place}{' --force' if is_active else ''}"


def _pipeline(status: RunStatus) -> str:
    """Return the pipeline that a run of this kind is submitted to."""
    setup = status.setup
    if not setup.algorithm:
        return "PIPELINE"
    if status.promotes_as and "/checkpoint_export/" in setup.model:
        return "nightly"
    name = "ppo" if setup.algorithm == "gae" and setup.grain != "step" else "grpo"
    return name + {"stage": "_stages", "step": "_steps"}.get(setup.grain, "")


def _after_failure(status: RunStatus, failure: Failure, again: str) -> str:
    if failure.cause is not None:
        log = f"; ratchet logs {_quoted(status.run)} --task {failure.task}" if failure.cause.kind == "exit" else ""
        return (
            f"{failure.advice}{log}: {again}"
            if failure.cause.kind != "exit"
            else f"{failure.advice}{log}; then {again}"
        )
    if failure.exit_code in _NEW_RUN:
        return failure.advice
    return f"{failure.advice or 'correct what the message names'}: {again}"


def _after_loss(status: RunStatus, failure: Failure | None, again: str) -> str:
    goes_on = status.pipeline_run is not None and status.pipeline_run.state == "RUNNING"
    if goes_on:
        return f"look again in a minute: Kubeflow may start a deleted pod again by itself; if not, {again}"
    if failure is not None and not status.namespace and failure.cause is not None and failure.pod:
        return f"is the pod there (kubectl get pod {failure.pod})? if not, {again} ({_KEEP_ALIVE}); no commit is lost"
    return f"{again} ({_KEEP_ALIVE}); nothing committed is lost"


def _unknown(status: RunStatus, again: str) -> str:
    owner = status.owner
    if owner is not None and not owner.submission_id:
        return f"does process {owner.pid} on {owner.host} live? if not, {again}"
    return f"look at the pipeline run in Kubeflow; if it is over, {again}"


def _first_waiting(status: RunStatus) -> Activity | None:
    return next((one for one in status.now if one.doing == "waiting"), None)


def _quoted(text: str) -> str:
    return shlex.quote(text)
