"""Why a pod of a run waits, or what ended it: from its conditions, containers and events, without asking anybody.

Trap: a pod of a KFP task ends with the launcher's exit code, which says nothing; the program's own status file does.
"""

import re
from collections.abc import Iterator, Sequence

from ratchet.cluster import messages, scheduling
from ratchet.cluster.causes import ACCIDENTS, HARMLESS, Cause, Kind, shorten
from ratchet.cluster.records import ContainerState, Event, Node, Pod

__all__ = ["ACCIDENTS", "HARMLESS", "Cause", "Kind", "component", "place_of", "why", "why_of"]

_PLACES = {
    "segment": "segment",
    "step": "segment",
    "rollout": "rollout",
    "scores": "scores",
    "policy_update": "policy_update",
    "critic_update": "policy_update",
    "evaluate": "evaluate",
    "checkpoint_export": "evaluate",
}
"""Component -> the entry of device_map that its pods run by; the others ask for little, and for it alone."""
_STARTING = ("", "ContainerCreating", "PodInitializing")
_GOING_ON = ("Scheduled", "Pulling", "Pulled", "Created", "Started", "SuccessfulAttachVolume")
_KILLED = 137


def component(task: str) -> str:
    """Return the component that a pipeline's task runs: KFP writes dashes, and numbers the tasks of one component."""
    return re.sub(r"_\d+$", "", task.replace("-", "_"))


def place_of(task: str) -> str:
    """Return the config section that says what the task's pod asks for, "" where there is none."""
    entry = _PLACES.get(component(task))
    return f"device_map.{entry}" if entry else ""


def why(
    pod: Pod, events: Sequence[Event] = (), *, namespace: str = "NAMESPACE", nodes: Sequence[Node] = ()
) -> Cause | None:
    """Return why the pod waits or what ended it; None where it runs, or has succeeded.

    `nodes` are the cluster's, where they could be read: with them, "no GPU is free" and "there is none" differ.
    """
    if pod.phase == "Succeeded":
        return None
    has_failed = pod.phase == "Failed"
    for text in _ends(pod, events) if has_failed else _waits(pod, events):
        found = why_of(text, pod.task, namespace=namespace, nodes=nodes)
        if found is not None and (found.has_ended or not has_failed):
            return found
    if has_failed:
        return _exit(pod)
    if pod.is_deleted:
        return why_of("pod deleted", pod.task, namespace=namespace)
    return _start(pod, events) if pod.phase == "Pending" else None


def why_of(text: str, task: str = "", *, namespace: str = "NAMESPACE", nodes: Sequence[Node] = ()) -> Cause | None:
    """Return the cause that a message states: "<reason>: <message>" of Kubernetes, or Argo's about a task's node."""
    place = place_of(task)
    if scheduling.is_about(text):
        return scheduling.read(text, place=place, namespace=namespace, nodes=nodes)
    return messages.read(text, place=place, namespace=namespace)


def _ends(pod: Pod, events: Sequence[Event]) -> Iterator[str]:
    """What may say what ended the pod, the most reliable first."""
    if pod.reason or pod.message:
        yield f"{pod.reason}: {pod.message}"
    for state in _by_weight(pod.containers):
        if state.state == "terminated" and state.exit_code:
            yield _told(state)
    for condition in pod.conditions:
        if condition.type == "DisruptionTarget" and condition.is_true:
            yield f"{condition.reason}: {condition.message}"
    for event in reversed(events):
        if event.reason in ("Preempted", "Evicted", "NodeNotReady", "TaintManagerEviction"):
            yield f"{event.reason}: {event.message}"


def _waits(pod: Pod, events: Sequence[Event]) -> Iterator[str]:
    """What may say why the pod waits, the most reliable first."""
    for state in _by_weight(pod.containers):
        if state.state == "waiting" and state.reason not in _STARTING:
            text = f"{state.reason}: {state.message}"
            if state.reason == "ImagePullBackOff" and "Err" not in state.message:
                # Before Kubernetes 1.32 a back-off does not say what failed; the event before it does.
                text += " " + next((one.message for one in reversed(events) if "Failed to pull" in one.message), "")
            yield text
        elif state.state == "terminated" and state.exit_code:
            yield _told(state)
    if _is_scaling_up(pod, events):
        return
    for condition in pod.conditions:
        if condition.type == "PodScheduled" and not condition.is_true and condition.reason:
            yield f"{condition.reason}: {condition.message}"
    for event in reversed(events) if pod.phase == "Pending" else ():
        if event.reason in _GOING_ON:
            # What earlier events complain of is over.
            return
        if event.is_warning or event.reason.startswith("Failed"):
            yield f"{event.reason}: {event.message}"


def _is_scaling_up(pod: Pod, events: Sequence[Event]) -> bool:
    last = next((one.reason for one in reversed(events) if "ScaleUp" in one.reason), "")
    return last == "TriggeredScaleUp" and not pod.node


def _start(pod: Pod, events: Sequence[Event]) -> Cause:
    """Nothing is wrong: a node is being added, an image pulled, a container made."""
    told = shorten(events[-1].message) if events else ""
    if _is_scaling_up(pod, events):
        return Cause("scaling_up", told, "nothing: a node is being added; the pod then starts by itself")
    message = told or ("the pod is being started" if pod.node else "the pod has no node yet")
    return Cause("starting", message, "nothing: it starts by itself")


def _exit(pod: Pod) -> Cause:
    """Ended by its program, or for no reason that is told."""
    state = next((one for one in _by_weight(pod.containers) if one.state == "terminated" and one.exit_code), None)
    if state is None:
        told = shorten(f"{pod.reason}: {pod.message}") if pod.reason else "the pod failed, and nothing says why"
        return Cause("exit", told, "its log may say more")
    if state.exit_code == _KILLED:
        advice = (
            "it was killed from outside, and not for its memory; submit the run again, it goes on from its last commit"
        )
        return Cause("killed", shorten(_told(state)), advice)
    of = "" if state.name == "main" else f" of its container {state.name}"
    return Cause("exit", shorten(f"exit code {state.exit_code}{of} {state.message}").strip(), "its log says why")


def _told(state: ContainerState) -> str:
    message = f": {state.message}" if state.message else ""
    return f"{state.reason}{message} (container {state.name}, exit code {state.exit_code})"


def _by_weight(states: Sequence[ContainerState]) -> list[ContainerState]:
    """The program's container first, then those that run before it: the others follow it."""
    return sorted(states, key=lambda one: (one.name != "main", not one.is_init))
