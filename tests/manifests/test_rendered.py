"""Every folder of manifests/ as kubectl renders it: Kubernetes' own schemas, and the rules of this project."""

import copy
import json
import re
from collections.abc import Callable

import jsonschema
import kubernetes_validate
import pytest

from tests.manifests.queues import KUEUE, QUEUES
from tests.manifests.rendering import (
    CLUSTER_SCOPED,
    CONTROLLER,
    HOST,
    MANIFESTS,
    Document,
    containers,
    each_folder,
    each_overlay,
    kustomization,
    of_kind,
    pod_templates,
    rendered,
    values,
)

# The oldest version that knows everything that is used, the one of the live notes, and the newest that has schemas.
VERSIONS = ("1.30", "1.36", "1.37")
GIVEN_SECRETS = {"ratchet-object-store", "ratchet-tokens", "mlpipeline-minio-artifact"}
"""Made by an operator, the third by Kubeflow Pipelines."""


def refusals(document: Document, version: str) -> str:
    """What is wrong with a document; empty where its schema takes it, unknown fields refused."""
    if document["apiVersion"] == KUEUE:
        found = jsonschema.Draft202012Validator(QUEUES[document["kind"]]).iter_errors(document)
        return "; ".join(error.message for error in found)
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    return ""


@each_folder
@pytest.mark.parametrize("version", VERSIONS)
def test_every_folder_renders_to_documents_that_kubernetes_knows(name, version):
    found = rendered(name)
    assert found
    for document in found:
        assert not refusals(document, version), (document["kind"], document["metadata"]["name"])
    keys = [(document["kind"], document["metadata"]["name"]) for document in found]
    assert len(keys) == len(set(keys))


def misspelt_port(found: list[Document]) -> Document:
    (policy,) = (one for one in of_kind(found, "NetworkPolicy") if one["metadata"]["name"] == "ratchet-runs-services")
    policy["spec"]["egress"][0]["prots"] = policy["spec"]["egress"][0].pop("ports")
    return policy


def misspelt_security(found: list[Document]) -> Document:
    deployment = of_kind(found, "Deployment")[0]
    deployment["spec"]["template"]["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalaton"] = False
    return deployment


def misspelt_verbs(found: list[Document]) -> Document:
    role = of_kind(found, "Role")[0]
    role["rules"][0]["verb"] = role["rules"][0].pop("verbs")
    return role


def text_for_a_number(found: list[Document]) -> Document:
    job = of_kind(found, "Job")[0]
    job["spec"]["backoffLimit"] = "6"
    return job


@pytest.mark.parametrize("plant", [misspelt_port, misspelt_security, misspelt_verbs, text_for_a_number])
def test_a_planted_mistake_is_refused(plant: Callable[[list[Document]], Document]):
    found = copy.deepcopy(rendered("overlays/local"))
    assert not any(refusals(document, "1.36") for document in found)
    assert refusals(plant(found), "1.36")


@pytest.mark.parametrize(("right", "wrong"), [("nominalQuota", "nominalQota"), ('"8"', "[8]"), ("Never", "Perhaps")])
def test_a_mistake_in_a_queue_is_refused(right, wrong):
    (queue,) = of_kind(rendered("addons/kueue/quota"), "ClusterQueue")
    text = json.dumps(queue)
    assert right in text
    assert refusals(json.loads(text.replace(right, wrong)), "1.36")


@each_overlay
def test_an_overlay_puts_everything_into_its_namespace(name):
    wanted = kustomization(name)["namespace"]
    for document in rendered(name):
        if document["kind"] in CLUSTER_SCOPED:
            assert "namespace" not in document["metadata"]
        else:
            assert document["metadata"]["namespace"] == wanted
    subjects = [subject for subject in values(rendered(name), "subjects") for subject in subject]
    accounts = [subject for subject in subjects if subject["kind"] == "ServiceAccount"]
    assert accounts
    assert {subject["namespace"] for subject in accounts} == {wanted}


@each_folder
def test_every_image_has_a_tag_that_does_not_move(name):
    if name.startswith("overlays/") or kustomization(name)["kind"] == "Component":
        for template in pod_templates(rendered(name)):
            for container in containers(template):
                assert re.search(r":[0-9v][^:/]*$|@sha256:[0-9a-f]{64}$", container["image"]), container["image"]
    assert not [image for image in values(rendered(name), "image") if image.endswith(":latest")]


