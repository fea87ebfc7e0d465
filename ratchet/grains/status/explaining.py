"""What tasks, pods and Kubeflow say about a submission, weighed against each other and against the chain."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ratchet.errors import RatchetError
from ratchet.grains.status.records import FINAL, Activity, Failure, PipelineRun, RunStatus, State
from ratchet.grains.status.tasks import (
    SILENT,
    PodView,
    activities,
    ask_workflow,
    first_failure,
    is_done,
    read_statuses,
    view_pods,
)
from ratchet.store.run import Run
from ratchet.store.status import TaskStatus

logger = logging.getLogger(__name__)

_BETWEEN_TASKS = 180.0
"""Seconds after which a pipeline whose last task ended well, and that starts no other, counts as stopped."""
_OVER = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Who can be asked beside object storage; what they cannot say is noted."""

    open_cluster: Callable[[], Any] | None = None
    """Returns a `ratchet.cluster.kube.Cluster`."""
    pipeline_run: Callable[[str], Any] | None = None
    """Returns what Kubeflow knows of a submission id: an object with `state` and `url`."""
    active_runs: Callable[[], Sequence[Any]] | None = None
    """Returns the pipeline runs that work on the run now, newest first: objects with an `id`."""


def explained(
    run: Run | None, status: RunStatus, config: Mapping[str, Any], submission_id: str, sources: Sources
) -> RunStatus:
    """Add what tasks, pods and Kubeflow say about a submission; `run` is None where its storage cannot be read."""
    statuses, damaged = read_statuses(run.store, submission_id) if run is not None else ([], [])
    notes = [f"{status.run}/{key} is damaged" for key in damaged]
    pods: list[PodView] | None = None
    cluster: Any = None
    if sources.open_cluster is not None:
        try:
            cluster = sources.open_cluster()
            pods = view_pods(cluster, submission_id)
            status = replace(status, namespace=cluster.namespace)
        except RatchetError as error:
            notes.append(f"pods were not asked: {error}")
    if sources.pipeline_run is not None:
        try:
            found = sources.pipeline_run(submission_id)
            seen = PipelineRun(id=submission_id, state=str(found.state), url=str(getattr(found, "url", "") or ""))
            status = replace(status, pipeline_run=seen)
        except RatchetError as error:
            notes.append(f"Kubeflow was not asked: {error}")
    progress = status.progress
    running = [
        one
        for one in statuses
        if one.state == "running" and not (progress is not None and is_done(one, progress, config))
    ]
    last_commit = progress.last_commit if progress is not None else None
    under_way = activities(running, pods, now=status.at, last_commit=last_commit)
    over = [one for one in under_way if one.doing in ("lost", "silent") or (one.doing == "ended" and one.cause)]
    alive = [one for one in under_way if one.doing in ("running", "starting", "waiting")]
    # What Argo has started again is not over: a pod of the same task that has no step yet, or the same one.
    over = [one for one in over if not any(_is_again(one, other) or _came_after(one, other) for other in alive)]
    failed = [one for one in statuses if one.state == "failed"]
    if pods is not None and not alive and (over or not failed):
        waiting, ends = ask_workflow(cluster, submission_id)
        alive += waiting
        over = [replace(one, cause=one.cause or ends.get(one.task)) for one in over]
    failure = first_failure(failed, over, pods)
    told = [one for one in statuses if one.state == "succeeded" and one.note]
    ended = [one for one in statuses if one.state == "terminated"]
    if failure is None and ended and not alive:
        failure = first_failure(ended[-1:], (), ())
    return replace(
        status,
        state=_state(status, statuses, alive, failure, pods),
        now=tuple(alive),
        failure=failure,
        said=told[-1].note if told else "",
        notes=(*status.notes, *notes),
    )


def _is_again(one: Activity, other: Activity) -> bool:
    return one.task == other.task and other.step in (None, one.step)


def _came_after(one: Activity, other: Activity) -> bool:
    """Whether the other's work began after the last word of the one, of which no more is known: it followed from it."""
    return one.cause is None and other.doing == "running" and (other.since or 0.0) > (one.heard or 0.0)


def _state(
    status: RunStatus,
    statuses: Sequence[TaskStatus],
    alive: Sequence[Activity],
    failure: Failure | None,
    pods: Sequence[PodView] | None,
) -> State:
    if failure is not None:
        if any(one.host == failure.pod and one.state == "terminated" for one in statuses):
            return "terminated"
        return "lost" if failure.is_accident else "failed"
    if any(one.doing == "waiting" for one in alive):
        return "waiting"
    if any(one.doing == "running" for one in alive):
        return "running"
    known = status.pipeline_run.state if status.pipeline_run is not None else ""
    if known == "CANCELED" or (known == "CANCELING" and not statuses):
        return "terminated"
    if known == "FAILED":
        return "failed"
    last = max((one.updated for one in statuses), default=None)
    has_pods = any(pod.is_alive for pod in pods or ())
    if alive or has_pods or known in ("RUNNING", "PENDING", "PAUSED"):
        return "running" if statuses else "starting"
    if last is None:
        return "unknown"
    return "running" if status.at - last < _BETWEEN_TASKS and known not in _OVER else "stopped"


def judged(status: RunStatus, later: TaskStatus | None) -> RunStatus:
    """Let the chain have the last word, and add what became of a submission that did not claim the run."""
    state = status.state
    if status.owner is None:
        # Its preflight is all there is.
        if later is not None and later.state == "succeeded":
            return replace(status, state="skipped" if later.note else "stopped")
        if state == "failed" and status.failure is not None and status.failure.cause is None:
            return replace(status, state="refused")
        named: dict[State, State] = {"running": "starting", "unknown": "stopped"}
        return replace(status, state=named.get(state, state))
    if later is not None:
        status = replace(status, refused=first_failure([later], (), ())) if later.state == "failed" else status
        status = replace(status, said=later.note or status.said)
    if is_finished(status):
        return replace(status, state="finished", failure=None)
    if state == "unknown":
        state = _state_of_a_process(status)
    if later is not None and later.state == "running" and status.at - later.updated < SILENT and state in FINAL:
        # Somebody has submitted it again, and the claim comes next.
        return replace(status, state="starting", now=tuple(activities([later], None, now=status.at, last_commit=None)))
    return replace(status, state=state)


def is_finished(status: RunStatus) -> bool:
    """Whether everything that the newest submission asks for is committed, a decision on its promotion included."""
    progress = status.progress
    if progress is None or not progress.is_trained or not progress.export:
        return False
    is_evaluated = progress.is_evaluated or not progress.has_held_out
    return is_evaluated and (not status.promotes_as or status.promotion is not None)


def _state_of_a_process(status: RunStatus) -> State:
    """The state of a run outside a pipeline, of which there is no more than its claim and its commits."""
    owner, progress = status.owner, status.progress
    if owner is not None and owner.is_alive is not None:
        return "running" if owner.is_alive else "stopped"
    last = progress.last_commit if progress is not None else None
    if progress is None or last is None:
        return "unknown"
    patience = max(SILENT, 5 * (progress.seconds_per_step or 0.0))
    return "running" if status.at - last < patience else "unknown"
