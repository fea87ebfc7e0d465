"""Fixtures that every part of the suite shares."""

import gc
import importlib
import json
import logging
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from ratchet.algorithms.catalog import ADVANTAGES, POLICY_LOSSES
from ratchet.rewards import registry

if TYPE_CHECKING:
    from tests.warm import Warm

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("ratchet", deadline=None)
hypothesis.settings.load_profile("ratchet")

BUCKET = "ratchet-tests"
ADMIN_KEYS = {"accessKey": "TESTADMIN", "secretKey": "admin-secret-of-the-tests"}
READER_KEYS = {"accessKey": "TESTREADER", "secretKey": "reader-secret-of-the-tests"}

LONGEST = (
    "tests/chaos/test_alone.py",
    "tests/pipelines/test_e2e_rehearsal.py",
    "tests/ratchet/engines/test_sampler_vllm.py",
    "tests/test_secrets.py",
    "tests/pipelines/test_stage_grain.py",
    "tests/pipelines/test_kill_and_resume.py",
    "tests/demo/test_servers.py",
    "tests/ratchet/grains/test_distributed.py",
)
"""Files of more than half a minute, the longest first."""
SLOW_MARKERS = ("slow", "vllm", "e2e")


# What is imported stays, and there are a million objects of it: the collector looks at them neither while they come nor
# afterwards.
gc.disable()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import the pipelines before anything else in a process that takes part in the whole suite.

    For every setting of a task kfp calls inspect.stack(), which goes through all modules that are imported: with torch
    and transformers among them the same import takes five times as long.
    """
    if hasattr(session.config, "workerinput"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("pipelines.compile")


def pytest_collection_finish() -> None:
    """Let the collector look at what the tests make."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts a server as slow; fixtures that are asked for by name at run time are marked where they are."""
    for item in items:
        if "s3_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):
        # The files of fast tests come first, so that most faults show early; then the longest, since one that began
        # last would work alone in the end.
        slow = {_file(item) for item in items if any(item.get_closest_marker(name) for name in SLOW_MARKERS)}
        places = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(_file(item), len(places)) if _file(item) in slow else -1)


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


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


@pytest.fixture(autouse=True)
def another_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a program sets for its process, the next test does not see: its log's level, and what it registers."""
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    for catalog in (ADVANTAGES, POLICY_LOSSES):
        monkeypatch.setattr(catalog, "_entries", dict(catalog._entries))
    level = logging.getLogger("ratchet").level
    yield
    logging.getLogger("ratchet").setLevel(level)


@pytest.fixture(scope="session")
def warm() -> Iterator["Warm"]:
    """A process whose forks are Python programs that need not import anything."""
    from tests.warm import Warm

    process = Warm()
    yield process
    process.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model of two layers and a real small tokenizer; read it, never write to it."""
    from tests.tiny_models import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
