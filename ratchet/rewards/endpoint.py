"""Questions to a service over HTTP: many at once, within limits of time and size, tried again where that may help.

The trap: `timeout` is the time of a whole try. A server that sends a byte now and then does not hold a run, whether of
the headers, of a chunk's length or of the body. A request that fails midway has to be tried again as a whole, so the
tries are counted here. Nothing is unpacked, no redirect is followed, and no more than MAX_RESPONSE_BYTES are read.
"""

import asyncio
import logging
import os
import random
import re
import ssl
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from ratchet.config.rewards import RewardModelConfig
from ratchet.errors import ConfigError, DataError, EngineError

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

MAX_RESPONSE_BYTES = 64 * 2**20
_PASSING_STATUSES = frozenset({429, 500, 502, 503, 504})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# What an answer may be that does not reach its end; other errors are about a request that will never be sent.
_PASSING_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, aiohttp.ClientResponseError, OSError)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0
_CONNECTING = 0.9
"""Share of a try's time after which a host that does not take a connection is told from one that is slow."""


@dataclass(frozen=True, slots=True)
class Question(Generic[Answer]):
    """One request."""

    body: Callable[[], bytes]
    """Makes the JSON that is posted."""
    read: Callable[[bytes], Answer]
    """Makes the answer of a successful response's body; what it raises ends everything."""
    where: str
    """Names the request in errors."""


class _Passing(Exception):
    """A failure that the next try may not meet; never leaves this module."""

    def __init__(self, message: str, pause: float = 0.0) -> None:
        super().__init__(message)
        self.pause = pause


