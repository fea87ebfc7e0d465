"""An S3 server's trouble on demand: a proxy in front of a real one, which does harm to the requests that rules name.

Requests reach the server byte for byte, Host header included, so that the client's signature fits. Only a request
from which If-None-Match is taken has to be signed again, with the server's own keys.
"""

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.chaos.s3_requests import Fault, Request, Rule

_ERRORS = {
    "500": (500, "InternalError", "We encountered an internal error. Please try again."),
    "503 SlowDown": (503, "SlowDown", "Please reduce your request rate."),
}


@dataclass
class Proxy:
    """A running proxy: give `endpoint` to clients, and change `rules` at any time."""

    endpoint: str
    upstream: tuple[str, int]
    keys: tuple[str, str, str]
    """Access key, secret key and region of the server, to sign again."""
    rules: list[Rule] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    """Everything that was asked, in the order of arrival, what an outage refused left out."""
    refused: int = 0
    """Connections and requests that an outage refused."""
    closing: threading.Event = field(default_factory=threading.Event)
    _out_until: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def outage(self, seconds: float) -> None:
        """Refuse everything for so long, from now on; 0 ends an outage."""
        self._out_until = time.monotonic() + seconds

    @property
    def is_out(self) -> bool:
        """Whether there is an outage."""
        return time.monotonic() < self._out_until

    def harm(self, request: Request) -> Rule | None:
        """Write the request down, and return the rule that strikes it."""
        with self._lock:
            self.requests.append(request)
            # Each rule counts, whether or not another one strikes first.
            struck = [rule for rule in self.rules if rule.strikes(request)]
        if struck and struck[0].fault == "outage":
            self.outage(struck[0].seconds)
        return struck[0] if struck else None


