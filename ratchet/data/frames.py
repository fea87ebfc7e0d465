"""Turns CSV files and data frames into prompts: `to_training_set(frame, "train.parquet")`.

The trap: CSV knows text alone, and an empty cell is a missing value; a prompt of several messages stands in it as JSON.
Frames are taken as what they can do, so that no data frame library is imported here.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ratchet.data.conversations import Completion, completion
from ratchet.data.prompt_rows import PromptRow, row_from_record
from ratchet.data.verl_parquet import MESSAGE, verl_table
from ratchet.errors import DataError

_DEMONSTRATIONS = ("chosen", "rejected")


def csv_records(body: bytes, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (number of its last line, record) of a CSV file with a header; DataError names file and line.

    UTF-8, commas, double quotes (RFC 4180); line breaks may stand inside quotes. Empty cells are None, everything else
    is text, but for lists of messages, which are read from their JSON.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body[: error.start].count(b"\n") + 1
        raise DataError(f"{name}, line {line}: expected UTF-8, got byte 0x{body[error.start]:02x}") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{name}, line {reader.line_num}: expected CSV ({error}); JSON Lines holds any text"
            ) from error
        if cells is None:
            return
        if not cells:
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            if "" in header or len(set(header)) < len(header):
                raise DataError(f"{name}, line 1: expected a header of different column names, got {', '.join(cells)}")
            continue
        if len(cells) != len(header):
            raise DataError(
                f"{name}, line {reader.line_num}: expected {len(header)} cells ({', '.join(header)}), got {len(cells)}"
            )
        yield reader.line_num, {key: _cell(cell) for key, cell in zip(header, cells, strict=True)}


def _cell(text: str) -> Any:
    if not text.strip():
        return None
    if text.lstrip().startswith("[{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text


def frame_records(frame: Any) -> Iterator[dict[str, Any]]:
    """The rows of a frame as dicts: pandas, polars, pyarrow, `datasets`, or an iterable of mappings."""
    records: Any = frame
    if hasattr(frame, "to_pylist"):  # pyarrow
        records = frame.to_pylist()
    elif hasattr(frame, "to_dicts"):  # polars
        records = frame.to_dicts()
    elif hasattr(frame, "iterrows"):  # pandas
        records = frame.to_dict("records")
    if isinstance(records, Mapping | str | bytes) or not isinstance(records, Iterable):
        raise DataError(f"expected a data frame or rows as dicts, got {type(frame).__name__}")
    for number, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise DataError(f"row {number}: expected a dict of columns, got {type(record).__name__}")
        yield {str(key): _value(value) for key, value in record.items()}


def _value(value: Any) -> Any:
    """A cell of a frame: None for NaN, NaT and NA, a list for an array."""
    if (isinstance(value, float) and value != value) or type(value).__name__ in ("NaTType", "NAType"):
        return None
    return value.tolist() if getattr(value, "ndim", 0) > 0 else value


def to_training_set(
    frame: Any,
    path: str | Path,
    *,
    data_source: str | None = None,
    split: str = "train",
    prompt_key: str = "prompt",
) -> int:
    """Write a CSV file or a data frame as a training set in verl's Parquet schema; the number of its rows.

    Columns: `question,answer`, or `prompt` with `answer`, `ground_truth` or `response`, or `prompt,chosen[,rejected]`.
    The last have no ground truth; they keep `chosen` and `rejected` as columns, texts or messages, for offline
    objectives and for rewards that compare with nothing. `frame` may be the path of anything that `load_rows` reads.
    `path` is local or `s3://`.
    """
    fallback = PurePosixPath(str(path)).stem
    if isinstance(frame, str | Path):
        from ratchet.data.sources import load_rows

        rows = load_rows(
            str(frame), split=split, data_source=data_source, prompt_key=prompt_key, needs_ground_truth=False
        )
    else:
        rows = [
            row_from_record(
                record,
                split=split,
                index=index,
                data_source=data_source,
                fallback_source=fallback,
                prompt_key=prompt_key,
                where=f"row {index}",
                needs_ground_truth=False,
            )
            for index, record in enumerate(frame_records(frame))
        ]
    if not rows:
        raise DataError(f"{path}: expected at least one row, got none")
    _check_complete(rows)
    _write(training_table(rows), str(path))
    return len(rows)


def _check_complete(rows: list[PromptRow]) -> None:
    """DataError for the first row that has neither a ground truth nor a completion to learn from."""
    for row in rows:
        if "ground_truth" not in row.reward_model and not row.extra_info.get("chosen"):
            raise DataError(
                f"{row.where}: expected answer, ground_truth, response or chosen beside the prompt, "
                f"got {', '.join(key for key in row.extra_info if key not in ('split', 'index')) or 'nothing'}"
            )


def training_table(rows: list[PromptRow]) -> pa.Table:
    """verl's columns, and `chosen` and `rejected` where rows have them: texts, or messages where a row has several."""
    found: dict[str, pa.Array] = {}
    for key in _DEMONSTRATIONS:
        values = [(row.extra_info.get(key), f"{row.where}, {key}") for row in rows]
        column = [None if value is None else completion(value, where) for value, where in values]
        if any(value is not None for value in column):
            found[key] = _completions(column)
    bare = [
        PromptRow(
            row.data_source,
            row.prompt,
            row.ability,
            row.reward_model,
            {key: value for key, value in row.extra_info.items() if key not in found},
        )
        for row in rows
    ]
    table = verl_table(bare)
    for key, array in found.items():
        table = table.append_column(key, array)
    return table


def _completions(column: list[Completion | None]) -> pa.Array:
    if all(isinstance(value, str | None) for value in column):
        return pa.array(column, pa.string())
    turns = [[{"role": "assistant", "content": each}] if isinstance(each, str) else each for each in column]
    return pa.array(turns, pa.list_(MESSAGE))


def _write(table: pa.Table, path: str) -> None:
    from ratchet.store import open_store

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    folder, _, name = path.rpartition("/")
    open_store(folder or ("/" if path.startswith("/") else ".")).put(name, sink.getvalue().to_pybytes())
