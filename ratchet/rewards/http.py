"""A reward behind an HTTP endpoint: rows go out in batches over several connections, numbers come back.

Request: `POST {"rows": [{"prompt", "completion", "ground_truth", "data_source", "extra_info"}, ...]}`; response:
`{"rewards": [1.0, ...]}`, one finite number per row, in the rows' order. The trap: a request that fails midway has to
be tried again as a whole, whether the connection, the status or the body failed, so the tries are counted here and not
in the HTTP library, which has let go of a response by the time that its body breaks. `timeout` is the time of a whole
try: a server that sends a byte now and then does not hold a run, whether of the headers, of a chunk's length or of the
body. Nothing is unpacked, no redirect is followed, and no more than MAX_RESPONSE_BYTES are read.
"""

import json
import logging
import os
import random
import re
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

import requests  # type: ignore[import-untyped]
import urllib3

from ratchet.config.rewards import RewardModelConfig
from ratchet.errors import ConfigError, DataError, EngineError
from ratchet.rewards.data_proto import GradeRow, place_of
from ratchet.rewards.results import RewardResult, number
from ratchet.rewards.timed_session import Deadline, TimedSession

logger = logging.getLogger(__name__)

MAX_RESPONSE_BYTES = 64 * 2**20
_PASSING_STATUSES = frozenset({429, 500, 502, 503, 504})
_PASSING_ERRORS = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0


class _Passing(Exception):
    """A failure that the next try may not meet; never leaves this module."""

    def __init__(self, message: str, pause: float = 0.0) -> None:
        super().__init__(message)
        self.pause = pause


class HttpReward:
    """The reward of `reward_model.url`; safe to call again, and to close once it is not needed."""

    def __init__(self, config: RewardModelConfig) -> None:
        self._url, self.shown_url = config.url, _checked_url(config.url)
        self._secret = _secret(config.auth_env)
        self._batch_size, self._retries, self._timeout = config.batch_size, config.retries, config.timeout
        self._concurrency = config.concurrency
        self._local = threading.local()
        self._executor: ThreadPoolExecutor | None = None

    def score(self, rows: Sequence[GradeRow]) -> list[RewardResult]:
        """One result per row, in order. EngineError where the endpoint fails, DataError where its answer is unusable;
        both name the URL and the rows, and neither says what the Authorization header held."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._concurrency, thread_name_prefix="reward")
        stop = threading.Event()
        batches = [rows[start : start + self._batch_size] for start in range(0, len(rows), self._batch_size)]
        futures: list[Future[list[RewardResult]]] = [
            self._executor.submit(self._score_batch, batch, stop) for batch in batches
        ]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            failed = next((future for future in futures if future.done() and future.exception() is not None), None)
            if failed is not None:
                failed.result()
            return [result for future in futures for result in future.result()]
        finally:
            stop.set()
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """Give the connections back."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def _score_batch(self, rows: Sequence[GradeRow], stop: threading.Event) -> list[RewardResult]:
        where = f"{self.shown_url}, {place_of(rows)}"
        body = _request_body(rows, where)
        for attempt in range(self._retries + 1):
            try:
                return _rewards(self._post(body, where), rows, where)
            except _Passing as failure:
                if attempt == self._retries:
                    tries = f"{attempt + 1} {'try' if attempt == 0 else 'tries'}"
                    raise EngineError(f"{where}: {failure} ({tries})") from failure.__cause__
                pause = min(_LONGEST_PAUSE, max(failure.pause, _FIRST_PAUSE * 2**attempt * random.uniform(0.5, 1)))
                logger.warning("%s: %s; trying again in %.1f s", where, failure, pause)
                if stop.wait(pause):
                    break
        raise EngineError(f"{where}: given up, as another request failed")

    def _session(self) -> Any:
        if not hasattr(self._local, "session"):
            session = TimedSession(self._secret)
            session.headers.update({"Content-Type": "application/json", "Accept-Encoding": "identity"})
            self._local.session = session
        return self._local.session

    def _post(self, body: bytes, where: str) -> bytes:
        """The body of a successful response; _Passing where another try may succeed."""
        deadline = Deadline(self._timeout)
        try:
            with (
                deadline,
                # A redirected POST would become a GET, and might take the header to another host.
                self._session().post(
                    self._url, data=body, timeout=self._timeout, stream=True, allow_redirects=False
                ) as response,
            ):
                content = b"redirects are not followed" if response.is_redirect else _read(response, deadline, where)
        except (requests.RequestException, urllib3.exceptions.HTTPError, HTTPException, OSError) as error:
            is_late = deadline.is_over or _is_timeout(error)
            reason = f"no answer within {self._timeout:g} s" if is_late else _cause(error)
            reason = self._without_secret(reason)
            # The library's own errors about a request that it will not send do not pass.
            if isinstance(error, requests.RequestException) and not (is_late or isinstance(error, _PASSING_ERRORS)):
                raise EngineError(f"{where}: {reason}") from error
            if deadline.is_over and not _is_timeout(error):
                # What a connection that was shut says of itself.
                error = TimeoutError(str(error))
            raise _Passing(reason) from error
        if response.status_code == 200:
            return content
        said = f"{str(response.reason)[:80]}: {content[:200].decode('utf-8', 'replace').strip()}"
        # What a server says must not move a terminal's cursor, nor write a line of a log.
        said = _CONTROL.sub(" ", self._without_secret(said))
        message = f"expected status 200, got {response.status_code} {said}"
        if response.status_code in _PASSING_STATUSES:
            raise _Passing(message, _retry_after(response.headers.get("Retry-After", "")))
        hint = " (reward_model.auth_env names the variable with the Authorization header)"
        raise EngineError(f"{where}: {message}{hint if response.status_code in (401, 403) else ''}")

    def _without_secret(self, message: str) -> str:
        if not self._secret:
            return message
        for text in (self._secret, self._secret.rpartition(" ")[2]):
            message = message.replace(text, "***")
        return message


