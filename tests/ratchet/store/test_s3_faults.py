"""What the store does about a server in trouble: what passes is asked for again, what does not is named."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from boto3.s3.transfer import TransferConfig

from ratchet.errors import StoreError, StoreUnavailableError
from ratchet.store import ObjectNotFoundError, artifacts, layout, s3_client
from ratchet.store import s3 as s3_module
from ratchet.store.run import Run
from ratchet.store.s3 import S3Store
from tests.chaos.s3_proxy import Proxy, proxy_to
from tests.chaos.s3_requests import FOREVER, Fault, Rule

MEGABYTE = 1024 * 1024
DATA = bytes(range(256)) * 20


@pytest.fixture
def proxy(s3_server: Any, s3_root: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with proxy_to(s3_server) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
        # Adaptive, boto3 would slow down for seconds after a 503.
        monkeypatch.setenv("AWS_RETRY_MODE", "standard")
        monkeypatch.setattr(s3_client, "READ_SECONDS", 0.5)
        yield running


@pytest.fixture
def store(proxy: Proxy, s3_root: str) -> S3Store:
    return S3Store(s3_root)


def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest parts that servers take."""
    monkeypatch.setattr(
        s3_module, "TRANSFER", TransferConfig(multipart_threshold=5 * MEGABYTE, multipart_chunksize=5 * MEGABYTE)
    )


def test_any_number_of_passing_faults_costs_no_request(proxy: Proxy, store: S3Store) -> None:
    """boto3 alone gives up after 500 tokens: a repeated request takes 5 or more, and not all come back."""
    store.put("x", DATA)
    for _ in range(55):
        proxy.rules = [Rule(fault="reset", times=2)]
        assert store.get("x") == DATA
    assert sum(rule.done for rule in proxy.rules) == 2


def test_a_listing_whose_head_broke_off_is_not_an_empty_one(proxy: Proxy, store: S3Store, tmp_path: Path) -> None:
    store.put("a/x", DATA)
    reads: list[tuple[str, Any, Any]] = [
        ("GET", lambda: [info.key for info in store.list_objects("")], ["a/x"]),
        ("GET", lambda: store.list_folders(""), ["a"]),
        ("GET", lambda: store.get("a/x"), DATA),
        ("GET", lambda: store.get_range("a/x", 3, 5), DATA[3:8]),
        ("HEAD", lambda: store.size("a/x"), len(DATA)),
        ("GET", lambda: store.download_file("a/x", tmp_path / "x"), None),
    ]
    for method, read, expected in reads:
        proxy.rules = [Rule(fault="answer headless", method=method)]
        assert read() == expected
        assert proxy.rules[0].done == 1
        proxy.rules = [Rule(fault="answer headless", method=method, times=FOREVER)]
        with pytest.raises(StoreUnavailableError, match="broke off"):
            read()
    assert (tmp_path / "x").read_bytes() == DATA


def test_an_error_whose_name_broke_off_is_asked_for_again(proxy: Proxy, store: S3Store) -> None:
    """Of "NoSuchKey", half an answer leaves a bare 404, which any web server may say."""
    reads: list[tuple[str, Any]] = [("GET", lambda: store.get("x")), ("GET", lambda: store.get_range("x", 1, 2))]
    for method, read in reads:
        proxy.rules = [Rule(fault="answer truncated", method=method)]
        with pytest.raises(ObjectNotFoundError):
            read()
        assert proxy.rules[0].done == 1
        proxy.rules = [Rule(fault="answer truncated", method=method, times=FOREVER)]
        with pytest.raises(StoreUnavailableError, match="broke off"):
            read()
    # HEAD says no names, so that of a missing object one asks by GET.
    proxy.rules = [Rule(fault="answer headless", method="GET")]
    assert store.size("x") is None
    assert proxy.rules[0].done == 1
    store.put("there", DATA)
    proxy.rules = [Rule(fault="answer truncated", method="PUT")]
    assert store.put_create("there", b"other") is False
    assert proxy.rules[0].done == 1


@pytest.mark.parametrize("fault", ["request flipped", "request truncated", "reset mid-request", "timeout"])
def test_what_did_not_arrive_whole_is_sent_again(proxy: Proxy, store: S3Store, fault: Fault) -> None:
    proxy.rules = [Rule(fault=fault, method="PUT")]
    store.put("x", DATA)
    assert store.get("x") == DATA
    proxy.rules = [Rule(fault=fault, method="PUT")]
    assert store.put_create("y", DATA) is True
    assert store.get("y") == DATA
    proxy.rules = [Rule(fault=fault, method="PUT", times=FOREVER)]
    with pytest.raises(StoreUnavailableError, match="'z'"):
        store.put("z", DATA)
    proxy.rules = []
    assert store.size("z") is None


