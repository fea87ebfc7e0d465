"""What the tasks of a submission are at: their own status files, set against their pods and against what is committed.

Traps: a status is the last word of a pod, and a killed pod says none, so that "running" may be long over; and within a
loop every task after the first failed one fails too, at its fence.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ratchet.cluster.waiting import HARMLESS, Cause, component, why, why_of
from ratchet.cluster.workflows import nodes_of
from ratchet.errors import ClusterError
from ratchet.grains.exits import ExitCode
from ratchet.grains.status.chain import Progress, in_parallel, value_at
from ratchet.grains.status.records import Activity, Doing, Failure
from ratchet.store.objects import ObjectStore
from ratchet.store.status import DamagedStatusError, TaskStatus, read_status

logger = logging.getLogger(__name__)

SILENT = 300.0
"""Seconds without a heartbeat (one comes every 30) after which a task counts as lost."""
SETTLED = 90.0
"""Seconds after which a pod that is not there is gone, and no status that says otherwise is on its way."""

MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.BAD_INPUT: "config or data are wrong",
    ExitCode.NOT_COMMITTED: "an earlier task failed",
    ExitCode.OWNERSHIP_LOST: "another submission goes on with the run",
    ExitCode.NUMERICS: "a number is not finite",
    ExitCode.ENGINE: "a model cannot be loaded, sampled or trained",
    ExitCode.STORED: "object storage refuses, or holds something damaged",
    ExitCode.BUDGET: "the run's storage budget is used up",
    ExitCode.INTERNAL: "an error that nobody foresaw",
    ExitCode.STORAGE: "object storage did not answer",
    ExitCode.TERMINATED: "somebody ended the pod",
}
_CONSEQUENCES = (ExitCode.NOT_COMMITTED, ExitCode.OWNERSHIP_LOST)


@dataclass(frozen=True, kw_only=True, slots=True)
class PodView:
    """One pod of the submission with what its events say; the pods of one answer of the cluster."""

    name: str
    task: str
    is_driver: bool
    phase: str
    created: float | None
    ended: float | None
    cause: Cause | None

    @property
    def is_alive(self) -> bool:
        """Whether it may still do something."""
        return self.phase in ("Pending", "Running") and not (self.cause is not None and self.cause.has_ended)


def read_statuses(store: ObjectStore, submission_id: str) -> tuple[list[TaskStatus], list[str]]:
    """Return the statuses of a submission, the one that began first at the front, and the keys of damaged ones."""
    keys = [item.key for item in store.list_objects(f"status/{submission_id}")]
    return _parsed(store, keys)


def read_preflights(store: ObjectStore, submission_ids: Sequence[str]) -> list[TaskStatus]:
    """Return what the preflight tasks of these submissions last said, the one that began first at the front."""
    return _parsed(store, [f"status/{submission_id}/preflight.json" for submission_id in submission_ids])[0]


def _parsed(store: ObjectStore, keys: Sequence[str]) -> tuple[list[TaskStatus], list[str]]:
    def read(key: str) -> TaskStatus | None:
        try:
            return read_status(store, key)
        except FileNotFoundError:
            return None
        except DamagedStatusError as error:
            # Whoever asks how a run is must not be refused for a file that decides nothing.
            logger.warning("%s", error)
            damaged.append(key)
            return None

    damaged: list[str] = []
    found = [status for status in in_parallel(read, keys) if status is not None]
    return sorted(found, key=lambda status: status.started), sorted(damaged)


def view_pods(cluster: Any, submission_id: str, *, with_nodes: bool = True) -> list[PodView]:
    """Ask the cluster for the pods of a KFP run, and for the events of those that do not run."""
    views = []
    nodes: list[Any] | None = None
    for pod in sorted(cluster.pods(run=submission_id), key=lambda pod: pod.created):
        has_told = any(state.state == "terminated" and state.exit_code for state in pod.containers)
        is_asked = pod.phase == "Pending" or (pod.phase == "Failed" and not has_told)
        events = cluster.events(pod.name) if is_asked else []
        cause = why(pod, events, namespace=cluster.namespace)
        if cause is not None and cause.kind == "accelerator" and with_nodes:
            nodes = _nodes(cluster) if nodes is None else nodes
            cause = why(pod, events, namespace=cluster.namespace, nodes=nodes)
        ended = [moment for state in pod.containers if (moment := unix(state.finished))]
        views.append(
            PodView(
                name=pod.name,
                task=component(pod.task),
                is_driver=pod.is_driver,
                phase=pod.phase,
                created=unix(pod.created),
                ended=max(ended, default=None),
                cause=cause,
            )
        )
    return views


def ask_workflow(cluster: Any, submission_id: str) -> tuple[list[Activity], dict[str, Cause]]:
    """Ask Argo about pods that were never made, or are gone: what waits, and what ended the last pod of each task.

    An account that may read pods but no workflows is told less, and no more is asked of it.
    """
    try:
        nodes = [node for workflow in cluster.workflows(submission_id) for node in nodes_of(workflow)]
    except ClusterError as error:
        logger.info("the workflow cannot be read: %s", error)
        return [], {}
    waiting, ends = [], {}
    for node in nodes:
        task = component(node.task)
        cause = why_of(node.message, node.task, namespace=cluster.namespace) if node.message else None
        if cause is not None and cause.has_ended and node.phase in ("Failed", "Error"):
            ends[task] = cause
        elif cause is not None and not cause.has_ended and node.phase == "Pending":
            since = unix(node.started)
            waiting.append(Activity(task=task, step=None, pod="", doing="waiting", since=since, cause=cause))
    return waiting, ends


def _nodes(cluster: Any) -> list[Any]:
    try:
        return list(cluster.nodes())
    except ClusterError as error:
        logger.info("the nodes cannot be read: %s", error)
        return []


def unix(time: str) -> float | None:
    """Return Kubernetes' time (RFC 3339) as Unix seconds; None where there is none."""
    try:
        return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp() if time else None
    except ValueError:
        return None


