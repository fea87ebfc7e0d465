"""Real servers for the demo and the tests: S3 (SeaweedFS) and MLflow on SQLite, each for as long as a `with` block
lasts.

Both listen on loopback only, on ports that are free when the block is entered, so that any number of sessions can run
side by side. A port may be taken between the moment it is found free and the moment the server binds it: a start that
fails that way is tried again with other ports.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratchet.errors import StoreError

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
REGION = "us-east-1"
START_ATTEMPTS = 4
START_SECONDS = 120.0
"""How long a server may take to answer: seconds on a quiet machine, a minute when its imports compete for the cores.
"""
ANSWER_SECONDS = 5.0
"""How long one question whether a server is ready may take."""
STOP_SECONDS = 5.0
"""Between SIGTERM and SIGKILL. SeaweedFS needs 2.5 s to end by itself; what was acknowledged is on disk either way.
"""
LOG_TAIL_BYTES = 3000
IDENTITY = "s3-identity.json"
IDENTITY_HEADER = "X-Ratchet-Server"


@dataclass(frozen=True)
class S3Server:
    """A running SeaweedFS gateway and the only key pair that it accepts."""

    endpoint: str
    access_key: str
    secret_key: str = field(repr=False)
    region: str = REGION

    def env(self) -> dict[str, str]:
        """The variables by which boto3, pyarrow and the store find this server; merge them into a process's
        environment.
        """
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
        }

    def create_bucket(self, name: str) -> None:
        """Creates a bucket, or leaves one of this name as it is. A put into a missing bucket is an error."""
        client = self.client()
        with contextlib.suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket=name)

    def client(self) -> Any:
        """A boto3 S3 client for this server, whatever the environment says."""
        import boto3

        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
        )


@dataclass(frozen=True)
class MlflowServer:
    """A running MLflow tracking server; `uri` is what MLFLOW_TRACKING_URI takes."""

    uri: str

    def env(self) -> dict[str, str]:
        return {"MLFLOW_TRACKING_URI": self.uri}


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[S3Server]:
    """An S3 server whose buckets live under `folder`: entering again with the same folder finds them, keys included.

    Raises `StoreError` with the end of the server's log when it does not start.
    """
    folder = folder.resolve()
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    access_key, secret_key = _identity(folder / IDENTITY)
    weed = str(_binary("weed"))

    def command(ports: Sequence[int]) -> list[str]:
        names = [
            f"{part}.port{kind}" for part in ("s3", "master", "volume", "filer", "admin") for kind in ("", ".grpc")
        ]
        # Every gRPC port is given: left out, it is the HTTP port plus 10000, which nobody has checked to be free.
        listen = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
        # The defaults listen on all interfaces, report statistics to a host on the internet, and create any bucket
        # that is written to.
        switches = ["-ip=" + HOST, "-ip.bind=" + HOST, "-webdav=false", "-admin.ui=false", "-master.telemetry=false"]
        switches += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"]
        switches += ["-s3.allowDeleteBucketNotEmpty=false", f"-s3.config={folder / IDENTITY}"]
        # Many small volumes: every bucket takes several, and the default is sized by the free disk.
        switches += ["-master.volumeSizeLimitMB=128", "-volume.max=1000"]
        return [weed, f"-logdir={folder / 'logs'}", "mini", f"-dir={folder / 'data'}", *listen, *switches]

    def server(port: int) -> S3Server:
        return S3Server(f"http://{HOST}:{port}", access_key, secret_key)

    def is_ready(port: int) -> bool:
        # Asking with our own keys also proves that it is our server that answers on this port.
        return _answers(f"http://{HOST}:{port}/healthz") and _lists_buckets(server(port))

    environment = {"HOME": str(folder), "TMPDIR": str(folder)}
    with _running("SeaweedFS", command, 10, is_ready, folder / "seaweedfs.log", environment) as port:
        yield server(port)


@contextlib.contextmanager
def mlflow_server(folder: Path, *, options: Sequence[str] = ()) -> Iterator[MlflowServer]:
    """An MLflow server with runs in `folder`/mlflow.db and artifacts beside it, served by one worker.

    `options` are further ones of `mlflow server`.

    Raises `StoreError` with the end of the server's log when it does not start.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    store = f"sqlite:///{folder / 'mlflow.db'}"
    # Another MLflow server may have won the port: every answer of ours carries this mark.
    identity = secrets.token_hex(8)

    def command(ports: Sequence[int]) -> list[str]:
        stores = ["--backend-store-uri", store, "--artifacts-destination", str(folder / "artifacts")]
        network = ["--host", HOST, "--port", str(ports[0]), "--workers", "1"]
        uvicorn = ["--uvicorn-opts", f"--log-level warning --header {IDENTITY_HEADER}:{identity}"]
        return [sys.executable, "-m", "mlflow", "server", *stores, *network, *uvicorn, *options]

    environment = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        # Three more processes that only evaluation jobs of the UI need.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_TRACKING_URI": store,
    }

    def is_ready(port: int) -> bool:
        return _answers(f"http://{HOST}:{port}/health", identity)

    with _running("MLflow", command, 1, is_ready, folder / "mlflow.log", environment) as port:
        yield MlflowServer(f"http://{HOST}:{port}")


