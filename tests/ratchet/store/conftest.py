"""Both kinds of storage: every promise of the interface is tested on a local folder and on a real S3 server."""

from pathlib import Path

import pytest

from ratchet.store import ObjectStore, open_store


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "local" else str(request.getfixturevalue("s3_root"))


@pytest.fixture
def store(root: str) -> ObjectStore:
    return open_store(root)
