"""Every byte of a run: its stored files hashed, and the weights that its deltas lead to made again.

Trap: retention deletes trainer states at any time, also one whose files are being hashed; a state that is gone whole
by then is no fault.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ratchet.errors import StoreError, StoreUnavailableError
from ratchet.store import layout
from ratchet.store.artifacts import scratch
from ratchet.store.chain import Chain, Fault, StoredFile
from ratchet.store.manifest import Manifest
from ratchet.store.objects import ObjectNotFoundError, ObjectStore
from ratchet.store.weights import read_weights

_CHUNK_BYTES = 8 * 1024 * 1024
_HASHERS = 4


def hash_files(chain: Chain) -> list[Fault]:
    """Hash every file and compare it with what names it; each one's next bytes are read meanwhile."""
    store = chain.run.store
    with ThreadPoolExecutor(_HASHERS) as hashers, ThreadPoolExecutor(_HASHERS) as readers:
        found = hashers.map(lambda file: _digest(store, file, readers), chain.files)
        return [
            Fault(
                place=file.key,
                expected=f"sha256 {file.sha256}, says {file.named_by}",
                found="nothing" if sha256 is None else f"sha256 {sha256}",
            )
            for file, sha256 in zip(chain.files, found, strict=True)
            if sha256 != file.sha256
        ]


def rebuild_weights(chain: Chain, faults: list[Fault]) -> Iterator[Fault]:
    """Make the weights at the end of each chain of deltas, whose every part is as it was committed.

    `faults` are those found so far: a stage that has one is left out.
    """
    damaged = {fault.place.split("/")[1] for fault in faults if "/" in fault.place}
    deltas: dict[tuple[str, int, str], Manifest] = {}
    bases: set[tuple[str, int, str]] = set()
    for manifest in chain.manifests.values():
        for role, artifact in manifest.provenance.artifacts.items():
            if artifact.delta is not None and manifest.step is not None and manifest.stage not in damaged:
                deltas[manifest.stage, manifest.step, role] = manifest
                bases.add((manifest.stage, artifact.delta.step, role))
    for stage, step, role in sorted(deltas.keys() - bases):
        manifest = deltas[stage, step, role]
        try:
            with scratch() as folder:
                read_weights(chain.run, manifest, role, folder)
        except StoreUnavailableError:
            raise
        except StoreError as error:
            yield Fault(
                place=layout.manifest(stage, step),
                expected=f"{role} {manifest.output(role).digest} of its deltas",
                found=str(error),
            )


def _digest(store: ObjectStore, file: StoredFile, readers: ThreadPoolExecutor) -> str | None:
    """Return the sha256 of a stored file; None where it is gone by now."""
    digest = hashlib.sha256()
    try:
        data = store.get_range(file.key, 0, _CHUNK_BYTES)
        for start in range(_CHUNK_BYTES, file.bytes, _CHUNK_BYTES):
            upcoming = readers.submit(store.get_range, file.key, start, _CHUNK_BYTES)
            digest.update(data)
            data = upcoming.result()
        digest.update(data)
    except ObjectNotFoundError:
        if file.state is not None and all(
            store.size(f"{file.state.folder}/{one.path}") is None for one in file.state.files
        ):
            return file.sha256
        return None
    return digest.hexdigest()
