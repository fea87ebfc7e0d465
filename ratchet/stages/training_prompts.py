"""The run's training prompts, which every step reads: parsed once a process.

Trap: what is kept is a committed artifact of one store, whose digest was checked when it was read; damage that comes
later is seen by the next process.
"""

import pyarrow as pa

from ratchet.data import schemas
from ratchet.data.parquet import read_table
from ratchet.store.manifest import Artifact
from ratchet.store.objects import ObjectStore

_parsed: dict[tuple[str, Artifact], pa.Table] = {}
"""Where the store is, and what was read there last."""


def training_prompts(store: ObjectStore, artifact: Artifact) -> pa.Table:
    """Return the table of prompts that `artifact` is."""
    table = _parsed.get((store.uri, artifact))
    if table is None:
        table = read_table(store, artifact, schemas.PROMPTS)
        _parsed.clear()
        _parsed[store.uri, artifact] = table
    return table
