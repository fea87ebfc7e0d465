"""The promises of the interface, each on a local folder and on a real S3 server."""

import hashlib
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratchet.errors import ConfigError, StoreError
from ratchet.store import ObjectNotFoundError, ObjectStore, open_store
from ratchet.store.objects import check_key

MEGABYTE = 1024 * 1024
ODD_KEY = "a folder & more/na\u00efve \u00fc+%20?#='\"/part (1).bin"


def keys(store: ObjectStore, folder: str) -> list[str]:
    return [info.key for info in store.list_objects(folder)]


def test_what_was_put_is_what_one_gets(store: ObjectStore) -> None:
    store.put("a/b.bin", b"\x00\xff" * 100)
    store.put("a/empty", b"")
    assert store.get("a/b.bin") == b"\x00\xff" * 100
    assert store.get("a/empty") == b""
    store.put("a/b.bin", b"newer")
    assert store.get("a/b.bin") == b"newer"


def test_a_missing_object_is_named(store: ObjectStore, tmp_path: Path) -> None:
    store.put("folder/x", b"1")
    for key in ("nothing/here", "folder", "folder/x/below"):
        with pytest.raises(ObjectNotFoundError, match=key) as caught:
            store.get(key)
        assert store.uri in str(caught.value)
        assert isinstance(caught.value, FileNotFoundError)
        assert store.size(key) is None
        with pytest.raises(ObjectNotFoundError, match=key):
            store.get_range(key, 0, 1)
        with pytest.raises(ObjectNotFoundError, match=key):
            store.download_file(key, tmp_path / "target")
    assert not any(path.name.startswith((".tmp", "target")) for path in tmp_path.iterdir())


def test_a_missing_object_is_still_named_on_the_other_side_of_a_process_pool(store: ObjectStore) -> None:
    with pytest.raises(ObjectNotFoundError) as caught:
        store.get("nothing")
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), str(copied)) == (ObjectNotFoundError, str(caught.value))


def test_a_range_ends_where_the_object_ends(store: ObjectStore) -> None:
    store.put("x", b"0123456789")
    store.put("empty", b"")
    assert store.get_range("x", 0, 4) == b"0123"
    assert store.get_range("x", 7, 2) == b"78"
    assert store.get_range("x", 7, 100) == b"789"
    assert store.get_range("x", 3, 0) == b""
    assert store.get_range("x", 10, 5) == b""
    assert store.get_range("x", 1000, 5) == b""
    assert store.get_range("empty", 0, 5) == b""
    for start, length in ((-1, 3), (0, -1)):
        with pytest.raises(StoreError, match="neither may be negative"):
            store.get_range("x", start, length)


def test_create_only_puts_keep_the_first(store: ObjectStore) -> None:
    assert store.put_create("a/manifest.json", b"first") is True
    assert store.put_create("a/manifest.json", b"second") is False
    assert store.put_create("a/manifest.json", b"first") is False
    assert store.get("a/manifest.json") == b"first"
    store.delete("a/manifest.json")
    assert store.put_create("a/manifest.json", b"third") is True


def test_one_of_eight_racers_creates_an_object(store: ObjectStore) -> None:
    for race in range(2):
        barrier = threading.Barrier(8)

        def create(racer: int, race: int = race, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            return store.put_create(f"race/{race}", b"%d" % racer * 1000)

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(create, range(8)))
        assert won.count(True) == 1
        assert store.get(f"race/{race}") == b"%d" % won.index(True) * 1000


def test_a_folder_is_no_object_that_could_win_a_create_only_put(store: ObjectStore) -> None:
    store.put("step/rollout/part", b"1")
    with pytest.raises(StoreError, match="step/rollout"):
        store.put_create("step/rollout", b"2")


def test_readers_see_whole_objects_while_one_is_replaced(store: ObjectStore) -> None:
    bodies = {bytes([value]) * 50_000 for value in range(4)}
    store.put("x", bytes([0]) * 50_000)
    done = threading.Event()

    def replace() -> None:
        for _ in range(5):
            for body in bodies:
                store.put("x", body)
        done.set()

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(replace)
        while not done.is_set() and not writer.done():
            assert store.get("x") in bodies
        writer.result()


def test_a_listing_keeps_to_its_folder_and_is_sorted(store: ObjectStore) -> None:
    names = ["step-1/a", "step-1/b/c", "step-1/b-c", "step-1/b c", "step-10/a", "step-1.json", "other/step-1/x"]
    for size, name in enumerate(names):
        store.put(name, b"x" * size)
    assert keys(store, "step-1") == ["step-1/a", "step-1/b c", "step-1/b-c", "step-1/b/c"]
    assert keys(store, "step-1/") == keys(store, "step-1")
    assert keys(store, "") == sorted(names)
    assert {info.key: info.size for info in store.list_objects("")} == {name: size for size, name in enumerate(names)}
    assert keys(store, "step") == keys(store, "nothing") == []
    assert store.list_folders("") == ["other", "step-1", "step-10"]
    assert store.list_folders("step-1") == ["b"]
    assert store.list_folders("step-1/b") == store.list_folders("nothing") == []


