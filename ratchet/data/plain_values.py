"""Turns the values that files hold into what JSON can say, the same on every machine.

The trap: `json.dumps` writes NaN, which is no JSON, and a `str` of bytes is Python source. Here NaN is a missing value,
as in pandas, and bytes are refused.
"""

import datetime
import math
import uuid
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from ratchet.data.files import MAX_DEPTH
from ratchet.errors import DataError

# Of numpy's, by name: numpy itself would be imported for nothing. Their own conversion makes integers of nanoseconds.
_NUMPY_TIMES = ("datetime64", "timedelta64")


def plain_value(value: Any, where: str, depth: int = 0) -> Any:
    """`value` as None, text, bool, number, list or dict; mappings lose their None entries and empty mappings.

    Dates and times become ISO text, intervals, Decimal and UUID what `str` says of them, numpy's arrays and scalars
    lists and numbers, NaN and NaT None, infinities the texts "inf" and "-inf". Anything else raises DataError: bytes,
    above all, have no text of their own. `where` names file, row and column and begins the error; `depth` is how many
    lists and mappings the value lies in, of which there is a limit.
    """
    if depth > MAX_DEPTH:
        raise DataError(f"{where[:200]}: expected at most {MAX_DEPTH} lists and objects in each other, got more")
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else str(float(value)) if math.isinf(value) else float(value)
    if isinstance(value, Mapping):
        return _plain_mapping(value, where, depth + 1)
    if isinstance(value, list | tuple):
        return [plain_value(entry, where, depth + 1) for entry in value]
    is_numpy_time = type(value).__name__ in _NUMPY_TIMES
    if hasattr(value, "tolist") and not is_numpy_time and not isinstance(value, memoryview):
        return plain_value(value.tolist(), where, depth)
    if value != value:  # NaT, Decimal("NaN")
        return None
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal | uuid.UUID | datetime.timedelta) or is_numpy_time:
        return str(value)
    raise DataError(
        f"{where}: expected text, numbers, dates, lists or objects, got {type(value).__name__}; "
        "leave the column out or write it as text"
    )


def _plain_mapping(value: Mapping[Any, Any], where: str, depth: int) -> dict[str, Any]:
    plain = {str(key): plain_value(entry, f"{where}.{key}", depth) for key, entry in value.items()}
    return {key: entry for key, entry in plain.items() if entry is not None and entry != {}}
