"""Every byte of a run: its stored files hashed, and the weights that its deltas lead to made again.

Trap: retention retires at any time, also what is being hashed; what is gone by then, and has its record, is no fault.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ratchet.errors import RetiredError, StoreError, StoreUnavailableError
from ratchet.store import layout
from ratchet.store.artifacts import scratch
from ratchet.store.chain import Chain, Fault, StoredFile
from ratchet.store.manifest import Artifact, Manifest
from ratchet.store.objects import ObjectNotFoundError, ObjectStore
from ratchet.store.retired import find
from ratchet.store.run import Run
from ratchet.store.weights import read_weights

_CHUNK_BYTES = 8 * 1024 * 1024
_HASHERS = 4


def hash_files(chain: Chain) -> list[Fault]:
    """Hash every file and compare it with what names it; each one's next bytes are read meanwhile."""
    with ThreadPoolExecutor(_HASHERS) as hashers, ThreadPoolExecutor(_HASHERS) as readers:
        found = hashers.map(lambda file: _digest(chain.run, file, readers), chain.files)
        return [
            Fault(
                place=file.key,
                expected=f"sha256 {file.sha256}, says {file.named_by}",
                found="nothing" if sha256 is None else f"sha256 {sha256}",
            )
            for file, sha256 in zip(chain.files, found, strict=True)
            if sha256 != file.sha256
        ]


def is_whole(store: ObjectStore, artifact: Artifact) -> bool:
    """Whether every stored file of an artifact is there, byte for byte; it is read from storage."""
    folder, entries = artifact.stored
    with ThreadPoolExecutor(_HASHERS) as hashers, ThreadPoolExecutor(_HASHERS) as readers:
        digests = hashers.map(lambda entry: _sha256(store, f"{folder}/{entry.path}", entry.bytes, readers), entries)
        return all(found == entry.sha256 for found, entry in zip(digests, entries, strict=True))


def rebuild_weights(chain: Chain, faults: list[Fault]) -> Iterator[Fault]:
    """Make the weights at the end of each chain of deltas, whose every part is as it was committed.

    `faults` are those found so far: a stage that has one is left out.
    """
    damaged = {fault.place.split("/")[1] for fault in faults if "/" in fault.place}
    deltas: dict[tuple[str, int, str], Manifest] = {}
    bases: set[tuple[str, int, str]] = set()
    for manifest in chain.manifests.values():
        for role, artifact in manifest.provenance.artifacts.items():
            if artifact.delta is None or manifest.step is None or manifest.stage in damaged:
                continue
            if (layout.stage_folder(manifest.stage, manifest.step), role) not in chain.retired:
                deltas[manifest.stage, manifest.step, role] = manifest
                bases.add((manifest.stage, artifact.delta.step, role))
    for stage, step, role in sorted(deltas.keys() - bases):
        manifest = deltas[stage, step, role]
        try:
            with scratch() as folder:
                read_weights(chain.run, manifest, role, folder)
        except StoreUnavailableError:
            raise
        except RetiredError:
            # Since it was listed.
            continue
        except StoreError as error:
            yield Fault(
                place=layout.manifest(stage, step),
                expected=f"{role} {manifest.output(role).digest} of its deltas",
                found=str(error),
            )


def _digest(run: Run, file: StoredFile, readers: ThreadPoolExecutor) -> str | None:
    """Return the sha256 of a stored file; None where it is gone by now, and no record that can be read says why."""
    sha256 = _sha256(run.store, file.key, file.bytes, readers)
    if sha256 is not None or file.artifact is None:
        return sha256
    try:
        return None if find(run.store, *file.artifact) is None else file.sha256
    except StoreUnavailableError:
        raise
    except StoreError:
        return None


def _sha256(store: ObjectStore, key: str, size: int, readers: ThreadPoolExecutor) -> str | None:
    digest = hashlib.sha256()
    try:
        data = store.get_range(key, 0, _CHUNK_BYTES)
        for start in range(_CHUNK_BYTES, size, _CHUNK_BYTES):
            upcoming = readers.submit(store.get_range, key, start, _CHUNK_BYTES)
            digest.update(data)
            data = upcoming.result()
        digest.update(data)
    except ObjectNotFoundError:
        return None
    return digest.hexdigest()
