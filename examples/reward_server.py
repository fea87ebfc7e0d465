"""A reward server in the standard library alone: what `reward_model.type=api` talks to.

Start it with `python examples/reward_server.py 8000` and point a run at it with `reward_model.type=api` and
`reward_model.url=http://localhost:8000/score`. Replace `score` by your own. Each connection has a thread and stays
open, so that a request costs no handshake.
"""

import contextlib
import hmac
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

AUTHORIZATION = os.environ.get("REWARD_SERVER_AUTH", "")
"""What the Authorization header must say; empty takes everyone."""
MAX_REQUEST_BYTES = 64 * 2**20


def score(row: dict[str, Any]) -> float:
    """The reward of one row: prompt (messages), completion, ground_truth (or None), data_source, extra_info."""
    return float(row["completion"].rpartition("####")[2].strip() == row["ground_truth"])


class RewardHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections open
    disable_nagle_algorithm = True
    timeout = 300

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if length > MAX_REQUEST_BYTES:
            self.close_connection = True
            return self._answer(413, {"error": f"a request has at most {MAX_REQUEST_BYTES} bytes"})
        body = self.rfile.read(length)
        given = self.headers.get("Authorization", "").encode()
        if AUTHORIZATION and not hmac.compare_digest(given, AUTHORIZATION.encode()):
            return self._answer(401, {"error": "wrong Authorization header"})
        try:
            rewards = [score(row) for row in json.loads(body)["rows"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return self._answer(400, {"error": f"{type(error).__name__}: {error}"})
        return self._answer(200, {"rewards": rewards})

    def _answer(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Say nothing: one line a request would be thousands a step."""


class RewardServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    host = os.environ.get("REWARD_SERVER_HOST", "127.0.0.1")
    with RewardServer((host, port), RewardHandler) as server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
