"""What the Kubernetes API says about the cluster that a run is on: secrets, volumes, nodes, pods, events and logs.

Everything is read with one request and a time limit. Trap: that something is not there and that this account may not
read it are two answers: None (or an empty list) is the first, NotAllowedError the second.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ratchet.cluster.records import Condition, ContainerState, Event, Node, Pod, event_of, node_of, pod_of
from ratchet.errors import ClusterError, NotAllowedError

__all__ = ["Cluster", "Condition", "ContainerState", "Event", "Node", "Pod"]

TIMEOUT_S = 10
"""Of one request, from the first packet to the answer."""
QUIET_S = 60
"""How long a log that is followed may say nothing before the connection is made again."""
RUN_LABEL = "pipeline/runid"
"""Label of every pod of a KFP run; its value is the run's id."""
DEFAULT_NAMESPACE = "kubeflow"
GROUPS = {"workflows": "argoproj.io/v1alpha1"}
"""API group and version of the resources that are not Kubernetes' own."""

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Cluster:
    """The Kubernetes API as a pod's service account or a kubeconfig reaches it. Reads only.

    Every method raises ClusterError where the API cannot be reached or refuses, NotAllowedError where it forbids.
    """

    def __init__(self, api: Any, namespace: str) -> None:
        """`api` is a `kubernetes.client.ApiClient`."""
        self._api = api
        self.namespace = namespace

    @classmethod
    def open(cls, *, namespace: str | None = None, context: str | None = None) -> "Cluster":
        """Open the API of the pod that this process runs in, or of a kubeconfig's context where KUBECONFIG names one.

        The namespace is `namespace`, else RATCHET_POD_NAMESPACE, that of the service account, that of the kubeconfig's
        context, or "kubeflow". ClusterError where there is neither a service account nor a kubeconfig.
        """
        from kubernetes import client

        configuration = client.Configuration()
        configuration.retries = False
        named = os.environ.get("KUBECONFIG", "").split(os.pathsep)
        if context is None and cls.is_in_pod() and not any(Path(one).is_file() for one in named if one):
            own = _use_service_account(configuration)
        else:
            own = _use_kubeconfig(configuration, context)
        chosen = namespace or os.environ.get("RATCHET_POD_NAMESPACE") or own or DEFAULT_NAMESPACE
        return cls(client.ApiClient(configuration), chosen)

    @staticmethod
    def is_in_pod() -> bool:
        """Whether this process runs in a pod that has a service account's token."""
        return bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and (_ACCOUNT / "token").is_file()

    def secret_keys(self, name: str) -> set[str] | None:
        """Return the keys of a secret, never their values; None if there is no such secret."""
        found = self._read("secrets", name)
        return None if found is None else set(found.get("data") or {})

    def config_map(self, name: str) -> dict[str, str] | None:
        """Return what a config map holds; None if there is no such config map."""
        found = self._read("configmaps", name)
        return None if found is None else dict(found.get("data") or {})

    def claim_exists(self, name: str) -> bool:
        """Whether there is a persistent volume claim of that name; a claim that waits for its first pod counts."""
        return self._read("persistentvolumeclaims", name) is not None

    def nodes(self) -> list[Node]:
        """Return every node of the cluster."""
        return [node_of(item) for item in self._list("nodes", namespaced=False)]

    def pods(self, *, run: str | None = None, names: Sequence[str] | None = None) -> list[Pod]:
        """Return the pods of a KFP run, or those named that exist; without either all of the namespace."""
        if names is not None:
            found = [item for name in names if (item := self._read("pods", name)) is not None]
        else:
            found = self._list("pods", query={} if run is None else {"labelSelector": f"{RUN_LABEL}={run}"})
        return [pod_of(item) for item in found]

    def events(self, pod_name: str) -> list[Event]:
        """Return what happened to a pod, the latest last; Kubernetes forgets events after an hour."""
        selector = f"involvedObject.kind=Pod,involvedObject.name={pod_name}"
        found = [event_of(item) for item in self._list("events", query={"fieldSelector": selector})]
        return sorted(found, key=lambda event: event.last)

    def workflows(self, run: str) -> list[dict[str, Any]]:
        """Return the Argo workflows of a KFP run as the API has them: one, or none once it is cleaned up."""
        return self._list("workflows", query={"labelSelector": f"{RUN_LABEL}={run}"})

    def logs(
        self, pod_name: str, *, container: str = "main", tail: int | None = None, follow: bool = False
    ) -> Iterator[str]:
        """Yield the lines of a container's log, its last `tail` ones; with `follow` on until the container ends.

        ClusterError where there is no such pod, or its container has not started yet.
        """
        last = ""
        query = {"container": container} | ({} if tail is None else {"tailLines": str(tail)})
        if not follow:
            yield from self._log_lines(pod_name, query, TIMEOUT_S)
            return
        from urllib3.exceptions import ReadTimeoutError

        while True:
            try:
                for line in self._log_lines(pod_name, query | {"follow": "true", "timestamps": "true"}, QUIET_S):
                    # Fixed-width UTC times, so that they compare as text.
                    stamp, _, text = line.partition(" ")
                    if stamp > last:
                        last = stamp
                        yield text
                return
            except ReadTimeoutError:
                query = {"container": container} | ({"sinceTime": last} if last else {})

    def _log_lines(self, pod_name: str, query: Mapping[str, str], quiet_s: int) -> Iterator[str]:
        from urllib3.exceptions import HTTPError, ReadTimeoutError

        response = self._request("pods/log", pod_name, query, timeout=(TIMEOUT_S, quiet_s))
        if response is None:
            raise ClusterError(f"no pod {pod_name} in namespace {self.namespace}")
        try:
            for line in response:
                yield line.decode("utf-8", "replace").rstrip("\n")
        except ReadTimeoutError:
            if quiet_s == TIMEOUT_S:
                raise ClusterError(f"the log of pod {pod_name} broke off: nothing came for {quiet_s} s") from None
            raise
        except HTTPError as error:
            raise ClusterError(f"the log of pod {pod_name} broke off: {error}") from error
        finally:
            response.release_conn()

    def _read(self, resource: str, name: str) -> dict[str, Any] | None:
        response = self._request(resource, name, {})
        return None if response is None else self._json(response, resource)

    def _list(
        self, resource: str, *, query: Mapping[str, str] | None = None, namespaced: bool = True
    ) -> list[dict[str, Any]]:
        response = self._request(resource, None, query or {}, namespaced=namespaced)
        if response is None:
            raise ClusterError(f"{self._api.configuration.host} has no {resource}: is this a Kubernetes API?")
        return list(self._json(response, resource).get("items") or [])

    def _json(self, response: Any, resource: str) -> dict[str, Any]:
        from urllib3.exceptions import HTTPError

        try:
            found = json.loads(response.data)
        except HTTPError as error:
            raise ClusterError(f"the Kubernetes API's answer about {resource} broke off: {error}") from error
        except ValueError as error:
            excerpt = response.data[:80].decode("utf-8", "replace")
            raise ClusterError(f"the Kubernetes API answered about {resource} with no JSON: {excerpt!r}") from error
        if not isinstance(found, dict):
            raise ClusterError(f"the Kubernetes API answered about {resource} with no object: {found!r:.80}")
        return found

    def _request(
        self,
        resource: str,
        name: str | None,
        query: Mapping[str, str],
        *,
        namespaced: bool = True,
        timeout: tuple[int, int] | None = None,
    ) -> Any:
        """Return the response, whose body is still to be read; None where the API says 404."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        kind, _, part = resource.partition("/")
        group = GROUPS.get(kind)
        path = f"{f'/apis/{group}' if group else '/api/v1'}/{'namespaces/{namespace}/' if namespaced else ''}{kind}"
        path += ("/{name}" if name is not None else "") + (f"/{part}" if part else "")
        given = {"namespace": self.namespace} if namespaced else {}
        host = self._api.configuration.host
        try:
            return self._api.call_api(
                path,
                "GET",
                path_params=given | ({} if name is None else {"name": name}),
                query_params=list(query.items()),
                header_params={"Accept": "*/*" if part == "log" else "application/json"},
                auth_settings=["BearerToken"],
                _preload_content=False,
                _return_http_data_only=True,
                _request_timeout=timeout or TIMEOUT_S,
            )
        except ApiException as error:
            if error.status == 404:
                return None
            raise self._refusal(error, resource, name, namespaced) from error
        except (HTTPError, OSError) as error:
            raise ClusterError(f"the Kubernetes API at {host} cannot be reached: {_innermost(error)}") from error

    def _refusal(self, error: Any, resource: str, name: str | None, namespaced: bool) -> ClusterError:
        message = _message_of(error)
        what = resource if name is None else f"{resource} {name}"
        if error.status == 403:
            verb = "get" if name is not None else "list"
            where, kind = (f"namespace {self.namespace}", "Role") if namespaced else ("the cluster", "ClusterRole")
            group = GROUPS.get(resource, "").partition("/")[0]
            return NotAllowedError(
                f"this account may not {verb} {what} in {where}; a rule of a {kind} allows it: "
                f'apiGroups ["{group}"], resources ["{resource}"], verbs ["{verb}"] ({message})'
            )
        host = self._api.configuration.host
        if error.status == 401:
            return ClusterError(f"the Kubernetes API at {host} does not accept this account's token: {message}")
        if not error.status:
            return ClusterError(f"the Kubernetes API at {host} cannot be reached: {message}")
        return ClusterError(f"the Kubernetes API at {host} answered {error.status} about {what}: {message}")


def _use_service_account(configuration: Any) -> str | None:
    """Fill in host, CA and token of the pod's service account; return its namespace."""
    from kubernetes.config import ConfigException
    from kubernetes.config.incluster_config import InClusterConfigLoader

    try:
        InClusterConfigLoader(
            token_filename=str(_ACCOUNT / "token"), cert_filename=str(_ACCOUNT / "ca.crt")
        ).load_and_set(configuration)
    except (ConfigException, OSError) as error:
        raise ClusterError(f"the service account in {_ACCOUNT} cannot be used: {error}") from error
    namespace = _ACCOUNT / "namespace"
    return namespace.read_text().strip() if namespace.is_file() else None


