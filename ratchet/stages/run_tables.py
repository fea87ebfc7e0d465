"""The run's prompts and examples, which every step reads: parsed once a process.

Trap: what is kept is a committed artifact of one store, whose digest was checked when it was read; damage that comes
later is seen by the next process.
"""

import pyarrow as pa

from ratchet.data.parquet import read_table
from ratchet.store.manifest import Artifact
from ratchet.store.objects import ObjectStore

_MOST_PARSED = 2
"""A hybrid run's steps read two tables."""
_parsed: dict[tuple[str, Artifact], pa.Table] = {}
"""Where the store is, and what was read there last."""


def run_table(store: ObjectStore, artifact: Artifact, schema: pa.Schema) -> pa.Table:
    """Return the table of that schema that `artifact` is."""
    table = _parsed.get((store.uri, artifact))
    if table is None:
        table = read_table(store, artifact, schema)
        while len(_parsed) >= _MOST_PARSED:
            _parsed.pop(next(iter(_parsed)), None)
        _parsed[store.uri, artifact] = table
    return table
