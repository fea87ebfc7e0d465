"""Pods that wait or ended, and texts that Kubernetes, containerd, Argo and the kubelet write about them."""

from typing import Any

from ratchet.cluster.records import Condition, ContainerState, Event, Node, Pod
from ratchet.cluster.waiting import Cause, why

UNSCHEDULABLE = "0/4 nodes are available: "
PREEMPTION = " preemption: 0/4 nodes are available: 4 Preemption is not helpful for scheduling."
RPC = 'rpc error: code = NotFound desc = failed to pull and unpack image "reg.example/team/ratchet-base:1": '
RESOLVE = 'failed to resolve reference "reg.example/team/ratchet-base:1": '
RUNC = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: "
    "unable to start container process: "
)


def pending(reason: str, message: str, task: str = "segment", **fields: Any) -> Pod:
    """A pod that the scheduler did not place."""
    condition = Condition("PodScheduled", False, reason, message)
    return Pod("p-1", "Pending", task=task, conditions=(condition,), **fields)


def waiting(reason: str, message: str = "", task: str = "segment", name: str = "main") -> Pod:
    """A pod on a node with a container that does not start."""
    state = ContainerState(name, "waiting", reason, message)
    return Pod("p-1", "Pending", node="n-1", task=task, containers=(state,))


def ended(
    reason: str, exit_code: int, message: str = "", *, name: str = "main", is_init: bool = False, **fields: Any
) -> Pod:
    """A pod whose container ended."""
    state = ContainerState(name, "terminated", reason, message, exit_code=exit_code, is_init=is_init)
    follower = ContainerState("wait", "terminated", "Completed", exit_code=0)
    return Pod("p-1", "Failed", node="n-1", task="segment", containers=(follower, state), **fields)


def failed(reason: str, message: str, **fields: Any) -> Pod:
    """A pod that failed as a whole."""
    return Pod("p-1", "Failed", task="segment", reason=reason, message=message, **fields)


def told(pod: Pod, *events: Event, nodes: tuple[Node, ...] = ()) -> Cause:
    cause = why(pod, events, namespace="team", nodes=nodes)
    assert cause is not None
    return cause