@contextlib.contextmanager
def proxy_to(server: Any) -> Iterator[Proxy]:
    """Yield a proxy to a `demo.servers.S3Server`; every thread and connection of it ends with the block."""
    parts = urlsplit(server.endpoint)
    listener = _Server(("127.0.0.1", 0), _Handler)
    listener.proxy = proxy = Proxy(
        f"http://127.0.0.1:{listener.server_address[1]}",
        (parts.hostname or "", parts.port or 0),
        (server.access_key, server.secret_key, server.region),
    )
    thread = threading.Thread(target=listener.serve_forever, args=(0.02,), name="s3-proxy", daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.closing.set()
        listener.shutdown()
        listener.cut_connections()
        listener.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    # Its threads are joined at the end: a process that forks afterwards has none of them.
    daemon_threads = False
    request_queue_size = 128
    proxy: Proxy

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        # Without the shutdown of the base class, so that a reset is one.
        self._open.discard(request)
        request.close()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that hang up: many are made to."""

    def cut_connections(self) -> None:
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    disable_nagle_algorithm = True
    wbufsize = -1

    def setup(self) -> None:
        super().setup()
        self._upstream: http.client.HTTPConnection | None = None

    def finish(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def handle_one_request(self) -> None:
        if self.server.proxy.is_out:
            self._refuse()
        else:
            super().handle_one_request()

    def handle_expect_100(self) -> bool:
        leave = super().handle_expect_100()
        # What waits in a buffer would make each put wait for a second.
        self.wfile.flush()
        return leave

    def _serve(self) -> None:
        proxy = self.server.proxy
        if proxy.is_out:
            return self._refuse()
        length = int(self.headers.get("Content-Length") or 0)
        assert "Transfer-Encoding" not in self.headers, "boto3 sends lengths"
        request = Request(self.command, _target(self.path), length, self.headers.get("If-None-Match") == "*")
        rule = proxy.harm(request)
        fault = rule.fault if rule else None
        if rule is None or rule.is_after or fault in ("latency", "create-only ignored") or "answer" in str(fault):
            status, headers, answer = self._ask(self._body(length), drop_condition=fault == "create-only ignored")
            request.answered = len(answer)
            self._answer(rule, status, headers, answer)
        elif fault == "request flipped":
            self._answer(None, *self._ask(_flipped(self._body(length)), drop_condition=False))
        else:
            body = self._body(length // 2 if fault == "reset mid-request" else length)
            if fault == "request truncated":
                self._ask_half(body)
            self._fail(rule.fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    # -- the server's side ---------------------------------------------------------------------------------------------

    def _headers(self, drop_condition: bool) -> list[tuple[str, str]]:
        # 100-continue was answered here.
        headers = [(name, value) for name, value in self.headers.items() if name.lower() != "expect"]
        return self._signed_again(headers) if drop_condition else headers

    def _signed_again(self, headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        access, secret, region = self.server.proxy.keys
        left = ("if-none-match", "authorization", "x-amz-date", "content-length")
        kept = {name: value for name, value in headers if name.lower() not in left}
        request = AWSRequest(self.command, f"http://{kept['Host']}{self.path}", headers=kept)
        request.context["payload_signing_enabled"] = False
        request.context["signing"] = {"disableDoubleEncoding": True}
        S3SigV4Auth(Credentials(access, secret), "s3", region).add_auth(request)
        signed = [(name, str(value)) for name, value in request.headers.items()]
        return [*signed, *((name, value) for name, value in headers if name.lower() == "content-length")]

    def _ask(self, body: bytes, *, drop_condition: bool) -> tuple[int, list[tuple[str, str]], bytes]:
        headers = self._headers(drop_condition)
        for attempt in (1, 2):
            connection = self._upstream = self._upstream or http.client.HTTPConnection(*self.server.proxy.upstream)
            is_kept = connection.sock is not None
            try:
                self._send(connection, headers, body)
                answer = connection.getresponse()
                return answer.status, answer.getheaders(), answer.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                self._upstream = None
                # A connection that the server closed while nobody used it is no trouble of anyone's.
                if attempt == 2 or not is_kept:
                    raise
        raise AssertionError("unreachable")

    def _ask_half(self, body: bytes) -> None:
        with contextlib.closing(http.client.HTTPConnection(*self.server.proxy.upstream)) as connection:
            self._send(connection, self._headers(drop_condition=False), body[: len(body) // 2])

    def _send(self, connection: http.client.HTTPConnection, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name, value)
        connection.endheaders(body or None)

    # -- the client's side ---------------------------------------------------------------------------------------------

    def _body(self, length: int) -> bytes:
        body = self.rfile.read(length)
        if len(body) < length:
            raise ConnectionResetError("the client hung up")
        return body

    def _answer(self, rule: Rule | None, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        fault = rule.fault if rule is not None else None
        if rule is not None and rule.fault in (*_ERRORS, "timeout", "reset"):
            self._fail(rule.fault)
            return
        if rule is not None and fault == "latency":
            self.server.proxy.closing.wait(rule.seconds)
        if fault == "answer flipped":
            body = _flipped(body)
        head = self._head(status, headers, len(body))
        if fault in ("answer truncated", "answer headless"):
            first_line = head[: head.index(b"\n") + 1]
            self.wfile.write(head + body[: len(body) // 2] if fault == "answer truncated" else first_line)
            self.close_connection = True
        else:
            self.wfile.write(head + body)
        self.wfile.flush()

    def _head(self, status: int, headers: Sequence[tuple[str, str]], size: int) -> bytes:
        kept = [(name, value) for name, value in headers if name.lower() not in ("transfer-encoding", "connection")]
        if not any(name.lower() == "content-length" for name, _ in kept) and status not in (204, 304):
            kept.append(("Content-Length", str(size)))
        lines = [f"HTTP/1.1 {status} {self.responses.get(status, ('',))[0]}", *(f"{k}: {v}" for k, v in kept)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def _say(self, status: int, code: str, message: str) -> None:
        body = b"" if self.command == "HEAD" else _error(code, message)
        self.wfile.write(self._head(status, [("Content-Type", "application/xml")], len(body)) + body)
        self.wfile.flush()

    def _fail(self, fault: Fault) -> None:
        """Give no answer, or one that says so."""
        if fault in _ERRORS:
            self._say(*_ERRORS[fault])
        elif fault == "timeout":
            self._hang()
        else:
            self._reset()

    def _hang(self) -> None:
        """Hold the connection until the client gives up, or the proxy ends."""
        self.close_connection = True
        self.connection.settimeout(0.02)
        while not self.server.proxy.closing.is_set():
            with contextlib.suppress(TimeoutError):
                if not self.connection.recv(1):
                    return

    def _reset(self) -> None:
        """End the connection with RST, as a server that dies does."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _refuse(self) -> None:
        self.server.proxy.refused += 1
        self._reset()


def _target(path: str) -> str:
    """Key and query of a path-style request, without the bucket and without percent signs."""
    parts = urlsplit(path)
    query = "&".join(f"{name}={value}" for name, value in parse_qsl(parts.query, keep_blank_values=True))
    return unquote(parts.path).lstrip("/").partition("/")[2] + (f"?{query}" if query else "")


def _flipped(data: bytes) -> bytes:
    """The same bytes but for one bit in the middle."""
    if not data:
        return data
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def _error(code: str, message: str) -> bytes:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()
