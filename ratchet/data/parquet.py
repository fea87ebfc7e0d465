"""Arrow tables to Parquet bytes and back.

Trap: equal tables must give equal bytes, so every writer option is pinned here, and what Arrow does not count as
content (metadata, the names of list items) is made uniform; the library's version is pinned in the lock, since it
writes its name into each file.
"""

import io
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ratchet.errors import DataError
from ratchet.store.artifacts import read_bytes, write_bytes
from ratchet.store.manifest import Artifact
from ratchet.store.objects import ObjectStore

ROWS_PER_PART = 65_536

_CONVERSION_ERRORS = (ValueError, TypeError, OverflowError, pa.ArrowException)


def table_from_rows(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """Build a table; a missing or unknown column, or a value of the wrong type, is a DataError that names it."""
    names = set(schema.names)
    for number, row in enumerate(rows):
        if row.keys() != names:
            missing, unknown = sorted(names - row.keys()), sorted(row.keys() - names)
            raise DataError(f"row {number}: missing columns {missing}, unknown columns {unknown}")
    return pa.Table.from_arrays([_column(rows, field) for field in schema], schema=schema)


def to_bytes(table: pa.Table) -> bytes:
    """Return the table as one Parquet file, byte for byte the same for equal tables."""
    sink = io.BytesIO()
    pq.write_table(
        table.cast(_uniform_schema(table.schema)).combine_chunks(),
        sink,
        version="2.6",
        data_page_version="1.0",
        compression="zstd",
        compression_level=3,
        use_dictionary=False,
        write_statistics=True,
        row_group_size=8_192,
        store_schema=True,
    )
    return sink.getvalue()


def from_bytes(data: bytes) -> pa.Table:
    """Return the table of one Parquet file; an ArrowException or OSError where it is none.

    Trap: it is read in this thread alone. Arrow's own threads may outlive the read with the bytes in their hands, and a
    process that ends then is aborted after all its work (apache/arrow#34314).
    """
    return pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)


def write_table(store: ObjectStore, folder: str, table: pa.Table) -> Artifact:
    """Write the table as `part-00000.parquet`, ... below `folder` and describe the files."""
    parts = {}
    for index, start in enumerate(range(0, max(table.num_rows, 1), ROWS_PER_PART)):
        parts[f"part-{index:05d}.parquet"] = to_bytes(table.slice(start, ROWS_PER_PART))
    return write_bytes(store, folder, parts, rows=table.num_rows)


def read_table(store: ObjectStore, artifact: Artifact, schema: pa.Schema) -> pa.Table:
    """Read a committed table, digests checked; other columns than `schema` are a DataError that names the place."""
    place = f"{store.uri}/{artifact.folder}"
    files = zip(artifact.files, read_bytes(store, artifact), strict=True)
    parts = [_read_part(f"{place}/{entry.path}", data, schema) for entry, data in files]
    table = pa.concat_tables(parts) if parts else schema.empty_table()
    if artifact.rows != table.num_rows:
        raise DataError(f"{place}: its manifest counts {artifact.rows} rows, its files hold {table.num_rows}")
    return table


def _column(rows: Sequence[dict[str, Any]], field: pa.Field) -> pa.Array:
    values = [row[field.name] for row in rows]
    try:
        _refuse_fractions(values, field.type)
        if pa.types.is_map(field.type):
            # A dict has no order of its own; Arrow's map has.
            values = [sorted(value.items()) if isinstance(value, dict) else value for value in values]
        return pa.array(values, type=field.type)
    except _CONVERSION_ERRORS as error:
        raise DataError(f"column {field.name!r} takes {field.type}: {error}") from error


def _refuse_fractions(values: Sequence[Any], type_: pa.DataType) -> None:
    """Raise TypeError for a float among integers, which Arrow would truncate without a word."""
    if pa.types.is_integer(type_):
        for value in values:
            if isinstance(value, float):
                raise TypeError(f"{value!r} is not an integer")
    elif pa.types.is_list(type_) and pa.types.is_integer(type_.value_type):
        for value in values:
            _refuse_fractions(value if value is not None else (), type_.value_type)


def _read_part(place: str, data: bytes, schema: pa.Schema) -> pa.Table:
    try:
        table = from_bytes(data)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{place} is not a Parquet file: {error}") from error
    if not table.schema.equals(schema):
        expected, found = (
            {field.name: str(field.type) for field in _uniform_schema(one)} for one in (schema, table.schema)
        )
        names = [name for name in expected | found if expected.get(name) != found.get(name)] or list(expected)
        wanted, came = (", ".join(f"{name} {one.get(name, '-')}" for name in names) for one in (expected, found))
        raise DataError(f"{place}: expected columns {wanted}; found {came}")
    return table.cast(schema)


def _uniform_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([_uniform_field(field, field.name) for field in schema])


def _uniform_field(field: pa.Field, name: str) -> pa.Field:
    return pa.field(name, _uniform_type(field.type), nullable=field.nullable)


def _uniform_type(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_list(type_):
        return pa.list_(_uniform_field(type_.value_field, "item"))
    if pa.types.is_map(type_):
        return pa.map_(_uniform_type(type_.key_type), _uniform_field(type_.item_field, "value"))
    if pa.types.is_struct(type_):
        return pa.struct([_uniform_field(field, field.name) for field in type_])
    return type_
