"""HTTP sessions whose requests end when their time is over, whatever the server does.

Trap: the timeouts of requests and urllib3 are those of one read from the connection. A server that sends a byte a
second is within them for ever, above all where whole lines are read: the headers, and the length of a chunk.
"""

import socket
import threading
from contextlib import suppress
from typing import Any

import requests  # type: ignore[import-untyped]


class _Watched:
    """A connection that the deadline of its try can shut, whatever it is reading; mixed into urllib3's own.

    Their timeout is that of one read, and begins anew with every byte.
    """

    sock: Any
    watch = threading.local()

    def getresponse(self) -> Any:
        """Tell the try of this thread what to shut."""
        deadline: Deadline | None = getattr(self.watch, "of_this_try", None)
        if deadline is not None:
            deadline.sock = self.sock
            if deadline.is_over:
                raise TimeoutError
        return super().getresponse()  # type: ignore[misc]


class Deadline:
    """Shuts the connection of one try, which this thread makes within it, when its time is over."""

    def __init__(self, seconds: float) -> None:
        self.sock: socket.socket | None = None
        self.is_over = False
        self._timer = threading.Timer(seconds, self._shut)
        self._timer.daemon = True

    def __enter__(self) -> "Deadline":
        _Watched.watch.of_this_try = self
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        _Watched.watch.of_this_try = None

    def _shut(self) -> None:
        self.is_over = True
        if self.sock is not None:
            with suppress(OSError):  # it may be closed already
                self.sock.shutdown(socket.SHUT_RDWR)


class _Adapter(requests.adapters.HTTPAdapter):  # type: ignore[misc]
    def get_connection_with_tls_context(self, *arguments: Any, **options: Any) -> Any:
        pool = super().get_connection_with_tls_context(*arguments, **options)
        if not issubclass(pool.ConnectionCls, _Watched):
            pool.ConnectionCls = type("WatchedConnection", (_Watched, pool.ConnectionCls), {})
        return pool


class TimedSession(requests.Session):  # type: ignore[misc]
    """Connections that stay open; every request belongs in a `Deadline`."""

    def __init__(self, authorization: str | None) -> None:
        """`authorization` is the header's value."""
        super().__init__()
        self.auth = _Authorization(authorization)
        for scheme in ("http://", "https://"):
            self.mount(scheme, _Adapter())

    def get_redirect_target(self, resp: Any) -> None:
        """None: even of a redirect that it does not follow, requests would read the whole body."""


class _Authorization(requests.auth.AuthBase):  # type: ignore[misc]
    """Sets the header, or nothing. Without an `auth`, requests would send what ~/.netrc holds instead."""

    def __init__(self, value: str | None) -> None:
        self.value = value

    def __call__(self, request: Any) -> Any:
        if self.value is not None:
            request.headers["Authorization"] = self.value
        return request
