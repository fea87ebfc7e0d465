"""A wire between a client and a server that can be cut at a chosen moment."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

Cut = Literal["answer lost", "answer halved"]


@dataclass
class Wire:
    """Forwards connections to a server. `cut` does its harm to the next answer to `method`, once."""

    endpoint: str
    method: str = "PUT"
    cut: Cut | None = None
    cuts: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def harm(self, request: bytes, answer: bytes) -> Cut | None:
        """Return what is to be done to this answer."""
        with self.lock:
            cut = self.cut
            if cut is None or not request.startswith(self.method.encode()) or not answer.startswith(b"HTTP/1.1 20"):
                return None
            self.cut = None
            self.cuts += 1
            return cut


@contextlib.contextmanager
def wire_to(endpoint: str) -> Iterator[Wire]:
    """Yield a wire to the server at `endpoint`, listening on an address of its own."""
    server = (urlsplit(endpoint).hostname or "", urlsplit(endpoint).port or 0)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        result = Wire(f"http://127.0.0.1:{listener.getsockname()[1]}")
        threading.Thread(target=_accept, args=(listener, server, result), daemon=True).start()
        yield result


def _accept(listener: socket.socket, server: tuple[str, int], wire: Wire) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_forward, args=(client, server, wire), daemon=True).start()


def _forward(client: socket.socket, server: tuple[str, int], wire: Wire) -> None:
    with contextlib.suppress(OSError), client, socket.create_connection(server) as upstream:
        latest = [b""]

        def upload() -> None:
            with contextlib.suppress(OSError):
                while data := client.recv(65536):
                    if data.startswith((b"GET ", b"PUT ", b"HEAD ")):
                        latest[0] = data[:100]
                    upstream.sendall(data)

        threading.Thread(target=upload, daemon=True).start()
        while data := upstream.recv(65536):
            cut = wire.harm(latest[0], data)
            if cut == "answer halved":
                head, _, body = data.partition(b"\r\n\r\n")
                client.sendall(head + b"\r\n\r\n" + body[: len(body) // 2])
            if cut is not None:
                client.shutdown(socket.SHUT_RDWR)
                upstream.shutdown(socket.SHUT_RDWR)
                return
            client.sendall(data)
