"""What lies under `submissions/`: the config that was submitted under a claim, with its grain, version and image."""

import json
from typing import Any

_TEXTS = ("submission_id", "grain", "version", "image")


def parse(body: bytes, epoch: int) -> dict[str, Any]:
    """Return the submission of `epoch`; ValueError says what keeps `body` from being it."""
    if not body:
        raise ValueError("it is empty")
    try:
        # Told nothing, json would take what is not UTF-8 for UTF-16.
        record = json.loads(body.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, found {record!r:.40}")
    if record.get("epoch") != epoch:
        raise ValueError(f"expected the submission of epoch {epoch}, found that of epoch {record.get('epoch')!r:.40}")
    kinds: list[tuple[str, Any]] = [*((name, str | None) for name in _TEXTS), ("config", dict)]
    for name, kind in kinds:
        if name in record and not isinstance(record[name], kind):
            wanted = "an object" if kind is dict else "a text"
            raise ValueError(f"{name}: expected {wanted}, found {record[name]!r:.40}")
    return record
