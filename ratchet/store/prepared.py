"""Where prompts were prepared before: records beside the runs, so that equal prompts are prepared once for all runs.

Trap: a record only saves time. What it names may be gone or damaged by now, so that every byte is compared with its
digest, and whoever finds a difference prepares the prompts anew and replaces the record.
"""

import json
from dataclasses import dataclass

from ratchet.errors import StoreError
from ratchet.store import layout
from ratchet.store.artifacts import read_bytes
from ratchet.store.manifest import Artifact, FileEntry, as_record, canonical_json
from ratchet.store.objects import ObjectNotFoundError, ObjectStore, open_store

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedPrompts:
    """The prompts of one split that a run committed.

    Example: PreparedPrompts(run_id="nightly-0412", artifact=Artifact(folder="data/train/0001-5e../prompts", ..),
    source="s3://bucket/gsm8k").
    """

    run_id: str
    artifact: Artifact
    """Relative to the run."""
    source: str
    """Where they came from, for people: a path, s3://..., a data set with its revision, or a generator."""


def find(root: str, key: str) -> PreparedPrompts | None:
    """Return the record of `key` below `root`, or None if there is none; StoreError for one that is damaged."""
    store, name = _open(root), layout.prepared(key)
    try:
        body = store.get(name)
    except ObjectNotFoundError:
        return None
    try:
        raw = json.loads(body)
        if raw["format"] != FORMAT:
            raise StoreError(f"{store.uri}/{name}: format {raw['format']}, but this version reads format {FORMAT}")
        entry = raw["artifact"]
        files = tuple(FileEntry(**file) for file in entry["files"])
        artifact = Artifact(folder=entry["folder"], files=files, rows=entry["rows"])
        return PreparedPrompts(run_id=raw["run_id"], artifact=artifact, source=raw["source"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{store.uri}/{name} is not a record of prepared prompts: {error!r}") from error


def read(root: str, prepared: PreparedPrompts) -> dict[str, bytes]:
    """Return the table's files by name; StoreError where one is gone or holds other bytes than were committed."""
    store = _open(root).child(layout.check_run_id(prepared.run_id))
    entries = prepared.artifact.files
    return {entry.path: data for entry, data in zip(entries, read_bytes(store, prepared.artifact), strict=True)}


def record(root: str, key: str, prepared: PreparedPrompts, *, replace: bool = False) -> bool:
    """Say where the prompts of `key` lie; the first to say so stays, unless what it named is of no use (`replace`)."""
    store, name = _open(root), layout.prepared(key)
    if replace:
        store.delete(name)
    return store.put_create(name, canonical_json({"format": FORMAT, **as_record(prepared)}))


def _open(root: str) -> ObjectStore:
    return open_store(root.rstrip("/") or "/")
