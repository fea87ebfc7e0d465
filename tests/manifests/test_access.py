"""What the accounts may do: no more than is listed here, and all that the code asks of the Kubernetes API."""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ratchet.cluster.kube import Cluster
from ratchet.errors import NotAllowedError
from tests.manifests.rendering import HOST, MANIFESTS, Document, documents, each_folder, of_kind, rendered

ONLY_BY_NAME = {"secrets", "configmaps", "persistentvolumeclaims"}

Request = tuple[str, str, str, str]
"""API group, resource, verb, name."""


def allows(role: Document, request: Request) -> bool:
    """Whether a Role or ClusterRole allows a request, as Kubernetes decides it."""
    group, resource, verb, name = request
    return any(
        group in rule["apiGroups"]
        and resource in rule["resources"]
        and verb in rule["verbs"]
        and name in rule.get("resourceNames", [name])
        for rule in role["rules"]
    )


def roles_of(found: list[Document], kind: str, name: str) -> list[Document]:
    """The roles that a render binds to a subject."""
    roles = {(one["kind"], one["metadata"]["name"]): one for one in of_kind(found, "Role", "ClusterRole")}
    return [
        roles[binding["roleRef"]["kind"], binding["roleRef"]["name"]]
        for binding in of_kind(found, "RoleBinding", "ClusterRoleBinding")
        if any(subject["kind"] == kind and subject["name"] == name for subject in binding["subjects"])
    ]


@contextlib.contextmanager
def kubernetes_api() -> Iterator[tuple[Any, list[Request]]]:
    """A client of an API that forbids everything, and the requests that it was asked, as RBAC sees them."""
    from kubernetes import client

    asked: list[Request] = []

    class Forbidding(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            found = re.fullmatch(r"/api/v1/(?:namespaces/ratchet/)?([a-z]+)(?:/([a-z0-9-]+))?(/log)?", path)
            assert found, path
            kind, name, log = found.groups()
            asked.append(("", kind + (log or ""), "get" if name else "list", name or ""))
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Forbidding) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        configuration = client.Configuration(host=f"http://127.0.0.1:{server.server_address[1]}")
        configuration.retries = False
        with client.ApiClient(configuration) as api:
            yield api, asked
        server.shutdown()


def asked_by(*calls: Callable[[Any], object]) -> list[Request]:
    """The requests that calls of `Cluster` make; each is forbidden."""
    with kubernetes_api() as (api, asked):
        for call in calls:
            with pytest.raises(NotAllowedError):
                call(Cluster(api, "ratchet"))
    return asked


@each_folder
def test_no_role_has_a_wildcard_and_named_things_are_read_by_name(name):
    for role in of_kind(rendered(name), "Role", "ClusterRole"):
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            if ONLY_BY_NAME & set(rule["resources"]):
                assert rule["verbs"] == ["get"]
                assert rule["resourceNames"]


@pytest.mark.parametrize("name", ["overlays/local", HOST])
def test_a_run_may_do_what_is_listed_and_nothing_else(name):
    listed = {
        (resource, verb)
        for role in roles_of(rendered(name), "ServiceAccount", "ratchet-runner")
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert listed == {
        ("workflowtaskresults", "create"),
        ("workflowtaskresults", "patch"),
        ("configmaps", "get"),
        ("secrets", "get"),
        ("persistentvolumeclaims", "get"),
        ("pods", "get"),
        ("nodes", "list"),
    }


@pytest.mark.parametrize("name", ["overlays/local", HOST])
def test_a_run_may_read_what_preflight_reads(name):
    from pipelines import installation

    secrets = [lambda cluster, key=key: cluster.secret_keys(key) for key in installation.SECRETS]
    requests = asked_by(
        *secrets,
        lambda cluster: cluster.config_map(installation.CONFIG_MAP),
        lambda cluster: cluster.claim_exists("ratchet-compile-cache"),
        lambda cluster: cluster.nodes(),
    )
    assert len(requests) == len(secrets) + 3
    # And KFP's launcher and driver, of which the first is named in Kubeflow's own installation.
    requests += [("", "configmaps", "get", "kfp-launcher"), ("", "secrets", "get", "mlpipeline-minio-artifact")]
    requests += [("", "pods", "get", "any-pod"), ("argoproj.io", "workflowtaskresults", "patch", "any-pod")]
    roles = roles_of(rendered(name), "ServiceAccount", "ratchet-runner")
    for request in requests:
        assert any(allows(role, request) for role in roles), request
    for request in [("", "secrets", "get", "another"), ("", "secrets", "list", ""), ("", "pods", "delete", "any-pod")]:
        assert not any(allows(role, request) for role in roles), request


def test_an_operator_may_read_what_the_command_line_reads_but_no_secret():
    requests = asked_by(
        lambda cluster: cluster.pods(run="a-run"),
        lambda cluster: cluster.pods(names=["a-pod"]),
        lambda cluster: cluster.events("a-pod"),
        lambda cluster: list(cluster.logs("a-pod")),
        lambda cluster: cluster.config_map("ratchet-environment"),
        lambda cluster: cluster.claim_exists("ratchet-compile-cache"),
        lambda cluster: cluster.nodes(),
    )
    assert len(requests) == 7
    roles = roles_of(rendered(HOST), "Group", "ratchet-operators")
    for request in requests:
        assert any(allows(role, request) for role in roles), request
    listed = {verb for role in roles for rule in role["rules"] for verb in rule["verbs"]}
    assert listed == {"get", "list"}
    assert not any("secrets" in rule["resources"] for role in roles for rule in role["rules"])


def test_without_the_addon_no_cluster_role_is_asked_for():
    assert not of_kind(rendered("base"), "ClusterRole", "ClusterRoleBinding")


def test_what_an_addon_may_do_is_bound_in_the_addon():
    # A binding to a ClusterRole that is not there is allowed, and leaves nothing right.
    for name in (HOST, "overlays/local", "base"):
        own = [one for path in (MANIFESTS / name).glob("*.yaml") for one in documents(path)]
        assert not of_kind(own, "ClusterRole", "ClusterRoleBinding")
    bound = of_kind(documents(MANIFESTS / "addons/nodes/cluster-role-binding.yaml"), "ClusterRoleBinding")
    assert {subject["name"] for one in bound for subject in one["subjects"]} == {"ratchet-runner", "ratchet-operators"}


def test_the_right_to_create_pods_comes_with_its_addon_only():
    request = ("trainer.kubeflow.org", "trainjobs", "create", "")
    for name, expected in ((HOST, False), ("addons/train-jobs", True)):
        roles = roles_of(rendered(name), "ServiceAccount", "ratchet-runner")
        assert any(allows(role, request) for role in roles) is expected
