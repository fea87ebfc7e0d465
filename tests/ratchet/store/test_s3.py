"""What only S3 can do wrong: credentials, buckets, connections, and the mapping of its errors."""

import contextlib
import hashlib
import http.server
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from boto3.s3.transfer import TransferConfig

from ratchet.errors import StoreError, StoreUnavailableError
from ratchet.store import ObjectNotFoundError, open_store
from ratchet.store import s3 as s3_module
from ratchet.store.s3 import S3Store
from tests.ratchet.store.tcp import wire_to

MEGABYTE = 1024 * 1024


def every_call(store: S3Store, tmp_path: Path) -> list[tuple[str, Any]]:
    source = tmp_path / "source"
    source.write_bytes(b"1")
    large = tmp_path / "large"
    large.write_bytes(bytes(17 * MEGABYTE))
    return [
        ("put", lambda: store.put("x", b"1")),
        ("put_create", lambda: store.put_create("x", b"1")),
        ("get", lambda: store.get("x")),
        ("get_range", lambda: store.get_range("x", 0, 1)),
        ("size", lambda: store.size("x")),
        ("list_objects", lambda: list(store.list_objects(""))),
        ("list_folders", lambda: store.list_folders("")),
        ("delete", lambda: store.delete("x")),
        ("upload_file", lambda: store.upload_file(source, "x")),
        ("upload_file in parts", lambda: store.upload_file(large, "x")),
        ("download_file", lambda: store.download_file("x", tmp_path / "target")),
    ]


def assert_every_call_says(store: S3Store, tmp_path: Path, text: str) -> None:
    for name, call in every_call(store, tmp_path):
        with pytest.raises(StoreError) as caught:
            call()
        assert text in str(caught.value), name
        assert store.uri in str(caught.value), name
        assert not isinstance(caught.value, ObjectNotFoundError), name


def test_a_bucket_that_does_not_exist_is_named_by_every_call(s3_root: str, tmp_path: Path) -> None:
    store = S3Store("s3://no-such-bucket/prefix")
    assert_every_call_says(store, tmp_path, "NoSuchBucket: the bucket does not exist; create it")


