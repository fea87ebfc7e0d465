"""A Kubeflow Pipelines endpoint as far as submitting a run needs one, in this process."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Requests = list[tuple[str, str, Any]]
"""(method, path, body) of every request."""


class _Endpoint(BaseHTTPRequestHandler):
    seen: Requests

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.seen.append((self.command, self.path, json.loads(body) if body else None))
        answer: dict[str, Any] = {}
        if "/experiments" in self.path:
            one = {"experiment_id": "e-1", "display_name": "ratchet"}
            answer = one if self.command == "POST" else {"experiments": [one]}
        if "/runs" in self.path:
            answer = {"run_id": "r-1", "display_name": "qwen"}
        payload = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    do_GET = do_POST = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def kfp_endpoint() -> Iterator[tuple[str, Requests]]:
    """Yield the endpoint's URL and the requests that it has seen."""
    seen: Requests = []
    handler = type("Handler", (_Endpoint,), {"seen": seen})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", seen
        finally:
            server.shutdown()
            thread.join()
