"""What the tests of rewards share."""

import threading
from collections.abc import Iterator

import pytest

from ratchet.rewards import endpoint, registry
from tests.ratchet.rewards.servers import Server


@pytest.fixture(autouse=True)
def no_registered_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test registers, no other test sees."""
    monkeypatch.setattr(registry, "_REGISTERED", {})


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_FIRST_PAUSE", 0.01)
