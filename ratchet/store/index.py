"""Indexes of a run: the manifests of 50 steps in one object, so that a run of any length is read in few requests.

The manifests stay the truth. An index holds their bytes once more, by their sha256, and a reader takes one only where
another manifest names that sha256: an index that is missing, old or wrong costs time and changes no answer.
"""

import gzip
import hashlib
import json
import logging
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ratchet.errors import StoreError, StoreUnavailableError
from ratchet.store import layout
from ratchet.store.chain import Chain, Fault, manifest_key
from ratchet.store.manifest import Manifest, canonical_json
from ratchet.store.objects import ObjectNotFoundError
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.store.survey import NAMING

logger = logging.getLogger(__name__)

STEPS = 50
FORMAT = 1
_READERS = 16


@dataclass(frozen=True, slots=True)
class Index:
    """What one index says."""

    last: int
    """The last of its steps."""
    bodies: dict[str, bytes]
    """Folder of a stage -> the bytes of its manifest, when the index was written."""


def last_of(step: int) -> int:
    """Return the last step of the index that `step` (from 1) belongs to."""
    return -(-step // STEPS) * STEPS


def committed(run: Run, manifest: Manifest) -> None:
    """Write the index that a commit completes, or that lacks it; most commits do neither.

    For the writer's thread, behind the commit. Where storage does not answer, StoreUnavailableError; anything else
    that keeps an index from being written is a warning.
    """
    if not manifest.step or manifest.stage not in (POLICY_UPDATE, *NAMING):
        return
    last = last_of(manifest.step)
    try:
        # Evaluations and exports come when their step is done, or long after it.
        is_late = manifest.stage in NAMING and run.manifest(POLICY_UPDATE, last) is not None
        if is_late or (manifest.stage == POLICY_UPDATE and manifest.step == last):
            write(run, last)
    except StoreUnavailableError:
        raise
    except StoreError as error:
        logger.warning("no index of the steps up to %d of %s: %s", last, run.uri, error)


def write(run: Run, last: int) -> None:
    """Write the index of the steps that end with `last`, from the manifests in storage, replacing one that is there."""
    # Read anew: what this process has under way may never be committed, and its own thread must not wait for it.
    store = Run(run.root, run.run_id).store
    with ThreadPoolExecutor(_READERS) as pool:
        folders = [layout.step_folder(step) for step in range(last - STEPS + 1, last + 1)]
        names = pool.map(store.list_folders, folders)
        places = [f"{folder}/{name}" for folder, found in zip(folders, names, strict=True) for name in found]
        found = pool.map(lambda place: _get(run, place), places)
        bodies = {place: body for place, body in zip(places, found, strict=True) if body is not None}
    header = canonical_json({"format": FORMAT, "last": last, "places": list(bodies)})
    data = gzip.compress(b"\n".join([header, *bodies.values()]), mtime=0)
    run.store.put(layout.index(last), data)
    logger.info("indexed %d manifests of %s up to step %d", len(bodies), run.uri, last)


def read(run: Run, last: int) -> Index | None:
    """Return the index of the steps that end with `last`; None where there is none that can be read."""
    key = layout.index(last)
    try:
        data = run.store.get(key)
    except ObjectNotFoundError:
        return None
    try:
        header, *bodies = gzip.decompress(data).split(b"\n")
        said = json.loads(header)
        if (said["format"], said["last"]) != (FORMAT, last):
            raise ValueError(f"expected format {FORMAT} and last step {last}")
        return Index(last, dict(zip(said["places"], bodies, strict=True)))
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        logger.warning("%s/%s is passed over: %r", run.uri, key, error)
        return None


def read_up_to(run: Run, step: int) -> list[Index]:
    """Return every index that can be read of the steps up to and with `step`, in order."""
    listed = (layout.parse_index(info.key) for info in run.store.list_objects(layout.INDEX))
    lasts = sorted(last for last in listed if last is not None and last - STEPS < step)
    with ThreadPoolExecutor(_READERS) as pool:
        return [found for found in pool.map(lambda last: read(run, last), lasts) if found is not None]


def rebuild(run: Run, steps: int) -> list[int]:
    """Write the indexes of a run of `steps` steps that are missing or cannot be read; return the last step of each."""
    missing = [last for last in range(STEPS, steps + 1, STEPS) if read(run, last) is None]
    for last in missing:
        write(run, last)
    return missing


def index_faults(chain: Chain) -> Iterator[Fault]:
    """Compare every index of a run with the manifests that are there."""
    for key in chain.objects:
        last = layout.parse_index(key)
        if last is None:
            continue
        found = read(chain.run, last)
        if found is None:
            yield Fault(place=key, expected="an index; it may be deleted", found="what cannot be read as one")
            continue
        for place, body in found.bodies.items():
            sha256 = hashlib.sha256(body).hexdigest()
            if sha256 != chain.sha256.get(place):
                expected = f"the manifest {manifest_key(place)}, sha256 {chain.sha256.get(place)}; it may be deleted"
                yield Fault(place=key, expected=expected, found=f"sha256 {sha256}")


def _get(run: Run, place: str) -> bytes | None:
    try:
        return run.store.get(manifest_key(place))
    except ObjectNotFoundError:
        return None
