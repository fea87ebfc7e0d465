"""Writes and reads Parquet in verl's prompt schema, with plain pyarrow.

The trap: files written by the `datasets` library carry a feature description that older versions cannot read; these
carry none. Struct fields are in alphabetical order, as verl's own files have them.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ratchet.data.files import MAX_COLUMNS, MAX_DEPTH, MAX_ROW_BYTES, MAX_VALUES, check_size
from ratchet.data.prompt_rows import PromptRow
from ratchet.errors import DataError

MESSAGE = pa.struct([("content", pa.string()), ("role", pa.string())])
_ROWS_OF_A_BATCH = 256
_UNREADABLE = (pa.ArrowException, OSError)
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
        "prompt": pa.array([row.prompt for row in rows], pa.list_(MESSAGE)),
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
    """Yields (row number from 0, record) of a Parquet file's bytes; DataError where it is none or over a limit.

    Few bytes can unpack to any number: what the footer says is checked before anything is unpacked, and what comes is
    counted as it comes.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(body))
        _check_footer(file.metadata, name)
        schema = pa.schema([pa.field(field.name, _plain_type(field.type)) for field in file.schema_arrow])
    except (*_UNREADABLE, RecursionError) as error:
        raise DataError(f"{name}: expected a Parquet file ({error})") from error
    number = unpacked = 0
    batches = file.iter_batches(_ROWS_OF_A_BATCH, use_threads=False)
    while True:
        try:
            batch = next(batches, None)
            if batch is not None:
                batch = batch.cast(schema)
                unpacked += batch.nbytes
                check_size(name, unpacked, what="unpacked bytes")
                if batch.nbytes > MAX_ROW_BYTES:
                    largest = max(batch.slice(row, 1).nbytes for row in range(batch.num_rows))
                    check_size(f"{name}, after row {number}", largest, MAX_ROW_BYTES, "bytes in a row")
            records = [] if batch is None else batch.to_pylist()
        except (*_UNREADABLE, ValueError) as error:  # damaged pages, times that Python cannot hold
            if isinstance(error, DataError):
                raise
            raise DataError(f"{name}, after row {number}: cannot be read ({error})") from error
        if batch is None:
            return
        for record in records:
            yield number, record
            number += 1


def _check_footer(metadata: pq.FileMetaData, name: str) -> None:
    check_size(name, metadata.num_columns, MAX_COLUMNS, "columns")
    chunks = [
        metadata.row_group(group).column(column)
        for group in range(metadata.num_row_groups)
        for column in range(metadata.num_columns)
    ]
    check_size(name, sum(chunk.num_values for chunk in chunks), MAX_VALUES, "values")
    check_size(name, sum(chunk.total_uncompressed_size for chunk in chunks), what="unpacked bytes")


def _plain_type(type_: pa.DataType, depth: int = 0) -> pa.DataType:
    """The type without dictionaries, in which a large value counts once however many rows have it."""
    if depth > MAX_DEPTH:
        raise pa.ArrowInvalid(f"more than {MAX_DEPTH} lists and structs in each other")
    if pa.types.is_dictionary(type_):
        return type_.value_type
    if pa.types.is_list(type_):
        return pa.list_(type_.value_field.with_type(_plain_type(type_.value_type, depth + 1)))
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_plain_type(field.type, depth + 1)) for field in type_])
    return type_
