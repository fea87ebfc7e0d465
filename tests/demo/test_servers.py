import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from demo import servers
from ratchet.errors import StoreError

ROOT = Path(__file__).resolve().parents[2]


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((servers.HOST, port)) == 0


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def processes_with(text: str) -> list[int]:
    """Ids of running processes whose command line contains `text`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def test_free_ports_differ_and_can_be_bound():
    ports = servers._free_ports(10)
    assert len(set(ports)) == 10
    for port in ports:
        with socket.socket() as one:
            one.bind((servers.HOST, port))


def test_keys_are_made_once_for_a_folder_and_only_the_user_can_read_them(tmp_path):
    path = tmp_path / "identity.json"
    keys = servers._identity(path)
    assert servers._identity(path) == keys
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(keys[0]) >= 16
    assert len(keys[1]) >= 32


def test_the_secret_key_stays_out_of_the_representation():
    assert "very-secret" not in repr(servers.S3Server("http://127.0.0.1:1", "key", "very-secret"))


def test_a_missing_program_is_named():
    with pytest.raises(StoreError, match="no program 'no-such-server'"):
        servers._binary("no-such-server")


def test_a_server_that_answers_without_the_expected_mark_is_somebody_elses():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.send_header(servers.IDENTITY_HEADER, "theirs")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer((servers.HOST, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://{servers.HOST}:{server.server_port}"
        assert servers._answers(f"{url}/health", "theirs")
        assert servers._answers(f"{url}/health")
        assert not servers._answers(f"{url}/health", "ours")
        assert not servers._answers(f"{url}/missing", "theirs")
        server.shutdown()
    assert not servers._answers(f"{url}/health")


def start(tmp_path: Path, script: str, num_ports: int = 1):
    """A server made of one line of Python, which finds its port in argv[1]."""
    return servers._running(
        "test server",
        lambda ports: [sys.executable, "-c", script, str(ports[0])],
        num_ports,
        is_listening,
        tmp_path / "log",
        {},
    )


LISTEN = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(600)"


def test_a_server_that_fails_to_start_is_reported_with_its_last_words(tmp_path):
    with (
        pytest.raises(StoreError, match=r"did not start: it ended with exit code 3(?s:.*)the disk is gone"),
        start(tmp_path, "import sys; print('the disk is gone'); sys.exit(3)"),
    ):
        pass


def test_a_lost_port_is_replaced(tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind((servers.HOST, 0))
        free = servers._free_ports(1)
        offers = iter([[taken.getsockname()[1]], free])
        monkeypatch.setattr(servers, "_free_ports", lambda count: next(offers))
        with start(tmp_path, LISTEN) as port:
            assert port == free[0]


def test_a_port_that_is_lost_every_time_is_an_error(tmp_path):
    script = "raise SystemExit('address already in use')"
    with pytest.raises(StoreError, match="address already in use"), start(tmp_path, script):
        pass


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_the_server_is_stopped_whatever_leaves_the_block(tmp_path, error):
    ports = []
    with pytest.raises(error), start(tmp_path, LISTEN) as port:  # noqa: PT012 (the block is what is tested)
        ports.append(port)
        raise error
    assert not is_listening(ports[0])


@pytest.mark.slow
def test_a_server_that_ignores_sigterm_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "STOP_SECONDS", 0.5)
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {ignore + LISTEN!r}, sys.argv[1]]); "
    started = time.monotonic()
    with start(tmp_path, ignore + child + "import time; time.sleep(600)") as port:
        assert is_listening(port)
    assert not is_listening(port)
    assert time.monotonic() - started < 30


@pytest.mark.slow
def test_seaweedfs_speaks_s3_to_its_own_keys_only_and_keeps_what_it_was_given(tmp_path):
    from botocore.exceptions import ClientError

    with servers.seaweedfs(tmp_path) as server:
        server.create_bucket("runs")
        server.create_bucket("runs")
        client = server.client()
        client.put_object(Bucket="runs", Key="a/b", Body=b"first", IfNoneMatch="*")
        with pytest.raises(ClientError, match="PreconditionFailed"):
            client.put_object(Bucket="runs", Key="a/b", Body=b"second", IfNoneMatch="*")
        with pytest.raises(ClientError, match="NoSuchBucket"):
            client.put_object(Bucket="never-created", Key="a", Body=b"")
        stranger = servers.S3Server(server.endpoint, server.access_key, "another secret").client()
        with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
            stranger.list_objects_v2(Bucket="runs")
    assert not is_listening(port_of(server.endpoint))
    assert processes_with(str(tmp_path)) == []

    with servers.seaweedfs(tmp_path) as again:
        assert again.secret_key == server.secret_key
        assert again.client().get_object(Bucket="runs", Key="a/b")["Body"].read() == b"first"


@pytest.mark.slow
def test_seaweedfs_listens_on_loopback_only_and_calls_nobody(tmp_path):
    with servers.seaweedfs(tmp_path):
        (process,) = processes_with(str(tmp_path))
        inodes = {os.readlink(link)[8:-1] for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()}
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        rows += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
        mine = [(local, remote) for _, local, remote, *rest in rows if rest[6] in inodes]
    assert len(mine) >= 10
    loopback = ("0100007F", "00000000:0000", "0000000000000000FFFF00000100007F")
    assert {local.split(":")[0] for local, _ in mine} <= set(loopback)
    assert all(remote.startswith(loopback) for _, remote in mine)


@pytest.mark.slow
def test_two_s3_servers_run_side_by_side(tmp_path):
    with servers.seaweedfs(tmp_path / "one") as one, servers.seaweedfs(tmp_path / "two") as two:
        one.create_bucket("only-here")
        assert [bucket["Name"] for bucket in one.client().list_buckets()["Buckets"]] == ["only-here"]
        assert two.client().list_buckets()["Buckets"] == []
        assert one.env()["AWS_ENDPOINT_URL"] != two.env()["AWS_ENDPOINT_URL"]


@pytest.mark.slow
def test_mlflow_keeps_runs_across_a_restart(tmp_path):
    def call(server: servers.MlflowServer, path: str, body: dict[str, object]) -> dict[str, dict[str, str]]:
        request = urllib.request.Request(
            f"{server.uri}/api/2.0/mlflow/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)

    with servers.mlflow_server(tmp_path) as server:
        assert server.env() == {"MLFLOW_TRACKING_URI": server.uri}
        made = call(server, "experiments/create", {"name": "gsm8k"})
    assert not is_listening(port_of(server.uri))
    assert processes_with(str(tmp_path)) == []
    with servers.mlflow_server(tmp_path) as server:
        found = call(server, "experiments/search", {"max_results": 10})
    assert made["experiment_id"] in [experiment["experiment_id"] for experiment in found["experiments"]]


@pytest.mark.slow
def test_seaweedfs_starts_on_other_ports_when_it_loses_one_to_another_server(tmp_path, monkeypatch):
    free_ports = servers._free_ports
    with socket.create_server((servers.HOST, 0)) as other:
        attempts = []

        def first_one_taken(count: int) -> list[int]:
            ports = free_ports(count)
            if not attempts:
                ports[0] = other.getsockname()[1]
            attempts.append(ports)
            return ports

        monkeypatch.setattr(servers, "_free_ports", first_one_taken)
        monkeypatch.setattr(servers, "ANSWER_SECONDS", 0.2)
        with servers.seaweedfs(tmp_path):
            assert len(attempts) == 2


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_stops_the_server(tmp_path):
    script = (
        "import pathlib, sys, time\nfrom demo.servers import seaweedfs\n"
        "with seaweedfs(pathlib.Path(sys.argv[1])):\n    print('up', flush=True)\n    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"up\n"
        os.killpg(program.pid, signal.SIGINT)
        _, errors = program.communicate(timeout=60)
    assert b"KeyboardInterrupt" in errors
    assert processes_with(str(tmp_path)) == []