def _checked_url(url: str) -> str:
    """The URL as messages show it, without its query; ConfigError for one that cannot be posted to."""
    key = "reward_model.url"
    if not url:
        raise ConfigError(f"{key} is not set: the reward type api needs an address such as http://host:8000/score")
    try:
        parts = urlsplit(url)
        host, port, user = parts.hostname, parts.port, parts.username
    except ValueError as error:
        raise ConfigError(f"{key}: expected a URL such as http://host:8000/score ({error})") from error
    if user is not None or parts.password is not None:
        raise ConfigError(f"{key}: holds credentials, which would be stored with the run; use reward_model.auth_env")
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"{key}: expected a URL such as http://host:8000/score, got {parts.scheme}://{host or ''}")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}{'' if port is None else f':{port}'}{parts.path}"


def _secret(variable: str) -> str | None:
    """The Authorization header's value, which no message ever shows."""
    if not variable:
        return None
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ConfigError(f"reward_model.auth_env: the environment variable {variable} is not set or empty")
    if re.search(r"[^\x20-\x7e]", value):
        raise ConfigError(f"reward_model.auth_env: {variable} holds characters that no HTTP header can hold")
    return value


def _request_body(rows: Sequence[GradeRow], where: str) -> bytes:
    payload = [
        {
            "prompt": [dict(message) for message in row.prompt],
            "completion": row.completion,
            "ground_truth": row.ground_truth,
            "data_source": row.data_source,
            "extra_info": dict(row.extra_info),
        }
        for row in rows
    ]
    try:
        return json.dumps({"rows": payload}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: cannot be written as JSON ({error})") from error


def _read(response: Any, deadline: Deadline, where: str) -> bytes:
    """The body as it was sent, up to its limits of size and time."""
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise DataError(f"{where}: expected an answer that is not compressed, as was asked, got {encoding[:80]!r}")
    content = bytearray()
    while True:
        # read1 returns what has come: `read` would wait for more, each byte anew.
        chunk = response.raw.read1(65_536, decode_content=False)
        if not chunk:
            break
        content += chunk
        if len(content) > MAX_RESPONSE_BYTES:
            raise DataError(f"{where}: the response is longer than {MAX_RESPONSE_BYTES // 2**20} MiB")
        if deadline.is_over:
            raise TimeoutError
    if deadline.is_over:
        raise TimeoutError
    return bytes(content)


def _is_timeout(error: BaseException) -> bool:
    return isinstance(error, TimeoutError | requests.Timeout | urllib3.exceptions.TimeoutError)


def _cause(error: BaseException) -> str:
    """What went wrong, without the URL's query, which the libraries' own messages repeat."""
    innermost: BaseException = error
    while True:
        inner = innermost.__cause__ or innermost.__context__ or getattr(innermost, "reason", None)
        if not isinstance(inner, BaseException):
            break
        innermost = inner
    text = getattr(innermost, "strerror", None) or str(innermost)
    return f"{type(innermost).__name__}: {text}"


def _retry_after(value: str) -> float:
    """Seconds of a Retry-After header; dates are left to the usual pause."""
    return float(value) if re.fullmatch(r"\d{1,6}", value.strip()) else 0.0


def _rewards(content: bytes, rows: Sequence[GradeRow], where: str) -> list[RewardResult]:
    excerpt = content[:80].decode("utf-8", "replace")
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: expected JSON with the key rewards, got {excerpt!r}") from error
    values = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(values, list):
        raise DataError(f'{where}: expected {{"rewards": [...]}}, got {excerpt!r}')
    if len(values) != len(rows):
        raise DataError(f"{where}: expected {len(rows)} rewards, got {len(values)}")
    for row, value in zip(rows, values, strict=True):
        if isinstance(value, bool):
            raise DataError(f"{row.place}: expected a number from {where}, got {json.dumps(value)}")
    return [
        RewardResult(number(value, f"{row.place}: {where.partition(',')[0]}"))
        for row, value in zip(rows, values, strict=True)
    ]
