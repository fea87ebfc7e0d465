"""A Kubernetes API server as far as Ratchet asks one, in this process: strict about paths, accounts and selectors.

What it serves is a `KubeApi`'s dictionaries, which a test may change while it runs. An account is known by its token;
what it may do is a set of (verb, resource), as RBAC has it.
"""

import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "token-of-the-tests"
ACCOUNT = "system:serviceaccount:team:pipeline-runner"
KINDS = {"secrets": "Secret", "configmaps": "ConfigMap", "persistentvolumeclaims": "PersistentVolumeClaim"}
KINDS |= {"pods": "Pod", "events": "Event", "nodes": "Node", "workflows": "Workflow"}
CLUSTER_WIDE = {"nodes"}

Rule = tuple[str, str] | tuple[str, str, str]
"""(verb, resource) or (verb, resource, name)."""


@dataclass
class KubeApi:
    """What the server holds, and what it was asked."""

    url: str = ""
    token: str = TOKEN
    objects: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Namespace ("" for the cluster's) and resource, "team/pods" -> name -> object."""
    logs: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """(pod, container) -> lines, each "TIME TEXT" with TIME as Kubernetes writes it."""
    is_finished: set[str] = field(default_factory=set)
    """Pods whose log ends; that of another pod goes on."""
    rules: set[Rule] | None = None
    """What the account may do; None allows everything."""
    seen: list[tuple[str, str]] = field(default_factory=list)
    """(method, path with query) of every request."""
    delay_s: float = 0.0
    """How long every answer takes."""

    def add(self, resource: str, name: str, namespace: str = "team", **parts: Any) -> None:
        """Put an object there; `parts` are what it holds beside its name, "metadata" among them."""
        is_cluster_wide = resource in CLUSTER_WIDE
        metadata = {"name": name} | ({} if is_cluster_wide else {"namespace": namespace}) | parts.pop("metadata", {})
        place = f"{'' if is_cluster_wide else namespace}/{resource}"
        body = {"apiVersion": "v1", "kind": KINDS[resource], "metadata": metadata, **parts}
        self.objects.setdefault(place, {})[name] = body

    def add_node(
        self, name: str, *, labels: dict[str, str] | None = None, taints: list[dict[str, str]] | None = None,
        is_ready: bool = True, **allocatable: str,
    ) -> None:  # fmt: skip
        """Add a node; `allocatable` are amounts, with `gpu` for nvidia.com/gpu."""
        amounts = {"cpu": "8", "memory": "32Gi", "pods": "110"} | allocatable
        if "gpu" in amounts:
            amounts["nvidia.com/gpu"] = amounts.pop("gpu")
        self.add(
            "nodes",
            name,
            metadata={"labels": {"kubernetes.io/hostname": name} | (labels or {})},
            spec={"taints": taints} if taints else {},
            status={
                "allocatable": amounts,
                "conditions": [{"type": "Ready", "status": "True" if is_ready else "False"}],
            },
        )

    def write_kubeconfig(self, path: Path, *, namespace: str | None = "team", ca: Path | None = None) -> Path:
        """Write a kubeconfig with one context, `tests`, and return its path."""
        cluster = {"server": self.url} | ({"certificate-authority": str(ca)} if ca else {})
        context = {"cluster": "tests", "user": "tests"} | ({"namespace": namespace} if namespace else {})
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tests",
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": "tests", "user": {"token": self.token}}],
            "contexts": [{"name": "tests", "context": context}],
        }
        path.write_text(json.dumps(content))
        return path