@contextlib.contextmanager
def _running(
    name: str,
    command: Callable[[Sequence[int]], list[str]],
    num_ports: int,
    is_ready: Callable[[int], bool],
    log: Path,
    environment: Mapping[str, str],
) -> Iterator[int]:
    """Starts a server on `num_ports` free ports, yields the first one when it is ready, and stops it whatever happens
    inside.
    """
    for attempt in range(1, START_ATTEMPTS + 1):
        ports = _free_ports(num_ports)
        with log.open("wb") as stream:
            # A session of its own: Ctrl-C reaches this process only, which then stops the server after whoever still
            # writes to it.
            process = subprocess.Popen(
                command(ports),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        try:
            problem = _wait(process, functools.partial(is_ready, ports[0]))
            if problem is None:
                logger.info("%s answers on port %d, log in %s", name, ports[0], log)
                yield ports[0]
                return
        finally:
            _stop(process)
        tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        if attempt == START_ATTEMPTS or not _is_port_conflict(tail):
            raise StoreError(f"{name} did not start: {problem}; the end of {log}:\n{tail}")
        logger.warning("%s lost a port to another process, starting it again (attempt %d)", name, attempt + 1)


def _wait(process: subprocess.Popen[bytes], is_ready: Callable[[], bool]) -> str | None:
    """None once the server is ready, else why it never was."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return f"it ended with exit code {process.returncode}"
        if is_ready():
            return None
        time.sleep(0.05)
    return f"no answer within {START_SECONDS:.0f} s"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and every process that it started; returns when they are gone."""
    try:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    finally:
        # A worker that outlived its parent is still in the group, and a second Ctrl-C during the wait ends up here as
        # well.
        _signal_group(process, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 2
        while _signal_group(process, 0) and time.monotonic() < deadline:
            time.sleep(0.01)


def _signal_group(process: subprocess.Popen[bytes], number: int) -> bool:
    """Signals the server's whole session, whose id is the process's; False when nobody is left in it."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now; all are held open until the last is found, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def _is_port_conflict(log: str) -> bool:
    text = log.lower()
    return any(
        sign in text for sign in ("address already in use", "port allocation failed", "is not available", "in use by")
    )


def _answers(url: str, identity: str | None = None) -> bool:
    """Whether `url` gives status 200, and `identity` in the reply's header where one is expected."""
    # Proxy variables of the surrounding shell do not apply to this machine's own servers.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=ANSWER_SECONDS) as reply:
            return reply.status == 200 and identity in (None, reply.headers[IDENTITY_HEADER])
    except OSError:
        return False


def _lists_buckets(server: S3Server) -> bool:
    from botocore.exceptions import BotoCoreError, ClientError

    client = server.client()
    try:
        client.list_buckets()
    except (BotoCoreError, ClientError):
        return False
    finally:
        client.close()
    return True


def _identity(path: Path) -> tuple[str, str]:
    """The folder's key pair, made on first use and readable by this user only."""
    if not path.exists():
        keys = {"accessKey": secrets.token_hex(10).upper(), "secretKey": secrets.token_urlsafe(30)}
        identity = {"name": "ratchet", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as stream:
            json.dump({"identities": [identity]}, stream)
    credentials = json.loads(path.read_text())["identities"][0]["credentials"][0]
    return credentials["accessKey"], credentials["secretKey"]


def _binary(name: str) -> Path:
    """A program installed beside this Python, or else the one on PATH."""
    beside = Path(sys.executable).parent / name
    if beside.is_file():
        return beside
    found = shutil.which(name)
    if found is None:
        raise StoreError(
            f"no program {name!r} in {beside.parent} or on PATH; `make setup` installs it from requirements/cpu.txt"
        )
    return Path(found)