def test_bytes_that_were_damaged_on_the_way_are_read_again(proxy: Proxy, store: S3Store, tmp_path: Path) -> None:
    store.put("x", DATA)
    proxy.rules = [Rule(fault="answer flipped", method="GET")]
    assert store.get("x") == DATA
    proxy.rules = [Rule(fault="answer flipped", method="GET")]
    store.download_file("x", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == DATA
    proxy.rules = [Rule(fault="answer flipped", method="GET", times=FOREVER)]
    for read in (lambda: store.get("x"), lambda: store.download_file("x", tmp_path / "y")):
        with pytest.raises(StoreError, match=r"cannot read 'x' in s3://.*checksum") as caught:
            read()
        # Asking for hours would not help.
        assert not isinstance(caught.value, StoreUnavailableError)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_parts_without_a_checksum_are_read_again_where_their_sha256_is_another(
    proxy: Proxy, store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _small_parts(monkeypatch)
    (tmp_path / "model").write_bytes(DATA * 1200)
    (tmp_path / "source").mkdir()
    (tmp_path / "model").rename(tmp_path / "source" / "model")
    artifact = artifacts.write_folder(store, "folder", tmp_path / "source")
    assert artifact.files[0].bytes > 5 * MEGABYTE
    flips = Rule(fault="answer flipped", method="GET", target="folder/model")
    proxy.rules = [flips]
    artifacts.read_folder(store, artifact, tmp_path / "target")
    assert (tmp_path / "target" / "model").read_bytes() == DATA * 1200
    assert flips.done == 1
    proxy.rules = [Rule(fault="answer flipped", method="GET", target="folder/model", times=FOREVER)]
    with pytest.raises(StoreError, match=r"folder/model"):
        artifacts.read_folder(store, artifact, tmp_path / "target")


def test_a_download_that_never_ends_is_a_server_that_does_not_answer(
    proxy: Proxy, store: S3Store, tmp_path: Path
) -> None:
    store.put("x", DATA)
    proxy.rules = [Rule(fault="answer truncated", method="GET", times=FOREVER)]
    with pytest.raises(StoreUnavailableError, match=r"cannot read 'x' in s3://.*2560 read, .*5120"):
        store.download_file("x", tmp_path / "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["500", "reset", "timeout", "request flipped"])
def test_an_upload_in_parts_whose_last_answer_is_lost_is_whole(
    proxy: Proxy, store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """The server has ended the upload, and says of a second request to end it that it knows of none."""
    _small_parts(monkeypatch)
    monkeypatch.setattr(s3_client, "READ_SECONDS", 3.0)
    data = DATA * 1200
    (tmp_path / "source").write_bytes(data)
    is_after = fault != "request flipped"
    proxy.rules = [Rule(fault=fault, method="POST", target=r"\?uploadId=", is_after=is_after)]
    store.upload_file(tmp_path / "source", "x")
    assert proxy.rules[0].done == 1
    assert store.get("x") == data


def test_a_create_only_put_whose_answer_is_lost_is_refused_and_there(proxy: Proxy, store: S3Store) -> None:
    faults: list[Fault] = ["500", "reset", "timeout"]
    for fault in faults:
        proxy.rules = [Rule(fault=fault, method="PUT", is_after=True)]
        assert store.put_create(fault, b"mine") is False
        assert store.get(fault) == b"mine"
        # The client gave up before the answer came: whoever commits asks again.
        proxy.rules = [Rule(fault=fault, method="PUT", is_after=True, times=FOREVER)]
        with pytest.raises(StoreUnavailableError):
            store.put_create(f"{fault} again", b"mine")
        proxy.rules = []
        assert store.put_create(f"{fault} again", b"mine") is False
        assert store.get(f"{fault} again") == b"mine"


def test_storage_without_create_only_puts_is_refused_and_no_run_is_changed(proxy: Proxy, s3_root: str) -> None:
    ignored = [Rule(fault="create-only ignored", times=FOREVER)]
    proxy.rules = ignored
    with pytest.raises(StoreError, match=r"new: this storage ignores create-only puts"):
        Run(s3_root, "new").create_or_check({"seed": 1})

    proxy.rules = []
    run = Run(s3_root, "old")
    run.create_or_check({"seed": 1})
    before = run.store.get(layout.RUN)
    proxy.rules = ignored
    for seed in (1, 2):
        with pytest.raises(StoreError, match=r"old: this storage ignores create-only puts"):
            Run(s3_root, "old").create_or_check({"seed": seed})
        assert run.store.get(layout.RUN) == before