def test_a_child_sees_its_own_folder_only(store: ObjectStore) -> None:
    child = store.child("run-1")
    assert child.uri == f"{store.uri}/run-1"
    child.put("a/b", b"1")
    store.put("run-10/a", b"2")
    assert keys(child, "") == ["a/b"]
    assert store.get("run-1/a/b") == b"1"
    assert child.child("a").get("b") == b"1"
    assert keys(open_store(child.uri), "") == ["a/b"]


def test_keys_may_hold_spaces_signs_and_umlauts(store: ObjectStore, tmp_path: Path) -> None:
    store.put(ODD_KEY, b"1")
    assert store.get(ODD_KEY) == b"1"
    assert store.get_range(ODD_KEY, 0, 1) == b"1"
    assert keys(store, "") == keys(store, "a folder & more") == [ODD_KEY]
    assert store.list_folders("a folder & more") == [ODD_KEY.split("/")[1]]
    assert store.put_create(ODD_KEY, b"2") is False
    store.download_file(ODD_KEY, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"1"
    store.delete(ODD_KEY)
    assert store.size(ODD_KEY) is None


@pytest.mark.parametrize(
    "key", ["", "/", "/etc/passwd", "a//b", "a/", "../x", "a/../b", "a/./b", ".", "a\\b", "a\nb", "a/.tmp-1", "\ud800"]
)
def test_what_is_no_key_is_refused_before_anything_happens(store: ObjectStore, key: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"1")
    calls = (
        lambda: store.put(key, b""),
        lambda: store.put_create(key, b""),
        lambda: store.get(key),
        lambda: store.get_range(key, 0, 1),
        lambda: store.size(key),
        lambda: store.delete(key),
        lambda: store.upload_file(source, key),
        lambda: store.download_file(key, tmp_path / "target"),
        lambda: store.child(key),
    )
    for call in calls:
        with pytest.raises(StoreError, match="not a key of object storage"):
            call()
    assert keys(store, "") == []


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_a_key_that_is_accepted_stays_below_its_root(segments: list[str]) -> None:
    key = "/".join(segments)
    try:
        assert check_key(key) == key
    except StoreError:
        return
    path = os.path.normpath(f"/root/{key}")
    assert path == f"/root/{key}"
    assert path.encode().startswith(b"/root/")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=2000), st.integers(0, 2500), st.integers(0, 2500))
def test_a_range_is_a_slice(store: ObjectStore, data: bytes, start: int, length: int) -> None:
    store.put("x", data)
    assert store.size("x") == len(data)
    assert store.get_range("x", start, length) == data[start : start + length]


def test_deleting_twice_is_no_error(store: ObjectStore) -> None:
    store.put("a/b", b"1")
    store.delete("a/b")
    store.delete("a/b")
    store.delete("never/was")
    assert store.size("a/b") is None


@pytest.mark.parametrize("size", [0, 5, 40 * MEGABYTE + 3])
def test_a_file_comes_back_byte_for_byte(store: ObjectStore, tmp_path: Path, size: int) -> None:
    source, target = tmp_path / "source", tmp_path / "new folder" / "target"
    source.write_bytes(os.urandom(size))
    store.upload_file(source, "state/model 0.bin")
    assert store.size("state/model 0.bin") == size
    store.download_file("state/model 0.bin", target)
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (source, target)]
    assert digests[0] == digests[1] == hashlib.sha256(store.get("state/model 0.bin")).hexdigest()
    assert store.get_range("state/model 0.bin", 16 * MEGABYTE - 2, 4) == source.read_bytes()[16 * MEGABYTE - 2 :][:4]


def test_a_download_replaces_a_whole_file_or_leaves_it(store: ObjectStore, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old")
    with pytest.raises(ObjectNotFoundError):
        store.download_file("nothing", target)
    assert target.read_bytes() == b"old"
    store.put("x", b"new")
    store.download_file("x", target)
    assert target.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["target"]


def test_a_local_file_that_is_missing_or_cannot_be_written_is_named(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no-such-file") as caught:
        store.upload_file(tmp_path / "no-such-file", "x")
    assert not isinstance(caught.value, ObjectNotFoundError)
    assert store.size("x") is None
    store.put("x", b"1")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="below") as caught:
        store.download_file("x", tmp_path / "file" / "below" / "target")
    assert not isinstance(caught.value, ObjectNotFoundError)


def test_threads_share_a_store(store: ObjectStore) -> None:
    def work(number: int) -> bytes:
        store.put(f"thread/{number}", b"%d" % number)
        return store.get(f"thread/{number}")

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(48))) == [b"%d" % number for number in range(48)]
    assert len(keys(store, "thread")) == 48


@pytest.mark.parametrize("uri", ["", "gs://bucket/x", "file://host/x", "file://", "s3://", "s3:///x", "http://host/x"])
def test_a_place_that_cannot_be_used_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"expected (a local folder or )?s3://bucket/prefix"):
        open_store(uri)


def test_a_file_uri_is_the_folder_that_it_names(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    assert open_store(folder.as_uri()).uri == str(folder)
    assert open_store(f"file://localhost{tmp_path}").uri == str(tmp_path)
