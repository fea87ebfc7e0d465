"""The image base, built and started: where a container engine works and has the base image, else skipped.

RATCHET_TEST_BASE_IMAGE names another base image with Python 3.11; BUILD_FLAGS goes to the build, for an index that has
torch's CPU build: without it, gigabytes of CUDA libraries are installed.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("podman", "docker", "buildah")
IMAGE = "localhost/ratchet-base:test"
# Any uid of group 0, no capability, nothing to write to but /tmp: what a strict cluster leaves a pod.
STRICT = ["--user=12345:0", "--read-only", "--tmpfs=/tmp:rw,mode=1777", "--network=none", "--cap-drop=ALL"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def ask(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def engine() -> str:
    installed = [name for name in ENGINES if shutil.which(name)]
    working = [name for name in installed if ask(name, "info").returncode == 0]
    if not working:
        pytest.skip(f"no container engine works here; installed: {', '.join(installed) or 'none'}")
    return working[0]


@pytest.fixture(scope="module")
def built(engine: str) -> Iterator[dict[str, Any]]:
    """What the engine says of the built image."""
    inspect = ["inspect", "--type", "image"]
    text = (ROOT / "images" / "base" / "Containerfile").read_text()
    base = os.environ.get("RATCHET_TEST_BASE_IMAGE") or text.split("ARG BASE_IMAGE=")[1].split()[0]
    if ask(engine, *inspect, base).returncode:
        pytest.skip(f"{engine} has no image {base}: pull it, or name another in RATCHET_TEST_BASE_IMAGE")
    verb = ["make", "image-base", f"ENGINE={engine}", f"BASE_IMAGE={base}", "TAG=test"]
    finished = ask(*verb, f"BUILD_FLAGS={os.environ.get('BUILD_FLAGS', '')}")
    assert finished.returncode == 0, (finished.stdout + finished.stderr)[-3000:]
    found = json.loads(ask(engine, *inspect, IMAGE).stdout)
    found = found["OCIv1"]["config"] if engine == "buildah" else found[0]["Config"]
    yield found
    ask(engine, "rmi", IMAGE)


def test_the_built_image_has_the_labels_the_user_and_the_role(built: dict[str, Any]) -> None:
    assert built["User"] == "1000:0"
    environment = dict(pair.split("=", 1) for pair in built["Env"])
    assert environment["RATCHET_IMAGE_ROLE"] == "base"
    assert environment["RATCHET_REVISION"] == built["Labels"]["org.opencontainers.image.revision"]
    assert not {name for name in environment if name.startswith("PIP_")}


def test_a_task_starts_in_it_as_any_user_of_group_zero_on_a_read_only_root(engine: str, built: dict[str, Any]) -> None:
    if engine == "buildah":
        pytest.skip("buildah starts no container with a read-only root")
    script = """
        set -e
        id
        python -m ratchet.cli --help > /tmp/help
        _KFP_RUNTIME=true python3 -m kfp.dsl.executor_main --help
        python -c 'import boto3, mlflow, pyarrow, torch, transformers; print("torch", torch.__version__)'
        for folder in /app /var /opt/venv; do if touch $folder/file; then exit 3; fi; done
        test ! -s /etc/pip.conf
    """
    finished = ask(engine, "run", "--rm", *STRICT, IMAGE, "sh", "-c", script)
    assert finished.returncode == 0, finished.stderr
    assert "uid=12345" in finished.stdout
    assert "gid=0" in finished.stdout
    assert "KFP Component Executor" in finished.stdout
