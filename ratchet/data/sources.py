"""Reads the prompts that users bring, wherever they are, into rows of verl's schema.

A source is a file (JSON Lines, CSV or Parquet), a folder with one file a split, the same below `s3://`, the id of a
data set on the hub, or `ratchet/word-problems?level=1&size=512&seed=0`; `~` is the home folder. The trap:
`openai/gsm8k` is a path before it is an id; a local file or folder of that name wins.
"""

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn
from urllib.parse import parse_qsl, urlencode

from ratchet.data import word_problems
from ratchet.data.files import check_size, outside, read_file
from ratchet.data.frames import csv_records
from ratchet.data.json_lines import json_lines_of
from ratchet.data.prompt_rows import GSM8K, INSTRUCTION, SHORT_INSTRUCTION, PromptRow, gsm8k_row, row_from_record
from ratchet.data.verl_parquet import parquet_records, write_verl_parquet
from ratchet.errors import DataError

logger = logging.getLogger(__name__)

__all__ = [
    "PromptRow",
    "Record",
    "load_rows",
    "preprocess",
    "read_records",
    "resolved_source",
    "split_of_file",
    "write_verl_parquet",
]

WORD_PROBLEMS = "ratchet/word-problems"
_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
_DATASET_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_HUB_CONFIGS = {GSM8K: "main", "gsm8k": "main"}
_HUB_REVISION = re.compile(r"@([0-9a-f]{40})/")
_SPLITS = ("train", "test")
_INSTRUCTIONS = {"steps": INSTRUCTION, "short": SHORT_INSTRUCTION}


class Record(NamedTuple):
    """One record as it was read."""

    values: dict[str, Any]
    where: str
    """File and line or row, for messages."""
    number: int
    """From 0, in its file."""
    fallback_source: str
    """The data source of a record that names none."""


def read_records(spec: str, *, split: str) -> Iterator[Record]:
    """Yield every record of a source, in its order; DataError names the file, and the line or row.

    `split` picks the file of a folder or the part of a data set; a single file is read whole.
    """
    spec = _location(spec)
    if _is_generated(spec):
        numbers, _ = _generator(spec)
        for index, each in enumerate(word_problems.generate(split=split, **numbers)):
            yield Record({**each, "data_source": WORD_PROBLEMS}, f"{spec}, problem {index}", index, WORD_PROBLEMS)
    elif spec.startswith("s3://") or _exists(spec):
        for name, body in _files(spec, split):
            yield from _records_of_file(name, body)
    elif _is_dataset_id(spec):
        for index, record in enumerate(_hub_table(spec, split)):
            yield Record(dict(record), f"{spec}, row {index}", index, spec)
    else:
        raise DataError(f"{spec}: no such file or folder, and not the id of a data set (expected owner/name)")


def load_rows(
    spec: str,
    *,
    split: str,
    data_source: str | None = None,
    prompt_key: str = "prompt",
    needs_ground_truth: bool = True,
) -> list[PromptRow]:
    """All rows of a source, in its order; `split` is "train" or "test".

    `split` picks the file of a folder or the part of a data set, and goes into GSM8K's rows; a single file is read
    whole. `data_source` is for rows that name none themselves. DataError names the file, and the line or row; each row
    remembers its own (`PromptRow.where`). Rows without a ground truth are refused, unless `needs_ground_truth` is
    false.
    """
    if _is_generated(_location(spec)):
        rows = _generated_rows(_location(spec), split, data_source or WORD_PROBLEMS)
    else:
        rows = [
            row_from_record(
                record.values,
                split=split,
                index=record.number,
                data_source=data_source,
                fallback_source=record.fallback_source,
                prompt_key=prompt_key,
                where=record.where,
                needs_ground_truth=needs_ground_truth,
            )
            for record in read_records(spec, split=split)
        ]
    if not rows:
        raise DataError(f"{spec}: expected at least one row, got none")
    _count_duplicates(rows, spec)
    return rows


