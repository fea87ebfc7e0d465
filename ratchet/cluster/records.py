"""What is read of Kubernetes' objects: plain records, and how they are made from the API's JSON.

Trap: a task of a KFP run is two pods, a driver and an executor; which task a pod belongs to is said in Argo's name of
the workflow's node alone.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_NODE_NAME = "workflows.argoproj.io/node-name"
_COUNTER = re.compile(r"\([^()]*\)")
_DRIVER = "-driver"


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the cluster."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    taints: tuple[dict[str, str], ...] = ()
    """Each {key, value, effect}."""
    allocatable: dict[str, str] = field(default_factory=dict)
    """What pods may have of it, as Kubernetes writes amounts: {"cpu": "15890m", "nvidia.com/gpu": "8"}."""
    is_ready: bool = True
    is_cordoned: bool = False
    """Whether it takes no new pods."""


@dataclass(frozen=True, slots=True)
class ContainerState:
    """What a container of a pod is at."""

    name: str
    state: Literal["waiting", "running", "terminated"]
    reason: str = ""
    """Such as ImagePullBackOff, CreateContainerConfigError, OOMKilled, Error, Completed."""
    message: str = ""
    exit_code: int | None = None
    started: str = ""
    finished: str = ""
    restarts: int = 0
    is_init: bool = False
    image: str = ""


@dataclass(frozen=True, slots=True)
class Condition:
    """One of a pod's conditions: PodScheduled, Initialized, Ready, DisruptionTarget, ..."""

    type: str
    is_true: bool
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod."""

    name: str
    phase: str
    """Pending, Running, Succeeded, Failed or Unknown."""
    node: str = ""
    created: str = ""
    started: str = ""
    """When the kubelet took it; times are RFC 3339, in UTC."""
    is_driver: bool = False
    """Whether it is one of KFP's own, which prepare a task."""
    task: str = ""
    """The pipeline's task that it belongs to."""
    containers: tuple[ContainerState, ...] = ()
    """Init containers first."""
    conditions: tuple[Condition, ...] = ()
    reason: str = ""
    """Of the pod as a whole, such as Evicted."""
    message: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    is_deleted: bool = False
    """Whether somebody has asked for its end."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a pod."""

    reason: str
    message: str
    count: int = 1
    last: str = ""
    """When it happened last."""
    is_warning: bool = False


def node_of(item: Mapping[str, Any]) -> Node:
    """Read a Node object."""
    metadata, spec, status = _parts(item)
    ready = [one for one in status.get("conditions") or () if one.get("type") == "Ready"]
    taints = tuple(
        {key: str(taint.get(key) or "") for key in ("key", "value", "effect")} for taint in spec.get("taints") or ()
    )
    return Node(
        name=metadata["name"],
        labels=dict(metadata.get("labels") or {}),
        taints=taints,
        allocatable={name: str(amount) for name, amount in (status.get("allocatable") or {}).items()},
        is_ready=bool(ready) and ready[0].get("status") == "True",
        is_cordoned=bool(spec.get("unschedulable")),
    )


def pod_of(item: Mapping[str, Any]) -> Pod:
    """Read a Pod object."""
    metadata, spec, status = _parts(item)
    name = metadata["name"]
    task, is_driver = task_of_node(str((metadata.get("annotations") or {}).get(_NODE_NAME, "")))
    states = [
        _container(one, is_init=is_init)
        for key, is_init in (("initContainerStatuses", True), ("containerStatuses", False))
        for one in status.get(key) or ()
    ]
    conditions = tuple(
        Condition(one.get("type", ""), one.get("status") == "True", one.get("reason") or "", one.get("message") or "")
        for one in status.get("conditions") or ()
    )
    return Pod(
        name=name,
        phase=str(status.get("phase") or "Unknown"),
        node=str(spec.get("nodeName") or ""),
        created=str(metadata.get("creationTimestamp") or ""),
        started=str(status.get("startTime") or ""),
        is_driver=is_driver or "-driver-" in name,
        task=task,
        containers=tuple(states),
        conditions=conditions,
        reason=str(status.get("reason") or ""),
        message=str(status.get("message") or ""),
        labels=dict(metadata.get("labels") or {}),
        is_deleted=bool(metadata.get("deletionTimestamp")),
    )


def event_of(item: Mapping[str, Any]) -> Event:
    """Read an Event object, of either of the two ways in which Kubernetes counts repetitions."""
    series = item.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        item.get("lastTimestamp"),
        item.get("eventTime"),
        item.get("firstTimestamp"),
    )
    return Event(
        reason=str(item.get("reason") or ""),
        message=str(item.get("message") or "").strip(),
        count=int(series.get("count") or item.get("count") or 1),
        last=str(next((time for time in times if time), "")),
        is_warning=item.get("type") == "Warning",
    )


def _parts(item: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    return item.get("metadata") or {}, item.get("spec") or {}, item.get("status") or {}


def _container(status: Mapping[str, Any], *, is_init: bool) -> ContainerState:
    states = status.get("state") or {}
    kind: Literal["waiting", "running", "terminated"] = "waiting"
    if "terminated" in states:
        kind = "terminated"
    elif "running" in states:
        kind = "running"
    state = states.get(kind) or {}
    return ContainerState(
        name=str(status.get("name") or ""),
        state=kind,
        reason=str(state.get("reason") or ""),
        message=str(state.get("message") or ""),
        exit_code=state.get("exitCode"),
        started=str(state.get("startedAt") or ""),
        finished=str(state.get("finishedAt") or ""),
        restarts=int(status.get("restartCount") or 0),
        is_init=is_init,
        image=str(status.get("image") or ""),
    )


def is_accelerator(resource: str) -> bool:
    """Whether a resource is a device plugin's: these have a domain, Kubernetes' own have none."""
    return "/" in resource and not resource.startswith("kubernetes.io/")


def shown_taint(taint: Mapping[str, str]) -> str:
    """Return a taint as kubectl writes it: key=value:effect, or key:effect."""
    return f"{taint['key']}{'=' if taint['value'] else ''}{taint['value']}:{taint['effect']}"


def task_of_node(node_name: str) -> tuple[str, bool]:
    """Return the task and whether this is its driver: `wf.root(0).plan(0).executor(0)`, `wf.root.plan-driver`."""
    parts = [_COUNTER.sub("", part) for part in node_name.split(".")]
    last = parts[-1]
    if last.endswith(_DRIVER):
        return last.removesuffix(_DRIVER), True
    if last == "executor" and len(parts) > 1:
        return parts[-2], False
    return last, False
