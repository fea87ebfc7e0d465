"""Whether some node of the cluster can ever take a pod: labels, taints, and what it may have at most.

Trap: what other pods use now is left out on purpose. A pod waits for those, but it waits for ever where no node would
be large enough when it is empty.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from typing import Any, Literal

from ratchet.cluster.records import Node, is_accelerator, shown_taint

_UNITS = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_QUANTITY = re.compile(r"([+-]?[0-9.]+)(?:([EPTGMK])i|([numkMGTPE]?)|[eE]([+-]?[0-9]+))")
_KEEPS_AWAY = ("NoSchedule", "NoExecute")
_KEYS = {"cpu": "cpu", "memory": "memory"}

Kind = Literal["no_node", "labels", "resource", "taint", "amount"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a pod asks for."""

    accelerator_type: str = ""
    """Name of the resource, "" for none."""
    accelerator_count: int = 0
    cpu: str = "0"
    memory: str = "0"
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()

    def amounts(self) -> dict[str, str]:
        """Return resource -> amount, as Kubernetes writes it."""
        accelerators = {self.accelerator_type: str(self.accelerator_count)} if self.accelerator_count else {}
        return {**accelerators, "cpu": self.cpu, "memory": self.memory}


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why no node can take a pod, said of the nodes that came nearest."""

    kind: Kind
    message: str
    """What was expected, what there is, and what to change."""
    taints: tuple[str, ...] = ()
    """Keys of the taints that keep the pod away, for the kind "taint"."""


def quantity(text: str) -> Decimal:
    """The number that an amount of Kubernetes stands for: 500m, 4, 16Gi, 1e3; ValueError for anything else."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected an amount such as 500m, 4 or 16Gi, got {text!r}")
    number, binary, unit, exponent = match.groups()
    if binary:
        return Decimal(number) * Decimal(1024) ** ("KMGTPE".index(binary) + 1)
    return Decimal(number).scaleb(int(exponent) if exponent else _UNITS[unit or ""])


def misfit(nodes: Sequence[Node], request: Request, place: str) -> Misfit | None:
    """Return why no node can take the pod, or None if one can; `place` is the config section of the request."""
    ready = [node for node in nodes if node.is_ready and not node.is_cordoned]
    if not ready:
        return Misfit("no_node", f"expected a node that takes pods, got none: {len(nodes)} are not ready or cordoned")
    labelled = [node for node in ready if _has_labels(node, request.node_selector)]
    if not labelled:
        return Misfit("labels", f"{_about_labels(ready, request.node_selector)}; correct {place}.node_selector")
    kind = request.accelerator_type if request.accelerator_count else ""
    having = [node for node in labelled if not kind or _amount(node, kind) > 0]
    if not having:
        return Misfit("resource", _about_resource(ready, kind, place))
    reachable = [node for node in having if not _taints(node, request.tolerations)]
    if not reachable:
        return _about_taints(having, request.tolerations, place)
    if any(not _missing(node, request) for node in reachable):
        return None
    return Misfit("amount", _about_amounts(reachable, request, place))


def _has_labels(node: Node, wanted: Mapping[str, str]) -> bool:
    return all(node.labels.get(key) == value for key, value in wanted.items())


def _amount(node: Node, resource: str) -> Decimal:
    return quantity(node.allocatable.get(resource, "0"))


def _missing(node: Node, request: Request) -> list[str]:
    return [name for name, amount in request.amounts().items() if _amount(node, name) < quantity(amount)]


def _taints(node: Node, tolerations: Sequence[Mapping[str, Any]]) -> list[Mapping[str, str]]:
    """The node's taints that keep the pod away: those that none of the tolerations accepts."""
    taints = [taint for taint in node.taints if taint["effect"] in _KEEPS_AWAY]
    return [taint for taint in taints if not any(_accepts(one, taint) for one in tolerations)]


def _accepts(toleration: Mapping[str, Any], taint: Mapping[str, str]) -> bool:
    key, effect = toleration.get("key") or "", toleration.get("effect") or ""
    if effect and effect != taint["effect"]:
        return False
    if (toleration.get("operator") or "Equal") == "Exists":
        return not key or key == taint["key"]
    return bool(key == taint["key"] and (toleration.get("value") or "") == taint["value"])


def _about_labels(nodes: Sequence[Node], wanted: Mapping[str, str]) -> str:
    asked = ", ".join(f"{key}={value}" for key, value in wanted.items())
    said = []
    for key, value in wanted.items():
        values = _counted(node.labels[key] for node in nodes if key in node.labels)
        if any(node.labels.get(key) == value for node in nodes):
            continue
        if values:
            said.append(f"{key} is {values}")
            continue
        near = get_close_matches(key, sorted({name for node in nodes for name in node.labels}), n=3, cutoff=0.5)
        said.append(f"no node has a label {key}" + (f" (there is {', '.join(near)})" if near else ""))
    return f"expected a node with {asked}, got none: {'; '.join(said) or 'each is on other nodes'}"


def _about_resource(ready: Sequence[Node], resource: str, place: str) -> str:
    elsewhere = [node for node in ready if _amount(node, resource) > 0]
    if elsewhere:
        others = _some(node.name for node in elsewhere)
        return f"{place}.node_selector leaves out every node with {resource} ({others}): correct one of the two"
    totals: dict[str, int] = {}
    for node in ready:
        for name in filter(is_accelerator, node.allocatable):
            totals[name] = totals.get(name, 0) + int(_amount(node, name))
    there = ", ".join(f"{name} ({total})" for name, total in sorted(totals.items()) if total) or "no accelerators"
    return f"expected a node with {resource}, got none; the cluster has {there}: correct {place}.accelerator_type"


def _about_taints(nodes: Sequence[Node], tolerations: Sequence[Mapping[str, Any]], place: str) -> Misfit:
    nearest = min(nodes, key=lambda node: len(_taints(node, tolerations)))
    taints = _taints(nearest, tolerations)
    shown = ", ".join(map(shown_taint, taints))
    needed = ", ".join(
        f"{{key: {one['key']}, {'value: ' + one['value'] if one['value'] else 'operator: Exists'}, "
        f"effect: {one['effect']}}}"
        for one in taints
    )
    names = _some(node.name for node in nodes)
    message = f"the nodes that could take it ({names}) have taints ({shown}): add to {place}.tolerations {needed}"
    return Misfit("taint", message, tuple(one["key"] for one in taints))


def _about_amounts(nodes: Sequence[Node], request: Request, place: str) -> str:
    asked = request.amounts()
    nearest = min(nodes, key=lambda node: len(_missing(node, request)))
    missing = _missing(nearest, request)
    said = ", ".join(f"{asked[name]} {name} (it has {nearest.allocatable.get(name, '0')})" for name in missing)
    keys = ", ".join(f"{place}.{_KEYS.get(name, 'accelerator_count')}" for name in missing)
    return f"no node is large enough: of the nearest, {nearest.name}, the pod would need {said}; lower {keys}"


def _counted(values: Iterable[str]) -> str:
    listed = sorted(Counter(values).items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{value} on {count} node{'' if count == 1 else 's'}" for value, count in listed[:5])
    return shown + (", ..." if len(listed) > 5 else "")


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
