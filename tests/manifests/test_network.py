"""What the network policies let through, decided as Kubernetes would from the rendered documents.

Only what the policies here use is decided: labels, ports and protocols, and destinations without a selector.
"""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.manifests.rendering import HOST, Document, of_kind, pod_templates, rendered

KUBEFLOW = "kubeflow"
RUN = {"pipelines.kubeflow.org/v2_component": "true", "pipeline/runid": "0c5f"}


@dataclass(frozen=True)
class End:
    """One end of a connection; without a namespace it is no pod."""

    namespace: str = ""
    labels: tuple[tuple[str, str], ...] = ()


def pod(namespace: str, labels: dict[str, str]) -> End:
    return End(namespace, tuple(labels.items()))


OUTSIDE = End()
DNS = pod("kube-system", {"k8s-app": "kube-dns"})
API_SERVER = pod(KUBEFLOW, {"app": "ml-pipeline"})
METADATA = pod(KUBEFLOW, {"component": "metadata-grpc-server"})
ARTIFACTS = pod(KUBEFLOW, {"app": "seaweedfs"})


def selects(selector: Document, labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= labels.items()


def admits(rule: Document, peers: str, namespace: str, other: End, port: int, protocol: str) -> bool:
    if "ports" in rule and not any(
        one["port"] == port and one.get("protocol", "TCP") == protocol for one in rule["ports"]
    ):
        return False
    if peers not in rule:
        return True
    for peer in rule[peers]:
        assert set(peer) <= {"podSelector", "namespaceSelector"}
        own = {"kubernetes.io/metadata.name": other.namespace}
        there = selects(peer["namespaceSelector"], own) if "namespaceSelector" in peer else other.namespace == namespace
        if other.namespace and there and selects(peer.get("podSelector", {}), dict(other.labels)):
            return True
    return False


def passes(policies: list[Document], end: End, direction: str, other: End, port: int, protocol: str = "TCP") -> bool:
    """Whether the policies of `end` let a connection through; a pod that none selects is open."""
    mine = [
        policy
        for policy in policies
        if policy["metadata"]["namespace"] == end.namespace
        and selects(policy["spec"]["podSelector"], dict(end.labels))
        and direction in policy["spec"]["policyTypes"]
    ]
    peers = {"Ingress": "from", "Egress": "to"}[direction]
    rules = [rule for policy in mine for rule in policy["spec"].get(direction.lower(), [])]
    return not mine or any(admits(rule, peers, end.namespace, other, port, protocol) for rule in rules)


def connects(policies: list[Document], source: End, target: End, port: int, protocol: str = "TCP") -> bool:
    leaves = passes(policies, source, "Egress", target, port, protocol)
    return leaves and passes(policies, target, "Ingress", source, port, protocol)


def of_render(name: str) -> tuple[list[Document], End]:
    """The policies of an overlay, and a pod of a run there."""
    policies = of_kind(rendered(name), "NetworkPolicy")
    return policies, pod(policies[0]["metadata"]["namespace"], RUN)


def end_of(template: Document, namespace: str) -> End:
    return pod(namespace, template["metadata"]["labels"])


@pytest.mark.parametrize("name", ["overlays/local", HOST])
def test_a_run_reaches_kubeflow_names_and_https_and_nothing_else(name):
    policies, run = of_render(name)
    allowed: list[tuple[End, int, str]] = [
        (DNS, 53, "UDP"),
        (DNS, 53, "TCP"),
        (API_SERVER, 8887, "TCP"),
        (API_SERVER, 8888, "TCP"),
        (METADATA, 8080, "TCP"),
        (ARTIFACTS, 8333, "TCP"),
        (OUTSIDE, 6443, "TCP"),
        (OUTSIDE, 443, "TCP"),
    ]
    for target, port, protocol in allowed:
        assert connects(policies, run, target, port, protocol), (target, port)
    cloud_metadata, database = OUTSIDE, pod(KUBEFLOW, {"app": "mysql"})
    for target, port in [(cloud_metadata, 80), (OUTSIDE, 22), (database, 3306), (pod("other", {}), 8080), (DNS, 9153)]:
        assert not connects(policies, run, target, port), (target, port)


@pytest.mark.parametrize("name", ["overlays/local", HOST])
def test_nothing_reaches_a_run_not_even_another_run(name):
    policies, run = of_render(name)
    for source in (run, OUTSIDE, API_SERVER, pod(run.namespace, {}), pod("other", RUN)):
        for port in (22, 443, 8000, 29500):
            assert not connects(policies, source, run, port)


def test_the_local_servers_admit_runs_and_who_else_needs_them():
    policies, run = of_render("overlays/local")
    ends = {
        end.labels[0][1]: end
        for end in (end_of(one, run.namespace) for one in pod_templates(rendered("overlays/local")))
    }
    assert set(ends) == {"ratchet-bucket", "ratchet-mlflow", "ratchet-seaweedfs"}
    store, tracking, bucket = ends["ratchet-seaweedfs"], ends["ratchet-mlflow"], ends["ratchet-bucket"]
    assert connects(policies, run, store, 8333)
    assert connects(policies, bucket, store, 8333)
    assert connects(policies, run, tracking, 5000)
    assert connects(policies, API_SERVER, tracking, 5000)
    for source in (pod(run.namespace, {"app": "anything"}), pod("other", RUN), OUTSIDE):
        assert not connects(policies, source, store, 8333)
        assert not connects(policies, source, tracking, 5000)
    # The master's and the filer's ports are closed, and the servers call nobody.
    assert not connects(policies, run, store, 9333)
    assert not connects(policies, store, OUTSIDE, 443)
    assert not connects(policies, tracking, OUTSIDE, 443)


def test_the_services_of_a_namespace_are_what_its_policies_name():
    found = rendered("overlays/local")
    ports = {port["port"] for service in of_kind(found, "Service") for port in service["spec"]["ports"]}
    named: set[Any] = set()
    for policy in of_kind(found, "NetworkPolicy"):
        if policy["metadata"]["name"] != "ratchet-runs-kubeflow":
            rules = [*policy["spec"].get("ingress", []), *policy["spec"].get("egress", [])]
            named |= {port["port"] for rule in rules for port in rule["ports"]}
    assert named == ports | {443}


def test_pods_of_other_kinds_are_left_alone():
    policies, run = of_render(HOST)
    assert connects(policies, pod(run.namespace, {"app": "notebook"}), OUTSIDE, 80)
