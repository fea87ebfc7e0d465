"""Everything that lies below a run: its objects, and its manifests with what each of them says of itself.

Trap: a run that goes on changes under whoever reads it, so that what a listing lacks is asked for once more before it
counts as missing.
"""

import functools
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ratchet.errors import StoreError
from ratchet.store import layout
from ratchet.store.manifest import Content, Manifest, Provenance, as_record, canonical_json
from ratchet.store.objects import ObjectInfo, ObjectNotFoundError, check_key, open_store
from ratchet.store.retired import Retired, find
from ratchet.store.run import Run
from ratchet.store.submission import parse

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_READERS = 16
"""Requests under way at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that is not as it was committed."""

    place: str
    """An object's key, relative to the run; of a decision on a champion, where it is."""
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.place}: expected {self.expected}; found {self.found}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftover:
    """What an attempt wrote that committed nothing, a file that was not finished, or a probe of preflight.

    Whoever wrote it died, lost a race, or is still under way.
    """

    folder: str
    """The attempt's, or the key of the one file."""
    epoch: int
    """Of the claim under which it was written; the newest where that cannot be known."""
    objects: tuple[ObjectInfo, ...]
    is_beside_the_run: bool = False
    """Whether its keys are relative to the root: a record for all runs was not finished."""

    @property
    def bytes(self) -> int:
        """Of all its objects."""
        return sum(info.size for info in self.objects)

    @property
    def modified(self) -> float:
        """Unix seconds of its last write, by the storage's clock."""
        return max(info.modified for info in self.objects)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A stored file and who names it."""

    key: str
    bytes: int
    sha256: str
    named_by: str
    artifact: tuple[str, int, str] | None = None
    """Stage, step and role that it belongs to, where retention may retire that at any time."""


@dataclass(slots=True)
class Chain:
    """Everything that lies below a run, and what its manifests say of it."""

    run: Run
    objects: dict[str, ObjectInfo]
    sha256: dict[str, str] = field(default_factory=dict)
    """Folder of a stage -> sha256 of its manifest's bytes."""
    manifests: dict[str, Manifest] = field(default_factory=dict)
    """Folder of a stage -> its manifest, where it can be read and is in its place."""
    files: list[StoredFile] = field(default_factory=list)
    """Those that are there with their size."""
    faults: list[Fault] = field(default_factory=list)
    leftovers: tuple[Leftover, ...] = ()
    unfinished: tuple[ObjectInfo, ...] = ()
    """Files of the run whose writers are at work, or were killed."""
    unfinished_beside: tuple[ObjectInfo, ...] = ()
    """The same of the records beside the runs, whichever run they are of; keys are relative to the root."""
    retired: dict[tuple[str, str], Retired] = field(default_factory=dict)
    """Folder of a stage and role -> the record that this was deleted on purpose."""
    semantic: Any = None
    """The semantic config of run.json."""

    def size(self, key: str) -> int | None:
        """Return an object's size; one that was not listed may be there by now."""
        if key in self.objects:
            return self.objects[key].size
        try:
            check_key(key)
        except StoreError:
            return None
        return self.run.store.size(key)

    def retired_since(self, manifest: Manifest, role: str) -> Retired | None:
        """Return a record that was put since the run was listed, and take note of it."""
        if manifest.step is None or layout.retired(manifest.stage, manifest.step, role) in self.objects:
            # One that was listed and does not count is damaged, and a fault of its own.
            return None
        record = find(self.run.store, manifest.stage, manifest.step, role)
        if record is not None:
            self.retired[record.place] = record
        return record


def open_chain(run: Run) -> Chain:
    """List a run and read its manifests, and check the form of every record; no other file is read."""
    chain = Chain(run, {info.key: info for info in run.store.list_objects("")})
    chain.unfinished = tuple(run.store.unfinished(""))
    beside = open_store(run.root or "/")
    chain.unfinished_beside = (*beside.unfinished(layout.CHAMPIONS), *beside.unfinished(layout.PREPARED))
    _read_manifests(chain, _check_records(chain))
    _read_retired(chain)
    return chain


def manifest_key(place: str) -> str:
    """Key of the manifest in the folder of a stage."""
    return f"{place}/manifest.json"


