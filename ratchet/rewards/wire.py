"""What travels between a run and the process that grades with its user's code: frames of JSON over a socket.

The trap: the other end runs code that nobody has checked. Nothing that it sends is executed, as unpickling would; each
result comes under the number of its row, and numbers are checked again where they arrive.
"""

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.errors import ConfigError, DataError, EngineError, NumericsError
from ratchet.rewards.data_proto import GradeRow
from ratchet.rewards.results import RewardResult, failed_result, number

_LENGTH = struct.Struct("<Q")
_CHUNK = 2**20
_MOST_BYTES = 2**32
_ERRORS: dict[str, type[Exception]] = {
    one.__name__: one for one in (ConfigError, DataError, EngineError, NumericsError)
}


def send(end: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one message; OSError where the other end is gone or does not take it in the socket's time."""
    body = json.dumps(message).encode()
    end.sendall(_LENGTH.pack(len(body)))
    end.sendall(body)


def receive(end: socket.socket) -> dict[str, Any]:
    """The next message; EOFError where the other end has closed, ValueError for what is no message."""
    (length,) = _LENGTH.unpack(_read(end, _LENGTH.size))
    if length > _MOST_BYTES:
        raise ValueError(f"expected at most {_MOST_BYTES} bytes, got {length}")
    message = json.loads(_read(end, length))
    if not isinstance(message, dict):
        raise ValueError(f"expected an object, got {type(message).__name__}")
    return message


def _read(end: socket.socket, length: int) -> bytearray:
    found = bytearray()
    while len(found) < length:
        chunk = end.recv(min(_CHUNK, length - len(found)))
        if not chunk:
            raise EOFError
        found += chunk
    return found


def row_message(row: GradeRow, *, with_tokens: bool) -> dict[str, Any]:
    """A row as it is sent; a hook is not told the tokens. DataError where extra_info holds what JSON cannot."""
    found: dict[str, Any] = {
        "where": row.where,
        "data_source": row.data_source,
        "prompt": [dict(message) for message in row.prompt],
        "completion": row.completion,
        "ground_truth": row.ground_truth,
        "extra_info": dict(row.extra_info),
        "finish_reason": row.finish_reason,
    }
    if with_tokens:
        found |= {
            "prompt_token_ids": list(row.prompt_token_ids),
            "completion_token_ids": list(row.completion_token_ids),
        }
    return found


def row_of(message: Mapping[str, Any]) -> GradeRow:
    """The row of a message."""
    return GradeRow(**message)


def results_message(results: Sequence[RewardResult], rows: Sequence[GradeRow]) -> dict[str, Any]:
    """Results as they are sent, each under the number of its row. DataError and NumericsError as `number`."""
    pairs = enumerate(zip(results, rows, strict=True))
    return {"results": [_entry(index, one, row.place) for index, (one, row) in pairs]}


def _entry(index: int, one: RewardResult, where: str) -> dict[str, Any]:
    tokens = one.token_rewards
    return {
        "row": index,
        "reward": None if one.is_failed else number(one.reward, where),
        "breakdown": {str(key): number(value, f"{where}, {key}") for key, value in one.breakdown.items()},
        "extracted": None if one.extracted is None else str(one.extracted),
        "is_parseable": bool(one.is_parseable),
        "error": None if one.error is None else str(one.error),
        "token_rewards": None if tokens is None else [number(value, f"{where}, a token") for value in tokens],
    }


def results_of(message: Mapping[str, Any], rows: Sequence[GradeRow], name: str) -> list[RewardResult]:
    """One result per row, joined by number. DataError and NumericsError name the row."""
    found = {entry["row"]: entry for entry in message["results"]}
    return [_result(found.get(index), row, f"{row.place}: the reward {name}") for index, row in enumerate(rows)]


def _result(entry: Mapping[str, Any] | None, row: GradeRow, where: str) -> RewardResult:
    if entry is None:
        raise DataError(f"{where}: expected one reward per row, got none for this one")
    breakdown = {key: number(value, f"{where}, {key}") for key, value in entry["breakdown"].items()}
    if entry["reward"] is None:
        return failed_result(entry["error"] or f"{where} says that it failed", breakdown)
    tokens = entry["token_rewards"]
    return RewardResult(
        number(entry["reward"], where),
        breakdown,
        extracted=entry["extracted"],
        is_parseable=entry["is_parseable"],
        error=entry["error"],
        token_rewards=None if tokens is None else [number(value, f"{where}, a token") for value in tokens],
    )


def error_message(error: Exception) -> dict[str, Any]:
    """An error of ours as it is sent."""
    return {"error": type(error).__name__, "said": str(error)}


def raise_error(message: Mapping[str, Any]) -> None:
    """Raise what the other end has told, if it has."""
    if "error" in message:
        raise _ERRORS.get(message["error"], DataError)(message["said"])
