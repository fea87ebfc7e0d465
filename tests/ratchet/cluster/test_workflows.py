"""Argo's nodes are read plain and compressed alike."""

import base64
import gzip
import json
from typing import Any

import pytest

from ratchet.cluster.workflows import WorkflowNode, nodes_of
from ratchet.errors import ClusterError

NODES: dict[str, Any] = {
    "x": {"type": "DAG", "name": "x", "phase": "Running"},
    "x-2": {
        "type": "Pod",
        "name": "x.root(0).work.segments.segment(0).executor(0)",
        "phase": "Pending",
        "message": "secret not found",
        "startedAt": "2026-01-01T00:01:00Z",
        "finishedAt": None,
    },
    "x-1": {"type": "Pod", "name": "x.root.plan-driver(0)", "phase": "Succeeded", "startedAt": "2026-01-01T00:00:00Z"},
}
PODS = [
    WorkflowNode("plan", True, "Succeeded", "", "2026-01-01T00:00:00Z"),
    WorkflowNode("segment", False, "Pending", "secret not found", "2026-01-01T00:01:00Z"),
]


def test_nodes_are_read_plain_and_compressed() -> None:
    packed = base64.b64encode(gzip.compress(json.dumps(NODES).encode())).decode()
    assert nodes_of({"status": {"nodes": NODES}}) == PODS
    assert nodes_of({"status": {"compressedNodes": packed}}) == PODS
    assert nodes_of({"status": {"nodes": {}, "compressedNodes": packed}}) == PODS


def test_a_workflow_that_has_not_begun_has_no_nodes() -> None:
    assert nodes_of({"metadata": {}}) == []
    assert nodes_of({"status": {"phase": ""}}) == []


@pytest.mark.parametrize("text", ["not base64!", base64.b64encode(b"not gzip").decode()])
def test_what_cannot_be_unpacked_is_said(text: str) -> None:
    with pytest.raises(ClusterError, match="the workflow's nodes cannot be unpacked"):
        nodes_of({"status": {"compressedNodes": text}})
