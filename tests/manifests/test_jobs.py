"""The programs that jobs carry, run as they stand in the manifests."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

from tests.manifests.rendering import MANIFESTS, documents


def script(file: str) -> tuple[list[str], dict[str, str]]:
    """Command line and fixed variables of a job's only container."""
    (job,) = documents(MANIFESTS / file)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][0] == "python"
    fixed = {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}
    return [sys.executable, *container["command"][1:], *container["args"]], fixed


def test_the_bucket_is_made_once_and_a_second_time_changes_nothing(s3_server):
    command, fixed = script("overlays/local/bucket.yaml")
    # A name of its own: other tests share the server.
    name = f"ratchet-{uuid.uuid4().hex}"
    assert command[-1].count('Bucket="ratchet"') == 1
    command[-1] = command[-1].replace('Bucket="ratchet"', f'Bucket="{name}"')
    environment = {**os.environ, **s3_server.env(), **fixed}
    client = s3_server.client()
    for _ in range(2):
        subprocess.run(command, env=environment, check=True, timeout=120)
        client.put_object(Bucket=name, Key="kept", Body=b"1")
    assert [one["Key"] for one in client.list_objects_v2(Bucket=name)["Contents"]] == ["kept"]


def test_a_server_that_refuses_the_keys_fails_the_job(s3_server):
    command, fixed = script("overlays/local/bucket.yaml")
    environment = {**os.environ, **s3_server.env(), **fixed, "AWS_SECRET_ACCESS_KEY": "wrong"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    assert "SignatureDoesNotMatch" in done.stderr


def test_a_volume_that_can_be_written_passes_and_another_fails_the_job(tmp_path: Path):
    command, _ = script("addons/compile-cache/prepare.yaml")
    before = command[-1]
    command[-1] = before.replace("/var/cache/ratchet", str(tmp_path))
    subprocess.run(command, check=True, timeout=60)
    assert len(list(tmp_path.iterdir())) == 1
    command[-1] = before.replace("/var/cache/ratchet", "/proc")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "/proc/.writable" in done.stderr