class _Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: KubeApi

    def do_GET(self) -> None:
        self._answer("GET")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def _answer(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.api.seen.append((method, self.path))
        if self.api.delay_s:
            threading.Event().wait(self.api.delay_s)
        if self.headers.get("Authorization", "").lower() != f"bearer {self.api.token}":
            self._status(401, "Unauthorized", "Unauthorized")
            return
        if body:
            json.loads(body)
        parts = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        segments = [urllib.parse.unquote(part) for part in parts.path.split("/")[1:]]
        # Every resource is below its own group and nowhere else.
        group = ["apis", "argoproj.io", "v1alpha1"] if "workflows" in segments else ["api", "v1"]
        if segments[: len(group)] != group:
            self._status(404, "NotFound", "the server could not find the requested resource")
            return
        rest, namespace = segments[len(group) :], ""
        if rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        resource = rest[0] if rest else ""
        known = resource in KINDS and (resource in CLUSTER_WIDE) == (namespace == "")
        if not known or len(rest) > 3 or (len(rest) == 3 and rest[0::2] != ["pods", "log"]):
            self._status(404, "NotFound", "the server could not find the requested resource")
            return
        self._serve(method, namespace, resource, rest[1:], query)

    def _serve(self, method: str, namespace: str, resource: str, rest: list[str], query: dict[str, str]) -> None:
        name = rest[0] if rest else None
        asked = "/".join([resource, *rest[1:]])
        verb = "delete" if method == "DELETE" else "get" if name else "list"
        if not self._may(verb, asked, name):
            what = f'{resource} "{name}" is' if name else f"{resource} is"
            scope = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
            said = f'User "{ACCOUNT}" cannot {verb} resource "{asked}" in API group "" {scope}'
            self._status(403, "Forbidden", f"{what} forbidden: {said}")
            return
        found = self.api.objects.get(f"{namespace}/{resource}", {})
        if name is None:
            items = [item for item in found.values() if _matches(item, query)]
            kind = f"{KINDS[resource]}List"
            self._json(200, {"kind": kind, "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items})
        elif name not in found:
            self._status(404, "NotFound", f'{resource} "{name}" not found')
        elif len(rest) == 2:
            self._log(name, found[name], query)
        else:
            item = found.pop(name) if method == "DELETE" else found[name]
            self._json(200, item)

    def _may(self, verb: str, resource: str, name: str | None) -> bool:
        rules = self.api.rules
        return rules is None or (verb, resource) in rules or (name is not None and (verb, resource, name) in rules)

    def _log(self, pod: str, item: dict[str, Any], query: dict[str, str]) -> None:
        container = query.get("container", "")
        names = [one["name"] for one in (item.get("spec") or {}).get("containers") or [{"name": "main"}]]
        if container not in names:
            self._status(400, "BadRequest", f"container {container} is not valid for pod {pod}")
            return
        if (pod, container) not in self.api.logs:
            said = f'container "{container}" in pod "{pod}" is waiting to start: ContainerCreating'
            self._status(400, "BadRequest", said)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        lines, sent = self.api.logs[pod, container], 0
        if "tailLines" in query:
            sent = max(0, len(lines) - int(query["tailLines"]))
        while True:
            new = lines[sent:]
            for line in new:
                stamp, _, text = line.partition(" ")
                if stamp[:19] >= query.get("sinceTime", "")[:19]:
                    self._chunk(f"{line if query.get('timestamps') == 'true' else text}\n".encode())
            sent += len(new)
            if query.get("follow") != "true" or pod in self.api.is_finished:
                break
            threading.Event().wait(0.02)
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _status(self, code: int, reason: str, message: str) -> None:
        body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        self._json(code, body | {"message": message, "reason": reason, "code": code})

    def _json(self, code: int, body: dict[str, Any]) -> None:
        payload = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class _Threads(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in the middle is no fault of the server."""


def _matches(item: dict[str, Any], query: dict[str, str]) -> bool:
    for selector, of in (("labelSelector", "metadata.labels"), ("fieldSelector", "")):
        for term in filter(None, query.get(selector, "").split(",")):
            key, _, wanted = term.partition("=")
            found: Any = item
            path = [*of.split("."), key] if of else key.split(".")
            for part in path:
                found = found.get(part) if isinstance(found, dict) else None
            if found != wanted:
                return False
    return True


@contextmanager
def kube_api(*, tls: tuple[Path, Path] | None = None) -> Iterator[KubeApi]:
    """Yield a server's contents; with `tls`, (certificate, key), it speaks https."""
    api = KubeApi()
    handler = type("Handler", (_Server,), {"api": api})
    with _Threads(("127.0.0.1", 0), handler) as server:
        if tls:
            import ssl

            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        api.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1, which is its own authority, and its key; return (certificate, key)."""
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "kube-api of the tests")])
    now = datetime.now(UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "tls.crt", folder / "tls.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths
