"""Fixtures that every part of the suite shares."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("ratchet", deadline=None)
hypothesis.settings.load_profile("ratchet")

BUCKET = "ratchet-tests"
ADMIN_KEYS = {"accessKey": "TESTADMIN", "secretKey": "admin-secret-of-the-tests"}
READER_KEYS = {"accessKey": "TESTREADER", "secretKey": "reader-secret-of-the-tests"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts a server as slow; fixtures that are asked for by name at run time are marked where they are."""
    for item in items:
        if "s3_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with real data and numbers computed elsewhere, beside the checkout; tests that need it skip without."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("no ../shared folder beside this checkout")
    return folder


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real S3 server (`demo.servers.S3Server`) for the whole session, with an administrator and a reader."""
    from demo.servers import IDENTITY, seaweedfs

    folder = tmp_path_factory.mktemp("seaweedfs")
    everything = ["Admin", "Read", "Write", "List", "Tagging"]
    identities = [
        {"name": "ratchet", "credentials": [ADMIN_KEYS], "actions": everything},
        {"name": "reader", "credentials": [READER_KEYS], "actions": [f"Read:{BUCKET}", f"List:{BUCKET}"]},
    ]
    (folder / IDENTITY).write_text(json.dumps({"identities": identities}))
    with seaweedfs(folder) as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture
def s3_root(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty `s3://bucket/prefix` of the real server, which this test's AWS variables point to."""
    use_s3_server(s3_server.env(), monkeypatch)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def s3_reader_environment(s3_server: Any) -> dict[str, str]:
    """AWS variables of credentials that may read the test bucket and nothing else."""
    keys = {"AWS_ACCESS_KEY_ID": READER_KEYS["accessKey"], "AWS_SECRET_ACCESS_KEY": READER_KEYS["secretKey"]}
    return {**s3_server.env(), **keys}


def use_s3_server(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Set AWS variables for one test, and shut out what this machine's own AWS configuration says."""
    quiet = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null"}
    quiet["AWS_SHARED_CREDENTIALS_FILE"] = "/dev/null"
    for name, value in {**environment, **quiet}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model of two layers and a real small tokenizer; read it, never write to it."""
    from tests.tiny_models import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