def resolved_source(spec: str, *, split: str) -> str:
    """Where a source that can be read really lies, for people and records.

    An absolute path without links, an s3:// place, a generator with all its parameters, or a data set of the hub with
    the revision that was read: "openai/gsm8k@e53f048856ff4f594e959d75785d2c2d37b678ee".
    """
    spec = _location(spec)
    if spec.startswith("s3://"):
        return spec.rstrip("/")
    if _is_generated(spec):
        numbers, style = _generator(spec)
        # What is not asked for is not named: problems of runs that were made before it could be are the same.
        asked = {key: value for key, value in numbers.items() if key != "rejected" or value}
        return f"{WORD_PROBLEMS}?{urlencode({**asked, 'instruction': style})}"
    if _exists(spec) or not _is_dataset_id(spec):
        return str(Path(spec).resolve())
    # The revision is a part of the places that the files were downloaded from, which the cache keeps, too.
    urls: Any = getattr(getattr(_hub_table(spec, split), "info", None), "download_checksums", None)
    revisions = {match[1] for url in urls or () if (match := _HUB_REVISION.search(str(url))) is not None}
    return f"{spec}@{revisions.pop()}" if len(revisions) == 1 else spec


def _is_generated(spec: str) -> bool:
    return spec.partition("?")[0] == WORD_PROBLEMS and not _exists(spec)


def _exists(spec: str) -> bool:
    try:
        return Path(spec).exists()
    except OSError as error:  # a name that no disk can hold
        raise DataError(f"{spec[:200]}: cannot be read ({error.strerror})") from error


def _location(spec: str) -> str:
    """A source without its scheme and with `~` expanded, as for model folders."""
    return spec if spec.startswith("s3://") else os.path.expanduser(spec.removeprefix("json:").removeprefix("file://"))


def _records_of_file(name: str, body: bytes) -> Iterator[Record]:
    is_parquet = name.endswith(".parquet")
    read = parquet_records if is_parquet else csv_records if name.endswith(".csv") else json_lines_of
    for index, (number, values) in enumerate(read(body, name)):
        where = f"{name}, {'row' if is_parquet else 'line'} {number}"
        yield Record(values, where, index, PurePosixPath(name).stem)


def _files(spec: str, split: str) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of the files that hold `split` at a local or s3:// place."""
    from ratchet.store import open_store

    is_local = not spec.startswith("s3://")
    if is_local and not Path(spec).is_dir():
        if not spec.endswith(_SUFFIXES):
            raise DataError(f"{spec}: expected a file that ends in {', '.join(_SUFFIXES)}")
        yield spec, read_file(spec)
        return
    if not is_local and spec.endswith(_SUFFIXES):
        folder, _, key = spec.rpartition("/")
        store = open_store(folder)
        check_size(spec, store.size(key) or 0)
        yield spec, store.get(key)
        return
    store = open_store(spec.rstrip("/"))
    sizes = {info.key: info.size for info in store.list_objects("")}
    # A shard of the hub's own layout is `main/train-00000-of-00001.parquet`.
    pattern = re.compile(rf"(?:(?:main|data)/)?{re.escape(split)}(?:-\d+-of-\d+)?\.(parquet|jsonl|json|csv)")
    found = [(key, match[1]) for key in sizes if (match := pattern.fullmatch(key)) is not None]
    if not found:
        raise DataError(
            f"{spec}: expected {split}.parquet or {split}.jsonl, got {', '.join([*sizes][:10]) or 'an empty folder'}"
        )
    kinds = sorted({(str(PurePosixPath(key).parent), kind) for key, kind in found})
    if len(kinds) > 1:
        raise DataError(f"{spec}: expected one file for the split {split}, got {', '.join(key for key, _ in found)}")
    for key, _ in found:
        name = f"{spec.rstrip('/')}/{key}"
        target = outside(Path(name), Path(spec)) if is_local else None
        if target is not None:
            raise DataError(f"{name} links to {target}, outside the folder; name that file itself")
        check_size(name, sizes[key])
        yield name, read_file(name) if is_local else store.get(key)


def _is_dataset_id(spec: str) -> bool:
    return _DATASET_ID.fullmatch(spec) is not None and not spec.endswith(_SUFFIXES)