def is_done(status: TaskStatus, progress: Progress, config: Mapping[str, Any]) -> bool:
    """Whether what the task was to commit is committed, whatever its status says."""
    step = status.step
    if status.task == "segment" and step is not None:
        stop = step + int(value_at(config, "trainer.steps_per_segment", 1)) - 1
        return progress.steps >= min(stop, progress.total or stop)
    if step is not None:
        in_next = step == progress.steps + 1 and status.task in progress.stages
        return step <= progress.steps or in_next
    if status.task == "preprocess":
        return progress.is_prepared
    if status.task == "checkpoint_export":
        return bool(progress.export)
    return False


def activities(
    statuses: Iterable[TaskStatus], pods: Sequence[PodView] | None, *, now: float, last_commit: float | None
) -> list[Activity]:
    """Return what is under way: the tasks whose statuses are given, and pods that wait or start.

    `pods` is None where no cluster could be asked.
    """
    by_name = {pod.name: pod for pod in pods or ()}
    found = []
    for status in statuses:
        pod = by_name.get(status.host)
        heard = max(status.updated, last_commit or 0.0) if status.step is not None else status.updated
        is_silent = now - heard > SILENT
        doing: Doing = "silent" if is_silent else "running"
        if pod is not None:
            doing = "running" if pod.is_alive else "ended"
        elif pods is not None and now - status.updated > SETTLED:
            doing = "lost"
        found.append(
            Activity(
                task=status.task,
                step=status.step,
                pod=status.host,
                doing=doing,
                since=status.started,
                heard=status.updated,
                attempt=status.attempt,
                note=status.note,
                cause=pod.cause if pod is not None else None,
            )
        )
    known = {activity.pod for activity in found}
    for pod in pods or ():
        if pod.name in known or not pod.is_alive:
            continue
        # A driver is no task of anybody's, as long as it does not wait for something.
        is_harmless = pod.cause is None or pod.cause.kind in HARMLESS
        if pod.is_driver and is_harmless:
            continue
        doing = "starting" if is_harmless else "waiting"
        found.append(Activity(task=pod.task, step=None, pod=pod.name, doing=doing, since=pod.created, cause=pod.cause))
    return found


def first_failure(
    statuses: Iterable[TaskStatus], lost: Iterable[Activity], pods: Sequence[PodView] | None
) -> Failure | None:
    """Return the failure that the others follow from: the first one that is no fence. `statuses` are the failed ones.

    `lost` are tasks whose status still says "running", although their pod has ended or is gone.
    """
    found = [_of_status(status) for status in statuses]
    found += [_of_activity(one, pods) for one in lost]
    told = {failure.pod for failure in found}
    alive = {pod.task for pod in pods or () if pod.is_alive}
    for pod in pods or ():
        # What Argo has started again is not over.
        if pod.phase == "Failed" and pod.name not in told and pod.task not in alive:
            found.append(_of_pod(pod))
    if not found:
        return None
    ordered = sorted(found, key=lambda failure: (failure.exit_code in _CONSEQUENCES, failure.at or 0.0))
    first = ordered[0]
    later = [failure for failure in ordered[1:] if failure.exit_code in _CONSEQUENCES]
    return replace(first, consequences=len(later))


def _of_status(status: TaskStatus) -> Failure:
    code = status.exit_code
    meaning = MEANINGS[ExitCode(code)] if code in list(ExitCode) else ""
    return Failure(
        task=status.task,
        step=status.step,
        pod=status.host,
        at=status.updated,
        error=status.error,
        message=status.message,
        advice=status.advice,
        exit_code=code,
        meaning=meaning,
    )


def _of_activity(one: Activity, pods: Sequence[PodView] | None) -> Failure:
    pod = next((pod for pod in pods or () if pod.name == one.pod), None)
    cause = one.cause or Cause("deleted", *_unheard(one))
    return Failure(
        task=one.task,
        step=one.step,
        pod=one.pod,
        at=(pod.ended if pod is not None else None) or one.heard,
        error=cause.kind,
        message=cause.message,
        advice=cause.advice,
        cause=cause,
    )


def _unheard(one: Activity) -> tuple[str, str]:
    if one.doing == "lost":
        return "its pod is gone and left no word: it was deleted or killed", "submit the run again"
    return "nothing was heard of it for minutes: its pod was killed, or cannot write to object storage", (
        "look whether the pod lives; if it does not, submit the run again"
    )


def _of_pod(pod: PodView) -> Failure:
    cause = pod.cause or Cause("exit", "the pod failed", "its log says why")
    return Failure(
        task=pod.task,
        step=None,
        pod=pod.name,
        at=pod.ended or pod.created,
        error=cause.kind,
        message=cause.message,
        advice=cause.advice,
        cause=cause,
    )
