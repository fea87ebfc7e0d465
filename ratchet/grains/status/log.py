"""Which pod's log tells about a task of a run, and what stands in for it where the pod is gone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ratchet.cluster.waiting import component
from ratchet.errors import ConfigError
from ratchet.grains.exits import ExitCode
from ratchet.grains.status.tasks import PodView
from ratchet.store.status import TaskStatus

_STATES = ("failed", "terminated", "running", "succeeded")
"""What one wants to read first."""


@dataclass(frozen=True, slots=True)
class LogSource:
    """Where a log is: a pod, a status, or both."""

    task: str
    pod: PodView | None
    """None where the pod is gone, or was never there."""
    status: TaskStatus | None

    @property
    def has_log(self) -> bool:
        """Whether the pod's container can have written anything."""
        if self.pod is None:
            return False
        return self.pod.phase != "Pending"

    def instead(self, submission_id: str, url: str = "", *, is_asked: bool = True) -> list[str]:
        """Return what is known without the log, and how it may be had. `is_asked`: the cluster was, for its pods."""
        status, lines = self.status, []
        if self.pod is not None and self.pod.cause is not None:
            return [
                f"pod {self.pod.name} of {self.task} has no log yet: {self.pod.cause.message}",
                self.pod.cause.advice,
            ]
        if status is not None:
            lines.append(f"{status.task}{'' if status.step is None else f' of step {status.step}'}: {status.state}")
            if status.message:
                lines.append(f"{status.error}: {status.message}")
            lines += [text for text in (status.note, status.advice) if text]
            lines.append(
                f"pod {status.host} is gone, and its log with it"
                if is_asked
                else f"its pod is {status.host}: kubectl logs {status.host} -c main"
            )
        page = url or f"run {submission_id}"
        return [*lines, f"Kubeflow keeps logs if it archives them: {page}, task {self.task}, Logs"]


def find_log(
    statuses: Sequence[TaskStatus], pods: Sequence[PodView], *, task: str | None = None, step: int | None = None
) -> LogSource:
    """Return where the log of a task is; of the task that failed first, runs or ran last where none is named.

    `step` is an RL step; a segment that begins with it or runs it is meant, too. ConfigError, with the tasks that there
    are, where none fits.
    """
    wanted = component(task) if task is not None else None
    found = [one for one in statuses if wanted in (None, one.task) and _is_of(one, step, statuses)]
    by_name = {pod.name: pod for pod in pods}
    told = {one.host for one in statuses}
    # Pods that wait, or were killed before they could say a word.
    silent = [
        pod for pod in pods if pod.name not in told and step is None and wanted in (None, pod.task) and _says(pod)
    ]
    if found and not (wanted is None and silent and not any(one.state == "failed" for one in found)):
        status = min(found, key=_urgency)
        return LogSource(status.task, by_name.get(status.host), status)
    if silent:
        pod = max(silent, key=lambda pod: (not pod.is_driver, pod.created or 0.0))
        return LogSource(pod.task, pod, None)
    known = sorted({_name(one) for one in statuses} | {pod.task for pod in pods if not pod.is_driver})
    asked = " ".join(filter(None, [task or "any task", "" if step is None else f"of step {step}"]))
    raise ConfigError(f"the newest submission has no log of {asked}; its tasks are {', '.join(known) or 'none yet'}")


def _urgency(status: TaskStatus) -> tuple[int, bool, float]:
    is_fence = status.exit_code in (ExitCode.NOT_COMMITTED, ExitCode.OWNERSHIP_LOST)
    first = status.updated if status.state == "failed" else -status.started
    return _STATES.index(status.state), is_fence, first


def _is_of(status: TaskStatus, step: int | None, statuses: Iterable[TaskStatus]) -> bool:
    if step is None or status.step == step:
        return True
    if status.task != "segment" or status.step is None or status.step > step:
        return False
    starts = [one.step for one in statuses if one.task == "segment" and one.step is not None and one.step <= step]
    return status.step == max(starts)


def _says(pod: PodView) -> bool:
    return not pod.is_driver or pod.cause is not None


def _name(status: TaskStatus) -> str:
    return status.task if status.step is None else f"{status.task} --step {status.step}"
