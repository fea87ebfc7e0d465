"""The manifests, read as kustomize would find them but not rendered: paths, kinds, and the rules that every pod and
role must meet.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
KUSTOMIZATIONS = sorted(MANIFESTS.rglob("kustomization.yaml"))
FILES = sorted(path for path in MANIFESTS.rglob("*.yaml") if path.name != "kustomization.yaml")
OVERLAYS = [path for path in KUSTOMIZATIONS if "overlays" in path.parts]
API_VERSIONS = {
    "ConfigMap": "v1",
    "Deployment": "apps/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PersistentVolumeClaim": "v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "Service": "v1",
    "ServiceAccount": "v1",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(MANIFESTS))


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def resources_of(kustomization: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every resource that a kustomization reaches, folders followed."""
    for entry in documents(kustomization)[0].get("resources", []):
        target = (kustomization.parent / entry).resolve()
        if target.is_dir():
            yield from resources_of(target / "kustomization.yaml")
        else:
            yield from ((target, document) for document in documents(target))


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)
    else:
        yield str(value)


each_kustomization = pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=name_of)
each_file = pytest.mark.parametrize("path", FILES, ids=name_of)
DEPLOYMENTS = [(path, one) for path in FILES for one in documents(path) if one["kind"] == "Deployment"]
each_deployment = pytest.mark.parametrize(
    "deployment", [one for _, one in DEPLOYMENTS], ids=[name_of(path) for path, _ in DEPLOYMENTS]
)


def test_the_base_both_overlays_and_both_third_parties_are_found():
    assert [name_of(path.parent) for path in KUSTOMIZATIONS] == [
        "base",
        "overlays/cluster",
        "overlays/local",
        "third-party/mlflow",
        "third-party/seaweedfs",
    ]


@each_kustomization
def test_every_path_of_a_kustomization_exists_and_every_file_beside_it_is_used(path):
    (content,) = documents(path)
    assert content["apiVersion"] == "kustomize.config.k8s.io/v1beta1"
    assert content["kind"] == "Kustomization"
    used = {(path.parent / entry).resolve() for entry in content["resources"]}
    used |= {(path.parent / patch["path"]).resolve() for patch in content.get("patches", [])}
    for target in used:
        assert target.is_file() or (target / "kustomization.yaml").is_file(), target
    assert {file for file in path.parent.glob("*.yaml") if file != path} <= used


@each_kustomization
def test_no_resource_appears_twice(path):
    keys = [(document["kind"], document["metadata"]["name"]) for _, document in resources_of(path)]
    assert keys
    assert len(keys) == len(set(keys))


@each_kustomization
def test_a_patch_names_a_resource_that_is_there(path):
    keys = {(document["kind"], document["metadata"]["name"]) for _, document in resources_of(path)}
    for patch in documents(path)[0].get("patches", []):
        for document in documents(path.parent / patch["path"]):
            assert (document["kind"], document["metadata"]["name"]) in keys


@each_file
def test_every_document_is_a_known_kind_with_a_name_and_no_namespace(path):
    found = documents(path)
    assert found
    for document in found:
        assert document["apiVersion"] == API_VERSIONS[document["kind"]]
        assert re.fullmatch(r"ratchet-[a-z-]+", document["metadata"]["name"])
        assert "namespace" not in document["metadata"], "overlays set the namespace"


@pytest.mark.parametrize("path", OVERLAYS, ids=name_of)
def test_an_overlay_sets_a_namespace_and_pins_every_image_of_ours(path):
    (content,) = documents(path)
    assert content["namespace"]
    pinned = {image["name"]: image["newTag"] for image in content.get("images", [])}
    for _, document in resources_of(path):
        for container in containers(document):
            image = container["image"]
            tag = pinned.get(image) or image.partition(":")[2]
            assert tag, f"{image} has no tag"
            assert tag != "latest"


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    if document["kind"] != "Deployment":
        return []
    pod = document["spec"]["template"]["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]


@each_deployment
def test_every_pod_meets_the_restricted_standard(deployment):
    pod = deployment["spec"]["template"]["spec"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert all(
        set(volume) - {"name"} <= {"persistentVolumeClaim", "emptyDir", "configMap"} for volume in pod["volumes"]
    )
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in containers(deployment):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
        assert "readinessProbe" in container
        assert not [port for port in container["ports"] if "hostPort" in port]


@each_deployment
def test_selectors_volumes_services_and_policies_fit_the_pod(deployment):
    name, template = deployment["metadata"]["name"], deployment["spec"]["template"]
    labels, pod = template["metadata"]["labels"], template["spec"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    every = [document for path in FILES for document in documents(path)]
    (service,) = [one for one in every if one["kind"] == "Service" and one["metadata"]["name"] == name]
    (policy,) = [one for one in every if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == name]
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"] == labels
    ports = {port["name"]: port["containerPort"] for one in containers(deployment) for port in one["ports"]}
    assert [ports[port["targetPort"]] for port in service["spec"]["ports"]] == [
        port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]
    ]
    claims = {one["metadata"]["name"] for one in every if one["kind"] == "PersistentVolumeClaim"}
    used = {one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"] if "persistentVolumeClaim" in one}
    assert used <= claims
    for container in containers(deployment):
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@each_file
def test_secrets_are_named_and_never_kept(path):
    for document in documents(path):
        assert document["kind"] != "Secret"
        for container in containers(document):
            for variable in container.get("env", []):
                if re.search(r"KEY|SECRET|TOKEN|PASSWORD", variable["name"]):
                    assert set(variable) == {"name", "valueFrom"}
                    assert variable["valueFrom"]["secretKeyRef"]["name"] == "ratchet-object-store"
        if document["kind"] == "ConfigMap":
            assert not [key for key in document["data"] if re.search(r"KEY|SECRET|TOKEN|PASSWORD", key)]
        assert not [text for text in strings(document) if re.fullmatch(r"[A-Za-z0-9+/=_-]{40,}", text)]


@each_kustomization
def test_no_kustomization_generates_a_secret(path):
    assert "secretGenerator" not in documents(path)[0]


def test_the_runner_may_do_only_what_is_listed_and_never_reads_every_secret():
    (role,) = documents(MANIFESTS / "base" / "role.yaml")
    for rule in role["rules"]:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        if {"secrets", "configmaps", "persistentvolumeclaims"} & set(rule["resources"]):
            assert rule["verbs"] == ["get"]
            assert rule["resourceNames"]
    (binding,) = documents(MANIFESTS / "base" / "role-binding.yaml")
    (account,) = documents(MANIFESTS / "base" / "service-account.yaml")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"]}]


def test_the_addresses_of_the_local_overlay_are_services_of_its_third_parties():
    (environment,) = documents(MANIFESTS / "overlays" / "local" / "environment.yaml")
    services = {
        f"http://{document['metadata']['name']}:{port['port']}"
        for _, document in resources_of(MANIFESTS / "overlays" / "local" / "kustomization.yaml")
        if document["kind"] == "Service"
        for port in document["spec"]["ports"]
    }
    assert set(environment["data"].values()) == services
