"""Writes and reads Parquet in verl's prompt schema, with plain pyarrow.

The trap: files written by the `datasets` library carry a feature description that older versions cannot read; these
carry none. Struct fields are in alphabetical order, as verl's own files have them.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ratchet.data.prompt_rows import PromptRow
from ratchet.errors import DataError

_MESSAGE = pa.struct([("content", pa.string()), ("role", pa.string())])
_REWARD_MODEL = pa.struct([("ground_truth", pa.string()), ("style", pa.string())])


def _column(values: list[Any]) -> pa.Array:
    """An Arrow array of one extra_info key; text where rows disagree about its type."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        texts = [
            value if value is None or isinstance(value, str) else json.dumps(value, default=str) for value in values
        ]
        return pa.array(texts, pa.string())


def verl_table(rows: Sequence[PromptRow]) -> pa.Table:
    """Rows as verl's columns: data_source, prompt, ability, reward_model, extra_info.

    `extra_info` has the union of all rows' keys; a key whose values differ in type (index 0 and a UUID) becomes text.
    The column is left out where no row has any: Parquet has no struct without fields.
    """
    columns: dict[str, pa.Array] = {
        "data_source": pa.array([row.data_source for row in rows], pa.string()),
        "prompt": pa.array([row.prompt for row in rows], pa.list_(_MESSAGE)),
        "ability": pa.array([row.ability for row in rows], pa.string()),
        "reward_model": pa.array([row.reward_model for row in rows], _REWARD_MODEL),
    }
    keys = sorted({key for row in rows for key in row.extra_info})
    if keys:
        arrays = [_column([row.extra_info.get(key) for row in rows]) for key in keys]
        columns["extra_info"] = pa.StructArray.from_arrays(arrays, names=keys)
    return pa.table(columns)


def write_verl_parquet(rows: Sequence[PromptRow], path: str) -> None:
    """Write rows to a local path or `s3://bucket/key.parquet`; the file appears whole or not at all.

    `ratchet.data.sources.load_rows` reads the same rows back, up to keys of mixed type (see `verl_table`).
    """
    from ratchet.store import open_store

    sink = pa.BufferOutputStream()
    pq.write_table(verl_table(rows), sink, compression="zstd")
    folder, _, name = path.rpartition("/")
    open_store(folder or ("/" if path.startswith("/") else ".")).put(name, sink.getvalue().to_pybytes())


def parquet_records(body: bytes, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (row number from 0, record) of a Parquet file's bytes; DataError where it is none."""
    try:
        file = pq.ParquetFile(pa.BufferReader(body))
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{name}: expected a Parquet file ({error})") from error
    number = 0
    batches = file.iter_batches()
    while True:
        try:
            batch = next(batches, None)
            records = [] if batch is None else batch.to_pylist()
        except (pa.ArrowInvalid, OSError, ValueError) as error:  # damaged pages, times that Python cannot hold
            raise DataError(f"{name}, after row {number}: cannot be read ({error})") from error
        if batch is None:
            return
        for record in records:
            yield number, record
            number += 1