def _hub_table(dataset_id: str, split: str) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise DataError(f"{dataset_id}: data sets of the hub need the package `datasets`") from error
    try:
        return datasets.load_dataset(dataset_id, _HUB_CONFIGS.get(dataset_id), split=split)
    except (OSError, ValueError) as error:  # unreachable, offline (HF_HUB_OFFLINE), unknown id, unknown split
        _refuse_hub(dataset_id, split, error)


def _refuse_hub(dataset_id: str, split: str, error: Exception) -> NoReturn:
    raise DataError(
        f"{dataset_id}: no local file or folder of that name, and the split {split!r} could not be had from the hub "
        f"({type(error).__name__}: {str(error)[:200]}); give a JSONL or Parquet file, or {WORD_PROBLEMS}?level=1"
    ) from error


def _generator(spec: str) -> tuple[dict[str, int], str]:
    """The generator's numbers and the style of its instruction; DataError for what is none."""
    numbers = {"level": 1, "size": 512, "seed": 0, "rejected": 0}
    given = dict(parse_qsl(spec.partition("?")[2], keep_blank_values=True))
    style = given.pop("instruction", "steps")
    if style not in _INSTRUCTIONS:
        raise DataError(f"{spec}: expected one of {', '.join(_INSTRUCTIONS)} for instruction, got {style}")
    for key, text in given.items():
        if key not in numbers or not re.fullmatch(r"\d{1,9}", text):
            raise DataError(f"{spec}: expected integers for {', '.join(numbers)}, got {key}={text}")
        numbers[key] = int(text)
    return numbers, style


def _generated_rows(spec: str, split: str, data_source: str) -> list[PromptRow]:
    numbers, style = _generator(spec)
    problems = word_problems.generate(split=split, **numbers)
    rows = [
        gsm8k_row(
            each["question"],
            each["answer"],
            split=split,
            index=index,
            data_source=data_source,
            instruction=_INSTRUCTIONS[style],
            where=spec,
        )
        for index, each in enumerate(problems)
    ]
    if numbers["rejected"]:
        for row, each in zip(rows, problems, strict=True):
            row.extra_info["rejected"] = each["rejected"]
    return rows


def _count_duplicates(rows: list[PromptRow], spec: str) -> None:
    distinct = {tuple((message["role"], message["content"]) for message in row.prompt) for row in rows}
    if len(distinct) < len(rows):
        logger.warning("%s: %d of %d rows repeat an earlier prompt", spec, len(rows) - len(distinct), len(rows))


def split_of_file(path: str) -> str:
    """ "test" for names like `test.jsonl` or `gsm8k-test.parquet`, else "train"."""
    words = re.split(r"[^a-z]+", PurePosixPath(path).stem.lower())
    return "test" if "test" in words else "train"


def preprocess(
    source: str, local_dir: str, *, data_source: str | None = None, prompt_key: str = "prompt"
) -> dict[str, int]:
    """Write `source` as verl's train.parquet and test.parquet in a local folder or below s3://; rows by file written.

    A single file gives the one split that its name says (`split_of_file`); a folder gives the splits it has; data sets
    and generated problems give both. Everything is read before anything is written.
    """
    location, local_dir = _location(source), _location(local_dir)
    splits: tuple[str, ...] = _SPLITS
    if location.endswith(_SUFFIXES):
        splits = (split_of_file(location),)
    elif location.startswith("s3://") or Path(location).is_dir():
        from ratchet.store import open_store

        keys = [PurePosixPath(info.key).name for info in open_store(location.rstrip("/")).list_objects("")]
        present = tuple(split for split in _SPLITS if any(re.match(rf"{split}[-.]", key) for key in keys))
        splits = present or ("train",)
    loaded = {split: load_rows(source, split=split, data_source=data_source, prompt_key=prompt_key) for split in splits}
    written = {}
    for split, rows in loaded.items():
        path = f"{local_dir.rstrip('/')}/{split}.parquet"
        write_verl_parquet(rows, path)
        written[path] = len(rows)
    return written
