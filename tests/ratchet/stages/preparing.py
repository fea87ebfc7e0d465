"""Preparing runs as processes of their own would, for the tests of what they share."""

from pathlib import Path

from ratchet.config import RunConfig
from ratchet.grains import loop
from ratchet.grains.session import open_session, submit
from ratchet.stages import preprocess
from ratchet.store import layout
from ratchet.store.manifest import Manifest
from ratchet.store.objects import open_store

REUSED = "data/train/is_reused"


def prepare(root: Path | str, run_id: str, config: RunConfig) -> Manifest:
    """Prepare a run in a process that remembers nothing; return the manifest of its training prompts."""
    preprocess._known_overlong.clear()
    with open_session(submit(str(root), run_id, config), config) as session:
        loop.prepare(session)
        return session.store_run.require("preprocess/train", None)


def records(root: Path | str) -> list[str]:
    """Keys of the records of prepared prompts."""
    return [info.key for info in open_store(str(root)).list_objects(layout.PREPARED)]