def test_a_wrong_secret_is_named_by_every_call(s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert_every_call_says(S3Store(s3_root), tmp_path, "check AWS_SECRET_ACCESS_KEY")


def test_an_unknown_key_is_named_by_every_call(s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "NOBODY")
    assert_every_call_says(S3Store(s3_root), tmp_path, "check AWS_ACCESS_KEY_ID")


def test_missing_credentials_are_named_by_every_call(
    s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert_every_call_says(S3Store(s3_root), tmp_path, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")


def test_a_reader_may_read_and_is_told_that_it_may_not_write(
    s3_root: str, s3_reader_environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(s3_root).put("x", b"1")
    for name, value in s3_reader_environment.items():
        monkeypatch.setenv(name, value)
    reader = S3Store(s3_root)
    assert reader.get("x") == b"1"
    assert reader.size("y") is None
    assert [info.key for info in reader.list_objects("")] == ["x"]
    for name, call in every_call(reader, tmp_path):
        if name.startswith(("put", "upload", "delete")):
            with pytest.raises(StoreError, match=r"AccessDenied: these credentials may not do this here"):
                call()
    assert_every_call_says(S3Store("s3://another-bucket/x"), tmp_path, "AccessDenied")
    assert reader.get("x") == b"1"


def test_half_a_configuration_is_named_before_the_first_call(s3_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(StoreError, match=r"cannot open s3://bucket/x: .*localhost:9000"):
        open_store("s3://bucket/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:9000")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match=r"cannot open s3://bucket/x: .*credentials"):
        open_store("s3://bucket/x")


def test_nobody_listening_is_an_error_in_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    store = S3Store("s3://bucket/x")
    started = time.monotonic()
    assert_every_call_says(store, tmp_path, "check AWS_ENDPOINT_URL, and that the server runs")
    assert time.monotonic() - started < 10


def test_the_client_waits_less_than_ninety_seconds_for_a_server(s3_root: str) -> None:
    config = S3Store(s3_root)._client.meta.config
    attempts = config.retries["total_max_attempts"]
    pauses = sum(min(0.05 * 2**retry, 20) for retry in range(attempts - 1))
    assert config.retries["mode"] == "adaptive"
    assert attempts * config.connect_timeout + pauses < 90


@contextlib.contextmanager
def web_server(status: int, body: bytes) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_web_server_is_not_taken_for_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    for status, body in (
        (200, b"<html><br><p>Welcome</html>"),
        (404, b"<html>Nothing</html>"),
        (403, b"No."),
        (500, b""),
    ):
        with web_server(status, body) as endpoint:
            monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
            store = open_store("s3://bucket/x")
            calls = [lambda store=store: list(store.list_objects(""))]
            if status != 200:
                calls += [lambda store=store: store.get("x"), lambda store=store: store.size("x")]
            for call in calls:
                with pytest.raises(StoreError, match=r"is AWS_ENDPOINT_URL an S3 server\?") as caught:
                    call()
                assert not isinstance(caught.value, ObjectNotFoundError)


def test_bytes_are_the_same_however_the_upload_was_cut(
    s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = S3Store(s3_root)
    source = tmp_path / "source"
    source.write_bytes(os.urandom(18 * MEGABYTE + 1))
    digests, etags = set(), set()
    for part_bytes in (5 * MEGABYTE, 16 * MEGABYTE, 64 * MEGABYTE):
        config = TransferConfig(multipart_threshold=part_bytes, multipart_chunksize=part_bytes)
        monkeypatch.setattr(s3_module, "TRANSFER", config)
        store.upload_file(source, "x")
        store.download_file("x", tmp_path / "target")
        digests.add(hashlib.sha256((tmp_path / "target").read_bytes()).hexdigest())
        etags.add(store._client.head_object(Bucket=store.bucket, Key=store.prefix + "x")["ETag"])
    assert digests == {hashlib.sha256(source.read_bytes()).hexdigest()}
    assert len(etags) == 3


def test_a_listing_goes_on_over_pages_and_leaves_out_folder_marks(s3_root: str) -> None:
    store = S3Store(s3_root)
    client = store._client
    client.put_object(Bucket=store.bucket, Key=f"{store.prefix}many/", Body=b"")
    for number in range(25):
        store.put(f"many/step-{number // 5:06d}/{number:02d}", b"1")
    found = [info.key for info in store.list_objects("many")]
    paged = client.get_paginator("list_objects_v2").paginate(
        Bucket=store.bucket, Prefix=f"{store.prefix}many/", PaginationConfig={"PageSize": 3}
    )
    assert found == [f"many/step-{number // 5:06d}/{number:02d}" for number in range(25)]
    assert {store.prefix + key for key in found} <= {item["Key"] for page in paged for item in page["Contents"]}
    assert store.list_folders("many") == [f"step-{number:06d}" for number in range(5)]


def test_a_child_keeps_the_credentials_of_its_parent(s3_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = S3Store(s3_root)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "changed")
    child = store.child("run")
    child.put("x", b"1")
    assert store.get("run/x") == b"1"


def test_a_put_whose_answer_is_lost_is_repeated(s3_server: Any, s3_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with wire_to(s3_server.endpoint) as wire:
        monkeypatch.setenv("AWS_ENDPOINT_URL", wire.endpoint)
        store = S3Store(s3_root)
        wire.cut = "answer lost"
        store.put("x", b"1")
        assert wire.cuts == 1
        assert store.get("x") == b"1"


def test_a_create_only_put_whose_answer_is_lost_says_that_the_object_is_there(
    s3_server: Any, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with wire_to(s3_server.endpoint) as wire:
        monkeypatch.setenv("AWS_ENDPOINT_URL", wire.endpoint)
        store = S3Store(s3_root)
        wire.cut = "answer lost"
        assert store.put_create("x", b"mine") is False
        assert wire.cuts == 1
        assert store.get("x") == b"mine"


def test_an_answer_that_breaks_off_is_read_again(s3_server: Any, s3_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(200_000)
    S3Store(s3_root).put("x", data)
    with wire_to(s3_server.endpoint) as wire:
        monkeypatch.setenv("AWS_ENDPOINT_URL", wire.endpoint)
        store = S3Store(s3_root)
        wire.method, wire.cut = "GET", "answer halved"
        assert store.get("x") == data
        wire.cut = "answer halved"
        assert store.get_range("x", 1000, 100_000) == data[1000:101_000]
        assert wire.cuts == 2


class Refusing:
    """An S3 client whose create-only puts are refused `times` times although nothing is there."""

    def __init__(self, client: Any, times: int) -> None:
        self.client, self.times = client, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def put_object(self, **options: Any) -> Any:
        if self.times:
            self.times -= 1
            answer: Any = {"Error": {"Code": "ConditionalRequestConflict", "Message": "a conflicting operation"}}
            raise self.client.exceptions.ClientError(answer, "PutObject")
        return self.client.put_object(**options)


def test_a_conflict_without_an_object_is_no_lost_race(s3_root: str) -> None:
    store = S3Store(s3_root)
    store._client = Refusing(store._client, times=2)
    assert store.put_create("x", b"1") is True
    assert store.get("x") == b"1"
    store._client.times = 1
    assert store.put_create("x", b"2") is False
    store._client.times = 100
    with pytest.raises(StoreError, match="shows no object there"):
        store.put_create("y", b"1")


def test_only_a_server_that_does_not_answer_is_worth_asking_again(
    s3_server: Any, s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    store = open_store(s3_root)
    with pytest.raises(ObjectNotFoundError) as missing:
        store.get("nothing")
    assert not isinstance(missing.value, StoreUnavailableError)

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
    (tmp_path / "file").write_bytes(b"x")
    down = open_store(s3_root)
    calls = [
        lambda: down.get("a"),
        lambda: down.put("a", b""),
        lambda: down.put_create("a", b""),
        lambda: down.size("a"),
        lambda: list(down.list_objects("")),
        lambda: down.upload_file(tmp_path / "file", "a"),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailableError):
            call()

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://no-such-host.invalid:1")
    with pytest.raises(StoreUnavailableError):
        open_store(s3_root).get("a")
    for status, kind in ((503, StoreUnavailableError), (403, StoreError)):
        with web_server(status, b"") as address:
            monkeypatch.setenv("AWS_ENDPOINT_URL", address)
            with pytest.raises(StoreError) as refused:
                open_store(s3_root).get("a")
            assert type(refused.value) is kind
