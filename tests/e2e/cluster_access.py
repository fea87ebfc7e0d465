"""The Kubernetes API behind the endpoint, where this machine may use it: keys for pods, a pod's end, logs of failures.

Traps: a kubeconfig may speak of another cluster than the endpoint's, so that nothing is created where Argo is not; and
what was there before the suite is neither changed nor removed.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kubernetes import config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from ratchet.cluster.kube import Cluster, Event
from ratchet.errors import ClusterError

logger = logging.getLogger(__name__)

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIMEOUT = 20
_TAIL = 25
_CREATED_BY = {"app.kubernetes.io/managed-by": "ratchet-e2e"}


class ClusterAccess:
    """One namespace of the cluster. What the account may not do is a ClusterError with the API's words.

    The product's own reader finds the account; it only reads, and this suite does a little more.
    """

    def __init__(self, cluster: Cluster, context: str | None = None) -> None:
        self.cluster = cluster
        self.context = context
        """Of the kubeconfig, where it has to be named."""
        self.namespace = cluster.namespace
        self._place = f"/api/v1/namespaces/{self.namespace}"
        self._created: list[str] = []

    @classmethod
    def open(cls, namespace: str) -> "ClusterAccess":
        """Open the API of the kubeconfig or of this pod; ClusterError where there is none, or it is another cluster."""
        context = _named_context()
        found = cls(Cluster.open(namespace=namespace, context=context), context)
        found._ask("see Argo Workflows (is this the endpoint's cluster?)", "GET", "/apis/argoproj.io/v1alpha1")
        found._ask("list pods", "GET", f"{found._place}/pods", query={"limit": "1"})
        return found

    def ensure_secret(self, name: str, values: Mapping[str, str]) -> bool:
        """Create the secret unless there is one; True if it was created."""
        return self._ensure("secrets", name, {"kind": "Secret", "type": "Opaque", "stringData": dict(values)})

    def ensure_config_map(self, name: str, values: Mapping[str, str]) -> bool:
        """Create the config map unless there is one; True if it was created."""
        return self._ensure("configmaps", name, {"kind": "ConfigMap", "data": dict(values)})

    def remove_created(self) -> None:
        """Remove what this object created; what cannot be removed is logged."""
        while self._created:
            path = self._created.pop()
            try:
                self._ask(f"delete {path}", "DELETE", path)
            except ClusterError as error:
                logger.warning("%s stays: %s", path, error)

    def delete_pod(self, name: str) -> None:
        """Delete a pod as a drain or a preemption does."""
        self._ask(f"delete pod {name}", "DELETE", f"{self._place}/pods/{name}")

    def is_one_node(self) -> bool:
        """Whether all pods run on one machine, as far as anybody can tell."""
        return len(self._nodes()) <= 1

    def is_this_machine(self) -> bool:
        """Whether every node is the machine of this process, which then computes with the same processor."""
        here = BOOT_ID.read_text().strip() if BOOT_ID.is_file() else ""
        found = {str((node["status"].get("nodeInfo") or {}).get("bootID")) for node in self._nodes()}
        return bool(here) and found == {here}

    def log_tails(self, pipeline_run_id: str) -> Iterator[str]:
        """Yield the last lines of what failed or still runs of a pipeline run."""
        try:
            pods = self.cluster.pods(run=pipeline_run_id)
        except ClusterError as error:
            yield f"pods cannot be listed: {error}"
            return
        shown = [pod for pod in pods if pod.phase != "Succeeded"][-4:]
        if not pods:
            yield f"no pod with the label pipeline/runid={pipeline_run_id} in namespace {self.namespace}"
        for pod in shown:
            yield f"--- pod {pod.name} ({pod.task or 'unknown task'}): {pod.phase}, on {pod.node or 'no node'}"
            yield from (f"    {event.reason}: {event.message}" for event in self._events(pod.name)[-3:])
            try:
                yield from (f"    | {line[:500]}" for line in self.cluster.logs(pod.name, tail=_TAIL))
            except ClusterError as error:
                yield f"    no log: {error}"

    def _events(self, pod: str) -> list[Event]:
        try:
            return self.cluster.events(pod)
        except ClusterError:
            return []

    def _nodes(self) -> list[dict[str, Any]]:
        try:
            return list(self._ask("list nodes", "GET", "/api/v1/nodes").get("items") or [])
        except ClusterError as error:
            logger.info("nodes are not known: %s", error)
            return []

    def _ensure(self, resource: str, name: str, body: Mapping[str, Any]) -> bool:
        whole = {"apiVersion": "v1", **body, "metadata": {"name": name, "labels": _CREATED_BY}}
        try:
            self._call("POST", f"{self._place}/{resource}", body=whole)
        except ApiException as error:
            if error.status == 409:
                return False
            raise ClusterError(f"cannot create {resource} {name} in {self.namespace}: {_said(error)}") from error
        except HTTPError as error:
            raise ClusterError(f"cannot create {resource} {name} in {self.namespace}: {error}") from error
        self._created.append(f"{self._place}/{resource}/{name}")
        return True

    def _ask(self, what: str, method: str, path: str, *, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        try:
            found = self._call(method, path, query=query)
        except (ApiException, HTTPError) as error:
            raise ClusterError(f"cannot {what}, namespace {self.namespace}: {_said(error)}") from error
        return found if isinstance(found, dict) else {}

    def _call(self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Any = None) -> Any:
        # Plain JSON: the client's models refuse what another version of Kubernetes leaves out.
        return self.cluster._api.call_api(
            path,
            method,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": "application/json"},
            body=body,
            response_type="object",
            auth_settings=["BearerToken"],
            _return_http_data_only=True,
            _request_timeout=_TIMEOUT,
        )


def _named_context() -> str | None:
    """Return the context of a kubeconfig that is given in a pod, where the pod's own account would be taken."""
    if not os.environ.get("KUBECONFIG") or not Cluster.is_in_pod():
        return None
    try:
        return str(config.list_kube_config_contexts()[1]["name"])
    except (config.ConfigException, OSError, TypeError, KeyError):
        return None


def _said(error: Exception) -> str:
    if isinstance(error, ApiException):
        return f"{error.status} {error.reason}: {str(error.body or '')[:300]}"
    return str(error)
