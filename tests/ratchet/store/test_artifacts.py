"""Files of an attempt, on a local folder and on S3."""

from dataclasses import replace
from pathlib import Path

import pytest

from ratchet.errors import StoreError
from ratchet.store import ObjectNotFoundError, ObjectStore, artifacts
from ratchet.store.manifest import Delta


def test_a_folder_comes_back_with_its_digests(store: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "b.bin").write_bytes(b"bb")
    (source / "deep" / "a.bin").write_bytes(b"a")
    (source / "link.bin").symlink_to(source / "b.bin")
    artifact = artifacts.write_folder(store, "state", source)
    assert [(entry.path, entry.bytes) for entry in artifact.files] == [("b.bin", 2), ("deep/a.bin", 1), ("link.bin", 2)]
    artifacts.read_folder(store, artifact, tmp_path / "target")
    assert (tmp_path / "target" / "deep" / "a.bin").read_bytes() == b"a"
    assert artifacts.read_bytes(store, artifact) == [b"bb", b"a", b"bb"]
    assert artifacts.is_present(store, artifact)
    artifacts.delete(store, artifact)
    assert not artifacts.is_present(store, artifact)
    with pytest.raises(ObjectNotFoundError, match=r"state/b\.bin"):
        artifacts.read_bytes(store, artifact)


def test_bytes_and_a_folder_of_equal_files_have_equal_digests(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "x").write_bytes(b"1")
    written = artifacts.write_bytes(store, "a", {"x": b"1"}, rows=4)
    assert written.digest == artifacts.write_folder(store, "b", tmp_path / "source").digest
    assert written.rows == 4


def test_an_empty_folder_is_no_artifact(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(StoreError, match="holds no file"):
        artifacts.write_folder(store, "a", tmp_path / "source")


def test_a_damaged_part_is_found_and_named(store: ObjectStore, tmp_path: Path) -> None:
    artifact = artifacts.write_bytes(store, "a", {"part-00000": b"one", "part-00001": b"two"})
    store.put("a/part-00001", b"twO")
    with pytest.raises(StoreError, match=r"a/part-00001 is damaged: its sha256 is .*, its manifest says"):
        artifacts.read_bytes(store, artifact)
    with pytest.raises(StoreError, match=r"a/part-00001 is damaged"):
        artifacts.read_folder(store, artifact, tmp_path / "target")
    assert artifacts.is_present(store, artifact)
    store.put("a/part-00001", b"longer")
    assert not artifacts.is_present(store, artifact)


def test_of_a_delta_only_what_is_stored_counts_and_it_is_not_read_as_a_whole(
    store: ObjectStore, tmp_path: Path
) -> None:
    base = artifacts.write_bytes(store, "step-1", {"x": b"1", "y": b"2"})
    stored = artifacts.write_bytes(store, "step-2", {"x.delta": b"what changed"})
    later = replace(base, folder="step-2", delta=Delta(base=base.digest, step=1, folder="step-2", files=stored.files))
    assert artifacts.is_present(store, later)
    with pytest.raises(StoreError, match="step-2 holds only what changed since step 1: expected an artifact"):
        artifacts.read_folder(store, later, tmp_path)
    with pytest.raises(StoreError, match="step-2 holds only what changed"):
        artifacts.read_bytes(store, later)
    artifacts.delete(store, later)
    assert not artifacts.is_present(store, later)
    assert artifacts.is_present(store, base)


def test_a_file_entry_cannot_lead_out_of_the_target(store: ObjectStore, tmp_path: Path) -> None:
    artifact = artifacts.write_bytes(store, "a", {"x": b"1"})
    for path in ("../escaped", "/tmp/escaped"):
        outside = replace(artifact, files=(replace(artifact.files[0], path=path),))
        with pytest.raises(StoreError, match="not a key"):
            artifacts.read_folder(store, outside, tmp_path / "target")
    assert not (tmp_path / "escaped").exists()


def test_scratch_is_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_SCRATCH", str(tmp_path))
    with artifacts.scratch() as folder:
        (folder / "x").write_bytes(b"1")
        assert folder.parent == tmp_path
    assert list(tmp_path.iterdir()) == []