class Endpoint:
    """An address that questions are posted to, over connections that stay open between calls until `close`."""

    def __init__(self, url: str, reward: RewardModelConfig, *, key: str) -> None:
        """`key` is the config key that holds `url`; `reward` has the limits. ConfigError for what cannot be posted to,
        and for a secret that is not there."""
        parts = _checked_url(url, key)
        self.url = url
        self.shown_url = f"{parts.scheme}://{parts.netloc}{parts.path}"
        """Without its query, which may hold a key."""
        self._secret = _secret(reward.auth_env)
        self._timeout, self._retries, self._concurrency = reward.timeout, reward.retries, reward.concurrency
        self._proxy = _proxy(parts)
        self._lock = threading.Lock()
        self._loop: _Loop | None = None

    def ask(self, questions: Sequence[Question[Answer]], *, excludes: bool = False) -> list[Answer | EngineError]:
        """One answer per question, in order.

        EngineError where a request fails for good; with `excludes` it stands in place of the answer instead. It names
        the URL and `where`, and does not say what the Authorization header held.
        """
        with self._lock:
            if self._loop is None:
                self._loop = _Loop(self._concurrency)
            loop = self._loop
        future = asyncio.run_coroutine_threadsafe(self._ask(loop, questions, excludes), loop.loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Give the connections back; a later `ask` opens others."""
        with self._lock:
            if self._loop is not None:
                self._loop.stop()
                self._loop = None

    async def _ask(
        self, loop: "_Loop", questions: Sequence[Question[Answer]], excludes: bool
    ) -> list[Answer | EngineError]:
        async def answer(question: Question[Answer]) -> Answer | EngineError:
            try:
                async with loop.places:
                    return await self._answer(loop.session, question)
            except EngineError as error:
                if not excludes:
                    raise
                return error

        tasks = [asyncio.create_task(answer(question)) for question in questions]
        try:
            return await asyncio.gather(*tasks)
        finally:
            # The first failure ends the others, and so does the end of this call.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, session: aiohttp.ClientSession, question: Question[Answer]) -> Answer:
        where = f"{self.shown_url}, {question.where}"
        body = question.body()
        for attempt in range(self._retries + 1):
            try:
                return question.read(await self._post(session, body, where))
            except _Passing as failure:
                if attempt == self._retries:
                    tries = f"{attempt + 1} {'try' if attempt == 0 else 'tries'}"
                    raise EngineError(f"{where}: {failure} ({tries})") from failure.__cause__
                pause = min(_LONGEST_PAUSE, max(failure.pause, _FIRST_PAUSE * 2**attempt * random.uniform(0.5, 1)))
                logger.warning("%s: %s; trying again in %.1f s", where, failure, pause)
                await asyncio.sleep(pause)
        raise AssertionError("the last try returns or raises")

    async def _post(self, session: aiohttp.ClientSession, body: bytes, where: str) -> bytes:
        """The body of a successful response; _Passing where another try may succeed."""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._secret:
            headers["Authorization"] = self._secret
        try:
            # A redirected POST would become a GET, and might take the header to another host.
            async with session.post(
                self.url,
                data=body,
                headers=headers,
                proxy=self._proxy,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=self._timeout, sock_connect=_CONNECTING * self._timeout),
            ) as response:
                is_redirect = response.status in _REDIRECTS
                content = b"redirects are not followed" if is_redirect else await _read(response, where)
        except TimeoutError as error:
            what = "connection" if isinstance(error, aiohttp.ConnectionTimeoutError) else "answer"
            raise _Passing(f"no {what} within {self._timeout:g} s") from error
        except (aiohttp.ClientError, OSError, UnicodeError) as error:
            reason = self._safe(_cause(error))
            if not isinstance(error, _PASSING_ERRORS) or isinstance(error, aiohttp.InvalidURL):
                raise EngineError(f"{where}: {reason}") from error
            raise _Passing(reason) from error
        if response.status == 200:
            return content
        said = f"{str(response.reason)[:80]}: {content[:200].decode('utf-8', 'replace').strip()}"
        message = f"expected status 200, got {response.status} {self._safe(said)}"
        if response.status in _PASSING_STATUSES:
            raise _Passing(message, _retry_after(response.headers.get("Retry-After", "")))
        hint = " (reward_model.auth_env names the variable with the Authorization header)"
        raise EngineError(f"{where}: {message}{hint if response.status in (401, 403) else ''}")

    def _safe(self, said: str) -> str:
        """What a server says, without the secret, and without what moves a terminal's cursor or writes a log's line."""
        if self._secret:
            for text in (self._secret, self._secret.rpartition(" ")[2]):
                said = said.replace(text, "***")
        return _CONTROL.sub(" ", said)


class _Loop:
    """The thread that talks to the service: callers wait for it, and may have an event loop of their own."""

    def __init__(self, concurrency: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.places = asyncio.Semaphore(concurrency)
        """As many requests are under way at once; waiting for one is no part of a request's time."""
        thread = threading.Thread(target=self.loop.run_forever, name="reward", daemon=True)
        thread.start()
        self.session = asyncio.run_coroutine_threadsafe(_open_session(concurrency), self.loop).result()
        self.stop = weakref.finalize(self, _stop, self.loop, thread, self.session)
        """Ends it, once; so does the end of this object or of this process."""


async def _open_session(concurrency: int) -> aiohttp.ClientSession:
    context = ssl.create_default_context()
    if bundle := os.environ.get("REQUESTS_CA_BUNDLE"):
        is_folder = os.path.isdir(bundle)
        context.load_verify_locations(capath=bundle if is_folder else None, cafile=None if is_folder else bundle)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=concurrency, ssl=context),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        # Its own reading of the environment would send what ~/.netrc holds.
        trust_env=False,
    )


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, session: aiohttp.ClientSession) -> None:
    asyncio.run_coroutine_threadsafe(session.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _read(response: aiohttp.ClientResponse, where: str) -> bytes:
    """The body as it was sent, up to its limit."""
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise DataError(f"{where}: expected an answer that is not compressed, as was asked, got {encoding[:80]!r}")
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > MAX_RESPONSE_BYTES:
            raise DataError(f"{where}: the response is longer than {MAX_RESPONSE_BYTES // 2**20} MiB")
    return bytes(content)


def _checked_url(url: str, key: str) -> SplitResult:
    """The URL's parts; ConfigError for one that cannot be posted to."""
    if not url:
        raise ConfigError(f"{key} is not set: expected an address such as http://host:8000/score")
    try:
        parts = urlsplit(url)
        host, _, user = parts.hostname, parts.port, parts.username
    except ValueError as error:
        raise ConfigError(f"{key}: expected a URL such as http://host:8000/score ({error})") from error
    if user is not None or parts.password is not None:
        raise ConfigError(f"{key}: holds credentials, which would be stored with the run; use reward_model.auth_env")
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"{key}: expected a URL such as http://host:8000/score, got {parts.scheme}://{host or ''}")
    return parts


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


def _proxy(parts: SplitResult) -> str | None:
    """The proxy that the environment names for an address."""
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return None if proxy is None or proxy_bypass(parts.netloc) else proxy


def _cause(error: BaseException) -> str:
    """What went wrong, without the URL's query, which the library's own messages repeat."""
    if isinstance(error, aiohttp.InvalidURL):
        return "the URL cannot be posted to"
    number = getattr(error, "errno", None)
    if isinstance(number, int) and number > 0:
        return f"{type(error).__name__}: {os.strerror(number)}"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"{type(error).__name__}: {error.message}"
    return f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"


def _retry_after(value: str) -> float:
    """Seconds of a Retry-After header; dates are left to the usual pause."""
    return float(value) if re.fullmatch(r"\d{1,6}", value.strip()) else 0.0
