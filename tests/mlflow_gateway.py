"""A gateway in front of an MLflow server that can misbehave in the ways in which servers and networks do."""

import contextlib
import http.client
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

MODES = ("ok", "500", "429", "drop", "lost", "hang", "page", "empty", "other")
"""Passes on; answers 500; answers 429 and asks for 30 s; cuts the connection; passes on and cuts the connection instead
of answering; does not answer; answers 200 with a web page; answers 200 with an empty object; answers 200 with an object
of another API. Where it is stopped, connections are refused."""

_JSON, _PAGE = "application/json", "text/html"


@dataclass
class Gateway:
    """Passes requests on to `target`, or does what `mode` says."""

    target: str
    mode: str = "ok"
    delay: float = 0.0
    """Seconds before each answer."""
    requests: int = 0
    uri: str = ""
    before: Callable[[str, str, bytes], None] | None = None
    """Called with method, path and body of each request before anything is done with it."""
    closing: threading.Event = field(default_factory=threading.Event)
    """Lets go of requests that hang."""
    _server: ThreadingHTTPServer | None = None
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen, on the port that was listened on before if there is one."""
        port = urlsplit(self.uri).port or 0
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        # Whoever stops the gateway from within a request must not be waited for.
        self._server.block_on_close = False
        self.uri = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.005,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Listen no more: connections are refused, and those that are open are cut at their next request."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
            self._server = self._thread = None

    def close(self) -> None:
        """End, whatever is under way."""
        self.closing.set()
        self.stop()

    @property
    def is_listening(self) -> bool:
        """Whether connections are taken."""
        return self._server is not None


def _handler(gateway: Gateway) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            gateway.requests += 1
            if gateway.before is not None:
                gateway.before(self.command, self.path, body)
            mode = gateway.mode if gateway.is_listening else "drop"
            time.sleep(gateway.delay)
            if mode == "hang":
                gateway.closing.wait(60)
            if mode == "lost":
                self._forward(body)
            if mode in ("drop", "lost", "hang"):
                self.close_connection = True
                return
            status, kind, reply = {
                "500": (500, _JSON, b"broken"),
                "429": (429, _JSON, b"slow down"),
                "page": (200, _PAGE, b"<!doctype html><title>Sign in</title>"),
                "empty": (200, _JSON, b"{}"),
                "other": (200, _JSON, b'{"experiment": 5}'),
            }.get(mode) or self._forward(body)
            with contextlib.suppress(ConnectionError):
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(reply)))
                if status == 429:
                    self.send_header("Retry-After", "30")
                self.end_headers()
                self.wfile.write(reply)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

        def _forward(self, body: bytes) -> tuple[int, str, bytes]:
            connection = http.client.HTTPConnection(urlsplit(gateway.target).netloc, timeout=30)
            try:
                kept = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "accept-encoding")}
                connection.request(self.command, self.path, body, kept)
                answer = connection.getresponse()
                return answer.status, answer.getheader("Content-Type") or _JSON, answer.read()
            except OSError:
                return 503, _JSON, b"no server behind the gateway"
            finally:
                connection.close()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    return Handler