def _check_records(chain: Chain) -> str:
    """Check the form of run.json, claims and submissions; return the run's own id."""
    run_id = chain.run.run_id
    if layout.RUN not in chain.objects:
        chain.faults.append(Fault(place=layout.RUN, expected="the run's semantic config", found="nothing"))
    keys = [key for key in chain.objects if layout.is_beside_the_chain(key)]
    records = [key for key in keys if key == layout.RUN or key.startswith(("owner/", "submissions/"))]
    with ThreadPoolExecutor(_READERS) as pool:
        for key, body in zip(records, pool.map(chain.run.store.get, records), strict=True):
            try:
                record = json.loads(body)
                is_canonical = canonical_json(record) == body
            except (ValueError, RecursionError) as error:
                record, is_canonical = error, False
            if not is_canonical or not isinstance(record, dict):
                chain.faults.append(
                    Fault(place=key, expected="the canonical JSON of a record", found=repr(record)[:80])
                )
            elif key == layout.RUN:
                run_id, chain.semantic = str(record.get("run_id")), record.get("semantic")
            elif key not in (layout.owner(_int(record.get("epoch"))), layout.submission(_int(record.get("epoch")))):
                chain.faults.append(
                    Fault(place=key, expected="the record of this epoch", found=f"that of epoch {record.get('epoch')}")
                )
            elif key == layout.submission(record["epoch"]):
                try:
                    parse(body, record["epoch"])
                except ValueError as error:
                    chain.faults.append(Fault(place=key, expected="a submission as it was written", found=str(error)))
    return run_id


def _read_retired(chain: Chain) -> None:
    keys = [key for key in chain.objects if layout.parse_retired(key)]
    with ThreadPoolExecutor(_READERS) as pool:
        for key, body in zip(keys, pool.map(chain.run.store.get, keys), strict=True):
            try:
                record = Retired.from_json(body, place=key)
            except StoreError as error:
                chain.faults.append(Fault(place=key, expected="a record as it was written", found=str(error)))
                continue
            if record.key == key:
                chain.retired[record.place] = record
            else:
                chain.faults.append(
                    Fault(place=key, expected="the record of this place", found=f"that of {record.key}")
                )


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _read_manifests(chain: Chain, run_id: str) -> None:
    """Read every manifest that was listed, and those that these name and that were committed since."""
    wanted = sorted(place for key in chain.objects if (place := layout.parse_manifest(key)))
    seen: set[str] = set()
    with ThreadPoolExecutor(_READERS) as pool:
        while wanted:
            seen |= set(wanted)
            named: set[str] = set()
            bodies = pool.map(lambda place: _get(chain, manifest_key(place)), wanted)
            for place, body in zip(wanted, bodies, strict=True):
                manifest = None if body is None else _parse(chain, place, body, run_id)
                if manifest is not None:
                    chain.manifests[place] = manifest
                    named |= set(manifest.provenance.previous)
            wanted = sorted(place for place in named - seen if layout.parse_manifest(manifest_key(place)))


def _get(chain: Chain, key: str) -> bytes | None:
    try:
        return chain.run.store.get(key)
    except ObjectNotFoundError:
        return None


def _parse(chain: Chain, place: str, body: bytes, run_id: str) -> Manifest | None:
    """Return the manifest if it is one, of this run and this place."""
    key = manifest_key(place)
    chain.sha256[place] = hashlib.sha256(body).hexdigest()
    try:
        manifest = Manifest.from_json(body, key=key)
        # Canonical JSON may still hold other types than a manifest's.
        for kind, part in ((Content, manifest.content), (Provenance, manifest.provenance)):
            _adapter(kind).validate_json(canonical_json(as_record(part)), strict=True)
    except (StoreError, ValueError) as error:
        chain.faults.append(Fault(place=key, expected="a manifest as it was written", found=str(error)))
        return None
    found = (manifest.provenance.run_id, layout.stage_folder(manifest.stage, manifest.step))
    if found != (run_id, place):
        chain.faults.append(
            Fault(
                place=key,
                expected=f"the manifest of {place} of run {run_id}",
                found=f"that of {found[1]} of run {found[0]}",
            )
        )
        return None
    return manifest


@functools.cache
def _adapter(kind: type) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
