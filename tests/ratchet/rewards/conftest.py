"""What the tests of rewards share."""

import pytest

from ratchet.rewards import registry


@pytest.fixture(autouse=True)
def no_registered_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test registers, no other test sees."""
    monkeypatch.setattr(registry, "_REGISTERED", {})
