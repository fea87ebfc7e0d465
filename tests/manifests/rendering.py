"""What kubectl makes of the folders of manifests/, for the tests beside this file.

Trap: a component renders only inside what it patches. It is therefore added to a copy of the overlay of a cluster, as
somebody who adapts that overlay would do it.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "manifests"
HOST = "overlays/cluster"
"""The overlay that an addon is added to."""
CONTROLLER = "addons/argo-controller"
"""The one addon that patches something else: Argo's controller, as Kubeflow Pipelines installs it."""
CLUSTER_SCOPED = {"ClusterQueue", "ClusterRole", "ClusterRoleBinding", "Namespace", "ResourceFlavor"}

Document = dict[str, Any]

FOLDERS = sorted(str(path.parent.relative_to(MANIFESTS)) for path in MANIFESTS.rglob("kustomization.yaml"))
OVERLAYS = [name for name in FOLDERS if name.startswith("overlays/") and name.count("/") == 1]
each_folder = pytest.mark.parametrize("name", FOLDERS)
each_overlay = pytest.mark.parametrize("name", OVERLAYS)


def documents(path: Path) -> list[Document]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def kustomization(name: str) -> Document:
    (content,) = documents(MANIFESTS / name / "kustomization.yaml")
    return content


@cache
def kubectl() -> str:
    """Path of the kubectl that renders: the locked one of `make`, else the one of PATH."""
    found = shutil.which("kubectl", path=str(ROOT / ".venv" / "bin")) or shutil.which("kubectl")
    if found is not None:
        return found
    missing = "no kubectl: `make .venv/bin/kubectl` brings one on Linux, or install it"
    if os.environ.get("CI") == "true":
        pytest.fail(missing)
    pytest.skip(missing)


def build(folder: Path) -> list[Document]:
    """Render a folder; a failure's message is kustomize's own."""
    done = subprocess.run(
        [kubectl(), "kustomize", str(folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, f"{folder}: {done.stderr}"
    return [document for document in yaml.safe_load_all(done.stdout) if document is not None]


@cache
def rendered(name: str) -> list[Document]:
    """What a folder renders to; an addon with the overlay that it is added to."""
    if kustomization(name)["kind"] == "Kustomization":
        return build(MANIFESTS / name)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(MANIFESTS, Path(folder) / "manifests"))
        host = copy / HOST if name != CONTROLLER else kubeflow_in(copy)
        content = yaml.safe_load((host / "kustomization.yaml").read_text())
        here = os.path.relpath(copy / name, host)
        if here not in content.setdefault("components", []):
            content["components"].append(here)
        (host / "kustomization.yaml").write_text(yaml.safe_dump(content))
        return build(host)


def kubeflow_in(copy: Path) -> Path:
    """A kustomization with as much of Kubeflow Pipelines as the controller's addon patches."""
    folder = copy / "kubeflow"
    folder.mkdir()
    container = {
        "name": "workflow-controller",
        "image": "quay.io/argoproj/workflow-controller:v4.0.8",
        "env": [{"name": "LEADER_ELECTION_IDENTITY", "value": "kept"}],
    }
    labels = {"app": "workflow-controller"}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "workflow-controller"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }
    (folder / "deployment.yaml").write_text(yaml.safe_dump(deployment))
    (folder / "kustomization.yaml").write_text(
        yaml.safe_dump({"namespace": "kubeflow", "resources": ["deployment.yaml"]})
    )
    return folder


def of_kind(found: list[Document], *kinds: str) -> list[Document]:
    return [document for document in found if document["kind"] in kinds]


def pod_templates(found: list[Document]) -> list[Document]:
    """The pod templates of a render that are this project's."""
    kinds = of_kind(found, "Deployment", "Job", "StatefulSet", "DaemonSet")
    return [one["spec"]["template"] for one in kinds if one["metadata"]["name"].startswith("ratchet-")]


def containers(template: Document) -> list[Document]:
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def values(content: Any, key: str) -> Iterator[Any]:
    """Every value under `key`, at any depth."""
    if isinstance(content, dict):
        for name, inner in content.items():
            if name == key:
                yield inner
            yield from values(inner, key)
    elif isinstance(content, list):
        for inner in content:
            yield from values(inner, key)


def strings(content: Any) -> Iterator[str]:
    if isinstance(content, dict):
        for key, inner in content.items():
            yield str(key)
            yield from strings(inner)
    elif isinstance(content, list):
        for inner in content:
            yield from strings(inner)
    else:
        yield str(content)
