"""What only a local folder can do wrong."""

import os
import threading
from pathlib import Path

import pytest

from ratchet.errors import StoreError
from ratchet.store.local import LocalStore


def test_unfinished_files_are_never_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("step-1/x", b"1")
    (tmp_path / "step-1" / ".tmp-killed").write_bytes(b"half")
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / ".tmp-killed").write_bytes(b"half")
    assert [info.key for info in store.list_objects("")] == ["step-1/x"]
    assert store.list_folders("") == ["step-1"]


def test_a_folder_is_gone_with_its_last_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b/x", b"1")
    store.delete("a/b/x")
    assert store.list_folders("") == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = LocalStore(tmp_path / "file" / "below")
    source = tmp_path / "source"
    source.write_bytes(b"1")
    for call in (
        lambda: store.put("x", b""),
        lambda: store.put_create("x", b""),
        lambda: store.upload_file(source, "x"),
    ):
        with pytest.raises(StoreError, match=r"cannot write 'x' in .*file/below.*Not a directory|File exists"):
            call()
    assert list(store.list_objects("")) == []


def test_a_disk_without_hard_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError, match="hard links"):
        LocalStore(tmp_path).put_create("x", b"")
    assert list(tmp_path.iterdir()) == []


def test_what_was_created_is_synced_with_every_new_folder_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    for write in (LocalStore(tmp_path / "a").put_create, LocalStore(tmp_path / "b").put):
        synced.clear()
        write("step/stage/manifest.json", b"1")
        root = tmp_path / ("a" if write.__name__ == "put_create" else "b")
        folders = [str(path) for path in (tmp_path, root, root / "step", root / "step" / "stage")]
        assert [path for path in synced if ".tmp-" not in path] == folders
        assert ".tmp-" in synced[3]


def test_a_listing_survives_deletions_that_go_on_meanwhile(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for number in range(20):
                (tmp_path / "churn" / str(number)).mkdir(parents=True, exist_ok=True)
                (tmp_path / "churn" / str(number) / "x").write_bytes(b"1")
            for number in range(20):
                (tmp_path / "churn" / str(number) / "x").unlink()
                (tmp_path / "churn" / str(number)).rmdir()

    store.put("kept/x", b"1")
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(100):
            assert "kept/x" in [info.key for info in store.list_objects("")]
            assert "kept" in store.list_folders("")
    finally:
        stop.set()
        thread.join()


def test_a_given_file_is_not_copied_and_survives_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, store = tmp_path / "scratch" / "state", LocalStore(tmp_path / "store")
    source.parent.mkdir()
    source.write_bytes(b"state")
    store.upload_file(source, "copied")
    store.upload_file(source, "given", is_given=True)
    inodes = [store.path(key).stat().st_ino for key in ("copied", "given")]
    assert source.stat().st_ino not in inodes[:1]
    assert inodes[1] == source.stat().st_ino
    source.unlink()
    assert store.get("given") == store.get("copied") == b"state"

    def refuse(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    source.write_bytes(b"other")
    store.upload_file(source, "given", is_given=True)
    assert store.get("given") == b"other"
    assert not list(store.unfinished(""))
