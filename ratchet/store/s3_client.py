"""The boto3 client of each environment, and which of a server's troubles pass when it is asked again.

Traps: boto3 stops asking again after some hundred failures in a process, whatever came in between, so that after an
outage every single broken connection would be an error; and bytes that were damaged on the way are the client's
mistake to it; and an answer that broke off may pass for another one: in its head, for a listing of nothing; in the
name of an error, for one of a server that is not S3.
"""

import os
import random
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.exceptions import HTTPClientError, IncompleteReadError, ResponseStreamingError

CONNECT_SECONDS = 5.0
READ_SECONDS = 60.0
"""How long a server may be silent in the middle of an answer."""
_REQUEST_ATTEMPTS = 10
"""Attempts at one request: rides out a server's restart of some 10 s. Nobody listening is an error after at most 26 s,
an address that swallows packets after 76 s. AWS_MAX_ATTEMPTS overrides it."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 20.0
"""Seconds; each pause is twice the one before, as boto3's own are."""

_PASSING_STATUS = (429, 500, 502, 503, 504)
_PASSING_CODES = ("SlowDown", "RequestTimeout", "InternalError")
_DAMAGED_ON_THE_WAY = (
    "BadDigest",
    "IncompleteBody",
    "MalformedXML",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
)

_READS = ("GetObject", "HeadObject", "ListObjectsV2")

_lock = threading.Lock()
_clients: dict[tuple[tuple[str, str], ...], Any] = {}


def client() -> Any:
    """Return the client for the current environment; making one costs 0.1 s, and threads may share it."""
    key = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_")))
    with _lock:
        if key not in _clients:
            _clients[key] = _new_client()
        return _clients[key]


def code(answer: Mapping[str, Any]) -> str:
    """Return the server's name for what went wrong, or the bare status number."""
    return str(answer.get("Error", {}).get("Code", ""))


def is_passing(answer: Mapping[str, Any]) -> bool:
    """Whether the server says that it cannot answer now, or that a request did not reach it whole."""
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return status in _PASSING_STATUS or code(answer) in (*_PASSING_CODES, *_DAMAGED_ON_THE_WAY)


def is_broken_off(error: BaseException | None) -> bool:
    """Whether an error says that there was no answer, or not a whole one."""
    kinds = (HTTPClientError, BotoConnectionError, IncompleteReadError, ConnectionError, TimeoutError)
    return isinstance(error, kinds)


def _new_client() -> Any:
    # Servers other than AWS are rarely reachable as bucket.host, and a custom endpoint needs some region.
    custom = any(os.environ.get(name) for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"))
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    # Adaptive: once the server throttles, this client slows down by itself.
    mode: Any = os.environ.get("AWS_RETRY_MODE") or "adaptive"
    attempts = int(os.environ.get("AWS_MAX_ATTEMPTS") or _REQUEST_ATTEMPTS)
    config = Config(
        retries={"mode": mode, "total_max_attempts": attempts},
        s3={"addressing_style": "path"} if custom else {},
        max_pool_connections=32,
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
    )
    # A session of its own: the default one is not safe to make clients from while other threads do.
    session = boto3.session.Session()
    region = region or session.region_name or ("us-east-1" if custom else None)
    made = session.client("s3", config=config, region_name=region)
    made.meta.events.register("needs-retry.s3", partial(_ask_again, attempts))
    made.meta.events.register("after-call.s3", _refuse_cut_short)
    return made


def _ask_again(
    most: int,
    *,
    attempts: int,
    response: tuple[Any, Mapping[str, Any]] | None,
    caught_exception: BaseException | None,
    operation: Any,
    **_: Any,
) -> float | None:
    """Return the seconds after which to ask again, or None; where boto3 asks again by itself, its answer counts."""
    if attempts >= most:
        return None
    if response is None:
        passes = is_broken_off(caught_exception)
    else:
        passes = is_passing(response[1]) or _is_cut_short(operation.name, *response)
    return min(_FIRST_PAUSE * 2.0 ** (attempts - 1), _LONGEST_PAUSE) * random.uniform(0.5, 1.0) if passes else None


def _refuse_cut_short(http_response: Any, parsed: Mapping[str, Any], model: Any, **_: Any) -> None:
    """Raise what says that an answer broke off, before it is taken for one."""
    if _is_cut_short(model.name, http_response, parsed):
        raise ResponseStreamingError(error="the answer broke off")


def _is_cut_short(operation: str, http_response: Any, answer: Mapping[str, Any]) -> bool:
    """Whether an answer ended in its head, or in a body that is no object's: of an object, its reader will tell."""
    lengths = {"content-length", "transfer-encoding"} & {name.lower() for name in http_response.headers}
    # To HEAD, an error needs none.
    has_length = http_response.status_code in (200, 206) or operation != "HeadObject"
    if operation in _READS and has_length and not lengths:
        if "Body" in answer:
            # Nobody else closes it: to boto3 it is an answer that is being read.
            answer["Body"].close()
        return True
    if operation == "HeadObject" or "Body" in answer:
        return False
    return len(http_response.content) < int(http_response.headers.get("content-length") or 0)
