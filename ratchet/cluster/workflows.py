"""What Argo says of the nodes of a workflow: the one place where a pod is explained that was never made, or is gone.

Trap: a large workflow stores its nodes compressed, and goes to and fro between the two forms.
"""

import base64
import binascii
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratchet.cluster.records import task_of_node
from ratchet.errors import ClusterError


@dataclass(frozen=True, slots=True)
class WorkflowNode:
    """One pod of a workflow, made or not."""

    task: str
    """The pipeline's task that it belongs to."""
    is_driver: bool
    phase: str
    """Pending, Running, Succeeded, Failed, Error, Omitted or Skipped."""
    message: str
    started: str = ""
    """RFC 3339, in UTC."""
    finished: str = ""


def nodes_of(workflow: Mapping[str, Any]) -> list[WorkflowNode]:
    """Return the nodes of a Workflow object that are pods, the one that began first at the front."""
    status = workflow.get("status") or {}
    nodes = status.get("nodes") or _unpacked(str(status.get("compressedNodes") or ""))
    found = [_node(one) for one in nodes.values() if one.get("type") == "Pod"]
    return sorted(found, key=lambda node: node.started)


def _unpacked(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        return dict(json.loads(gzip.decompress(base64.b64decode(text))))
    except (binascii.Error, OSError, EOFError, ValueError) as error:
        raise ClusterError(f"the workflow's nodes cannot be unpacked: {error}") from error


def _node(told: Mapping[str, Any]) -> WorkflowNode:
    task, is_driver = task_of_node(str(told.get("name") or ""))
    return WorkflowNode(
        task=task,
        is_driver=is_driver,
        phase=str(told.get("phase") or ""),
        message=str(told.get("message") or ""),
        started=str(told.get("startedAt") or ""),
        finished=str(told.get("finishedAt") or ""),
    )
