"""A Kubeflow Pipelines server in this process: its REST API v2beta1 as strict as the real one, without a cluster.

Runs do nothing; a test says what becomes of them (`KfpServer.set_state`), and lets a schedule's turn come (`tick`).
"""

import email
import email.policy
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.kfp_checks import Refused
from tests.kfp_state import Answer, KfpServer, Query, Requests

__all__ = ["KfpServer", "Requests", "forget_endpoints", "kfp_endpoint", "kfp_server"]

ROOT = "/apis/v2beta1"
_ROUTES: list[tuple[str, str, Callable[..., Answer]]] = [
    ("GET", r"/healthz", KfpServer.healthz),
    ("GET", r"/experiments", KfpServer.list_experiments),
    ("POST", r"/experiments", KfpServer.make_experiment),
    ("GET", r"/pipelines", KfpServer.list_pipelines),
    ("POST", r"/pipelines", KfpServer.make_pipeline),
    ("POST", r"/pipelines/upload_version", KfpServer.upload_version),
    ("GET", r"/pipelines/([^/]+)/versions", KfpServer.list_versions),
    ("GET", r"/pipelines/([^/]+)/versions/([^/]+)", KfpServer.get_version),
    ("GET", r"/runs", KfpServer.list_runs),
    ("POST", r"/runs", KfpServer.make_run),
    ("GET", r"/runs/([^/:]+)", KfpServer.get_run),
    ("DELETE", r"/runs/([^/:]+)", KfpServer.delete_run),
    ("POST", r"/runs/([^/:]+):terminate", KfpServer.terminate_run),
    ("GET", r"/recurringruns", KfpServer.list_schedules),
    ("POST", r"/recurringruns", KfpServer.make_schedule),
    ("GET", r"/recurringruns/([^/:]+)", KfpServer.get_schedule),
    ("DELETE", r"/recurringruns/([^/:]+)", KfpServer.delete_schedule),
    ("POST", r"/recurringruns/([^/:]+):(enable|disable)", KfpServer.switch_schedule),
]


class _Handler(BaseHTTPRequestHandler):
    served: KfpServer

    def _answer(self) -> None:
        server, parts = self.served, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind = self.headers.get("Content-Type", "")
        read: Any = _uploaded(kind, body) if kind.startswith("multipart/") else json.loads(body) if body else None
        server.requests.append((self.command, self.path, read))
        server.headers.append({name.lower(): value for name, value in self.headers.items()})
        for part, (status, headers, answer) in server.answers.items():
            if part in self.path:
                return self._send(status, answer, headers)
        try:
            self._check_who(server)
            found = self._call(server, parts.path, dict(parse_qsl(parts.query)), read)
            self._send(200, json.dumps(found).encode())
        except Refused as error:
            told = {"error": str(error), "code": error.status, "message": str(error), "details": []}
            self._send(error.status, json.dumps(told).encode())

    def _check_who(self, server: KfpServer) -> None:
        if server.token and self.headers.get("Authorization") != f"Bearer {server.token}":
            raise Refused(401, "Unauthenticated: Request header error: there is no user identity header")
        if server.cookie and self.headers.get("Cookie") != server.cookie:
            raise Refused(403, "PermissionDenied: no such session")

    def _call(self, server: KfpServer, path: str, query: Query, body: Any) -> Answer:
        for method, pattern, route in _ROUTES:
            found = re.fullmatch(re.escape(server.prefix + ROOT) + pattern, path)
            if found and method == self.command:
                takes_body = body is not None and route.__name__.startswith(("make", "upload"))
                return route(server, query, *found.groups(), *([body] if takes_body else []))
        raise Refused(404, "Not Found")

    def _send(self, status: int, payload: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    do_GET = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def _uploaded(kind: str, body: bytes) -> bytes:
    message = email.message_from_bytes(f"Content-Type: {kind}\r\n\r\n".encode() + body, policy=email.policy.HTTP)
    (part,) = (
        one for one in message.iter_parts() if one.get_param("name", header="content-disposition") == "uploadfile"
    )
    content = part.get_payload(decode=True)
    assert isinstance(content, bytes)
    return content


@contextmanager
def kfp_server(**options: Any) -> Iterator[KfpServer]:
    """Yield a running server; `options` are `KfpServer`'s."""
    served = KfpServer(**options)
    handler = type("Handler", (_Handler,), {"served": served})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        served.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def kfp_endpoint() -> Iterator[tuple[str, Requests]]:
    """Yield the URL of a running server, and the requests that it has seen."""
    with kfp_server() as served:
        yield served.url, served.requests


def forget_endpoints(monkeypatch: Any, home: Any) -> None:
    """Let nothing of this machine say where a cluster is, who asks it, or what object storage there is."""
    for name in list(os.environ):
        if name.startswith(("KF_PIPELINES_", "KUBE", "AWS_", "RATCHET_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("KUBECONFIG", str(home / "no-kubeconfig"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