def _use_kubeconfig(configuration: Any, context: str | None) -> str | None:
    """Fill in what the kubeconfig's context says; return its namespace."""
    import yaml
    from kubernetes import config

    named = os.environ.get("KUBECONFIG")
    places = named.split(os.pathsep) if named else [str(Path.home() / ".kube" / "config")]
    if not any(Path(place).expanduser().is_file() for place in places if place):
        raise ClusterError(
            "no Kubernetes API to ask: this is no pod with a service account, and there is no kubeconfig at "
            f"{' or '.join(places)} (KUBECONFIG names one)"
        )
    file = os.pathsep.join(places)
    try:
        contexts, active = config.list_kube_config_contexts(file)
        config.load_kube_config(file, context=context, client_configuration=configuration)
    except (config.ConfigException, OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ClusterError(f"the kubeconfig {file} cannot be used: {error}") from error
    chosen = active if context is None else next(one for one in contexts if one["name"] == context)
    namespace = (chosen.get("context") or {}).get("namespace")
    return str(namespace) if namespace else None


def _message_of(error: Any) -> str:
    """What the API's Status object says, or the reason where the body is none."""
    body = error.body.decode("utf-8", "replace") if isinstance(error.body, bytes) else str(error.body or "")
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if isinstance(found, dict) and found.get("message"):
        return str(found["message"])
    return body.strip()[:200] or " ".join(str(error.reason).split())


def _innermost(error: BaseException) -> str:
    """The cause, without the libraries' wrapping."""
    while isinstance(inner := error.__cause__ or error.__context__ or getattr(error, "reason", None), BaseException):
        error = inner
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
