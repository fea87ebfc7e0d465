"""Why the scheduler finds no node for a pod.

Trap: it counts nodes by the first thing that each was refused for, and asks for taints and labels before amounts. One
node that is only short of a GPU therefore says more than forty that have a taint.
"""

import re
from collections.abc import Sequence

from ratchet.cluster import messages
from ratchet.cluster.causes import Cause, shorten
from ratchet.cluster.records import Node, is_accelerator, shown_taint

_AGAIN = "terminate the run and submit it again"
_SYSTEM = ("node.kubernetes.io/", "node-role.kubernetes.io/")
"""Taints that say that a node is not well, or not meant for pods of users: none to tolerate."""


def is_about(text: str) -> bool:
    """Whether a message is the scheduler's."""
    return bool(re.search(r"nodes are available|no nodes available|Unschedulable", text))


def read(text: str, *, place: str, namespace: str, nodes: Sequence[Node]) -> Cause | None:
    """Return the refusal of the nodes that came nearest to taking the pod. `nodes` are the cluster's, where known."""
    message, key = shorten(text), messages.keys(place)
    short = sorted(set(re.findall(r"Insufficient ([\w./-]*\w)", message)))
    has_taints = "taint" in message
    accelerator = next(filter(is_accelerator, short), None)
    if accelerator is not None:
        return Cause("accelerator", message, _about_accelerator(accelerator, key, nodes, has_taints))
    other = messages.read(message, place=place, namespace=namespace)
    if other is not None and other.kind == "volume":
        return other
    if short:
        what, where = " and ".join(short), key["place"]
        advice = f"wait until {what} is free (it starts by itself), or ask for less in {where}, {_AGAIN}"
        return Cause("capacity", message, advice)
    if "Too many pods" in message:
        return Cause("capacity", message, "the nodes have as many pods as they may: wait, or add nodes")
    if re.search(r"affinity|node selector", message):
        advice = f"no node has these labels (kubectl get nodes --show-labels): correct {key['node_selector']}, {_AGAIN}"
        return Cause("node_selector", message, advice)
    if has_taints:
        named = sorted({one.strip(": ") for one in re.findall(r"taints? \{([^}]*)\}", message)})
        if named and all(one.startswith("node.kubernetes.io/") for one in named):
            advice = (
                f"the nodes are not well ({', '.join(named)}): kubectl describe nodes; it starts by itself once one is"
            )
            return Cause("no_node", message, advice)
        named = [one for one in named if not one.startswith(_SYSTEM)]
        which = ", ".join(named) or _taints(nodes) or "kubectl describe nodes lists them"
        return Cause("taint", message, f"add the nodes' taints ({which}) to {key['tolerations']}, {_AGAIN}")
    if re.search(r"were unschedulable|no nodes available|\b0/0 ", message):
        return Cause("no_node", message, "no node takes pods (kubectl get nodes): uncordon or add one")
    return other


def _about_accelerator(resource: str, key: dict[str, str], nodes: Sequence[Node], has_taints: bool) -> str:
    if not nodes:
        tolerated = f"; its nodes may have a taint that {key['tolerations']} lacks" if has_taints else ""
        return (
            f"wait until a {resource} is free (it starts by itself); if the nodes have none or fewer (kubectl describe "
            f"nodes), correct {key['accelerator_type']} or accelerator_count, {_AGAIN}{tolerated}"
        )
    having = [node for node in nodes if node.is_ready and not node.is_cordoned and _amount(node, resource) > 0]
    if not having:
        known = sorted({name for node in nodes for name in node.allocatable if is_accelerator(name)})
        return (
            f"no node has {resource} (the cluster has {', '.join(known) or 'no accelerators'}): add one, or correct "
            f"{key['accelerator_type']}, {_AGAIN}"
        )
    total, most = (function(_amount(node, resource) for node in having) for function in (sum, max))
    taints = _taints(having) if has_taints else ""
    tolerated = f"; {key['tolerations']} must name the taint of its nodes, {taints}" if taints else ""
    return (
        f"the cluster has {total} {resource}, at most {most} on a node: wait until enough are free (it starts by "
        f"itself), or lower {key['accelerator_count']}, {_AGAIN}{tolerated}"
    )


def _amount(node: Node, resource: str) -> int:
    text = node.allocatable.get(resource, "0")
    return int(text) if text.isdecimal() else 0


def _taints(nodes: Sequence[Node]) -> str:
    found = {
        shown_taint(taint)
        for node in nodes
        for taint in node.taints
        if taint["effect"] in ("NoSchedule", "NoExecute") and not taint["key"].startswith(_SYSTEM)
    }
    return ", ".join(sorted(found))