@each_folder
def test_every_pod_meets_the_restricted_standard(name):
    for template in pod_templates(rendered(name)):
        pod = template["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & set(pod)
        kinds = {kind for volume in pod.get("volumes", []) for kind in set(volume) - {"name"}}
        assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(template):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert not {"privileged", "procMount", "runAsUser", "runAsNonRoot", "seccompProfile"} & set(context)
            assert not [port for port in container.get("ports", []) if "hostPort" in port]


@each_folder
def test_every_pod_writes_to_volumes_only_has_a_memory_limit_and_no_token(name):
    for template in pod_templates(rendered(name)):
        assert template["spec"]["automountServiceAccountToken"] is False
        for container in containers(template):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert "memory" in container["resources"]["limits"]
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            assert mounts == {volume["name"] for volume in template["spec"]["volumes"]}
            if "ports" in container:
                assert "readinessProbe" in container


@each_folder
def test_whatever_a_pod_or_a_binding_names_is_in_the_render_or_is_given(name):
    found = rendered(name)
    names = {(one["kind"], one["metadata"]["name"]) for one in found}
    readme = (MANIFESTS / "README.md").read_text()
    for reference in values(found, "secretKeyRef"):
        assert reference["name"] in GIVEN_SECRETS
        assert reference["name"] in readme
    wanted = {("ConfigMap", one["name"]) for one in values(found, "configMapKeyRef")}
    wanted |= {("PersistentVolumeClaim", one["claimName"]) for one in values(found, "persistentVolumeClaim")}
    wanted |= {("ServiceAccount", one) for one in values(found, "serviceAccountName")}
    for binding in of_kind(found, "RoleBinding", "ClusterRoleBinding"):
        wanted.add((binding["roleRef"]["kind"], binding["roleRef"]["name"]))
        wanted |= {("ServiceAccount", one["name"]) for one in binding["subjects"] if one["kind"] == "ServiceAccount"}
    assert wanted <= names
    for reference in values(found, "configMapKeyRef"):
        (config_map,) = (one for one in of_kind(found, "ConfigMap") if one["metadata"]["name"] == reference["name"])
        assert reference["key"] in config_map["data"]


@each_folder
def test_a_sensitive_variable_comes_from_a_secret(name):
    for template in pod_templates(rendered(name)):
        for container in containers(template):
            for variable in container.get("env", []):
                if re.search(r"KEY|SECRET|TOKEN|PASSWORD", variable["name"]):
                    assert set(variable["valueFrom"]) == {"secretKeyRef"}


@each_folder
def test_a_selector_finds_its_pods_and_a_service_a_port_of_theirs(name):
    found = rendered(name)
    templates = pod_templates(found)
    for deployment in of_kind(found, "Deployment"):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for service in of_kind(found, "Service"):
        selected = [
            one for one in templates if service["spec"]["selector"].items() <= one["metadata"]["labels"].items()
        ]
        assert len(selected) == 1
        ports = {port["name"] for one in containers(selected[0]) for port in one["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_pipelines_and_manifests_agree_on_every_name():
    from pipelines import installation

    assert set(installation.SECRETS) == GIVEN_SECRETS - {"mlpipeline-minio-artifact"}
    for reference in values(rendered("overlays/local"), "secretKeyRef"):
        assert reference["key"] in installation.SECRETS[reference["name"]]
    readme = (MANIFESTS / "README.md").read_text()
    for keys in installation.SECRETS.values():
        assert all(f"`{key}`" in readme for key in keys)
    for name in ("overlays/local", HOST):
        (config_map,) = of_kind(rendered(name), "ConfigMap")
        assert config_map["metadata"]["name"] == installation.CONFIG_MAP
        assert set(config_map["data"]) <= set(installation.ENVIRONMENT)


def test_the_compile_cache_is_prepared_where_pipelines_mount_it():
    from pipelines import installation

    found = rendered("addons/compile-cache")
    (template,) = pod_templates(found)
    assert template["spec"]["securityContext"]["fsGroup"] == 0
    (container,) = template["spec"]["containers"]
    (mount,) = container["volumeMounts"]
    assert mount["mountPath"] == installation.COMPILE_CACHE
    assert installation.COMPILE_CACHE in container["args"][0]
    (claim,) = of_kind(found, "PersistentVolumeClaim")
    readme = (MANIFESTS / "README.md").read_text()
    assert f"`RATCHET_COMPILE_CACHE_CLAIM={claim['metadata']['name']}`" in readme


def test_the_addresses_of_the_local_overlay_are_services_of_its_third_parties():
    found = rendered("overlays/local")
    (environment,) = of_kind(found, "ConfigMap")
    services = {
        f"http://{one['metadata']['name']}:{port['port']}"
        for one in of_kind(found, "Service")
        for port in one["spec"]["ports"]
    }
    assert {environment["data"][key] for key in ("AWS_ENDPOINT_URL", "MLFLOW_TRACKING_URI")} == services


def test_a_queue_leads_to_a_quota_for_the_overlay_s_namespace():
    (local,) = of_kind(rendered("addons/kueue"), "LocalQueue")
    quota = rendered("addons/kueue/quota")
    (queue,) = of_kind(quota, "ClusterQueue")
    assert local["spec"]["clusterQueue"] == queue["metadata"]["name"]
    selector = queue["spec"]["namespaceSelector"]["matchLabels"]
    assert selector == {"kubernetes.io/metadata.name": local["metadata"]["namespace"]}
    flavors = {one["metadata"]["name"] for one in of_kind(quota, "ResourceFlavor")}
    for group in queue["spec"]["resourceGroups"]:
        for flavor in group["flavors"]:
            assert flavor["name"] in flavors
            assert [one["name"] for one in flavor["resources"]] == group["coveredResources"]


def test_the_namespace_of_the_cluster_overlay_is_held_to_the_restricted_standard():
    (namespace,) = rendered("overlays/cluster/namespace")
    assert namespace["metadata"]["name"] == kustomization(HOST)["namespace"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_the_controller_s_addon_adds_one_variable_and_keeps_the_rest():
    (deployment,) = rendered(CONTROLLER)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert {one["name"]: one["value"] for one in container["env"]} == {
        "LEADER_ELECTION_IDENTITY": "kept",
        "DEFAULT_REQUEUE_TIME": "1s",
    }
    assert container["image"] == "quay.io/argoproj/workflow-controller:v4.0.8"


def test_two_installations_in_one_cluster_do_not_share_a_binding():
    for name in ("overlays/local", HOST):
        bindings = of_kind(rendered(name), "ClusterRoleBinding")
        assert bindings
        for binding in bindings:
            assert binding["metadata"]["name"].endswith(f".{kustomization(name)['namespace']}")
