"""The sources of manifests/: what is there, that every file is used, and that no secret is kept."""

import re

import pytest

from tests.manifests.rendering import FOLDERS, MANIFESTS, documents, each_folder, kustomization, strings

FILES = sorted(path for path in MANIFESTS.rglob("*.yaml") if path.name != "kustomization.yaml")
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(MANIFESTS)))
SENSITIVE = re.compile(r"KEY|SECRET|TOKEN|PASSWORD")


def test_base_overlays_addons_and_third_parties_are_found_and_described():
    assert {"base", "overlays/cluster", "overlays/local", "third-party/mlflow", "third-party/seaweedfs"} <= set(FOLDERS)
    readme = (MANIFESTS / "README.md").read_text()
    for name in FOLDERS:
        assert name.partition("/")[2] in readme, name


@each_folder
def test_every_file_beside_a_kustomization_is_used_by_it(name):
    content = kustomization(name)
    version = {"Kustomization": "v1beta1", "Component": "v1alpha1"}[content["kind"]]
    assert content["apiVersion"] == f"kustomize.config.k8s.io/{version}"
    used = {(MANIFESTS / name / entry).resolve() for entry in content.get("resources", [])}
    used |= {(MANIFESTS / name / patch["path"]).resolve() for patch in content.get("patches", [])}
    assert {file for file in (MANIFESTS / name).glob("*.yaml") if file.name != "kustomization.yaml"} <= used


@each_folder
def test_only_overlays_set_a_namespace_and_tags(name):
    if not name.startswith("overlays/"):
        assert not {"namespace", "images", "secretGenerator"} & set(kustomization(name))
    assert "secretGenerator" not in kustomization(name)


@each_file
def test_every_document_has_a_name_of_the_project_and_no_namespace(path):
    found = documents(path)
    assert found
    for document in found:
        assert re.fullmatch(r"ratchet(-[a-z-]+)?|workflow-controller", document["metadata"]["name"])
        assert "namespace" not in document["metadata"], "overlays set the namespace"


@each_file
def test_secrets_are_named_and_never_kept(path):
    for document in documents(path):
        assert document["kind"] != "Secret"
        if document["kind"] == "ConfigMap":
            assert not [key for key in document["data"] if SENSITIVE.search(key)]
        assert not [text for text in strings(document) if re.fullmatch(r"[A-Za-z0-9+/=_-]{40,}", text)]
