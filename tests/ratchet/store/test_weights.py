"""Chains of weights, on a local folder and on S3: read back exactly, or refused by name."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ratchet.errors import StoreError
from ratchet.store import ObjectNotFoundError, artifacts, layout
from ratchet.store.manifest import Artifact, Delta, FileEntry, Manifest
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.store.weights import read_weights, write_delta
from tests.ratchet.store.records import make_manifest

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


class Chain:
    """A run whose step 1 has two files of weights, and whose later steps change the second."""

    def __init__(self, root: str, folder: Path, *, steps: int) -> None:
        self.run = Run(root, "run")
        self.run.claim({})
        self.folder = folder
        self.files = {1: {FIRST: b"the first file", SECOND: np.random.default_rng(0).bytes(1001)}}
        self.manifests = {1: self.commit(1, artifacts.write_bytes(self.run.store, place(1), self.files[1]))}
        for step in range(2, steps + 1):
            self.add(step)

    def add(self, step: int, new: bytes | None = None) -> None:
        old = self.files[step - 1][SECOND]
        if new is None:
            new = old[:step] + bytes([old[step] ^ 1]) + old[step + 1 :]
        base = self.manifests[step - 1].output("policy")
        self.files[step] = {**self.files[step - 1], SECOND: new}
        artifact = write_delta(self.run.store, place(step), base, step - 1, entry_of(new), old, new)
        self.manifests[step] = self.commit(step, artifact)

    def commit(self, step: int, artifact: Artifact) -> Manifest:
        manifest = make_manifest(step=step, stage=POLICY_UPDATE, artifacts={"policy": artifact})
        content = replace(manifest.content, outputs={"policy": artifact.digest})
        return self.run.commit(replace(manifest, content=content))

    def replace(self, step: int, change: Callable[[Artifact], Artifact]) -> None:
        """Publish the step anew with a changed artifact, as no run of ours would."""
        self.run.store.delete(layout.manifest(POLICY_UPDATE, step))
        self.manifests[step] = self.commit(step, change(self.manifests[step].output("policy")))

    def read(self, step: int) -> dict[str, bytes]:
        self.run.forget()
        target = self.folder / f"read-{step}"
        read_weights(self.run, self.run.require(POLICY_UPDATE, step), "policy", target)
        return {path.name: path.read_bytes() for path in target.iterdir()}


def place(step: int) -> str:
    return f"{layout.attempt_folder(POLICY_UPDATE, step, '0001-a')}/policy"


def entry_of(data: bytes, path: str = SECOND) -> FileEntry:
    return FileEntry(path=path, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def with_delta(artifact: Artifact, delta: Delta) -> Artifact:
    return replace(artifact, delta=delta)


def test_every_step_of_a_chain_comes_back_and_only_what_changed_is_stored(root: str, tmp_path: Path) -> None:
    chain = Chain(root, tmp_path, steps=6)
    for step in (1, 6, 3):
        assert chain.read(step) == chain.files[step]
    keys = [info.key for info in chain.run.store.list_objects("") if "/policy/" in info.key]
    assert keys == [
        f"{place(1)}/{FIRST}",
        f"{place(1)}/{SECOND}",
        *(f"{place(step)}/{SECOND}.delta" for step in range(2, 7)),
    ]


def test_the_digest_is_that_of_the_files_stored_whole(root: str, tmp_path: Path) -> None:
    chain = Chain(root, tmp_path, steps=2)
    whole = artifacts.write_bytes(chain.run.store, "whole", chain.files[2])
    assert chain.manifests[2].output("policy").digest == whole.digest


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(str(tmp_path / "store"), tmp_path, steps=5)


def test_a_step_that_changed_nothing_stores_nothing(chain: Chain) -> None:
    chain.add(6, new=chain.files[5][SECOND])
    assert list(chain.run.store.list_objects(place(6))) == []
    assert chain.read(6) == chain.files[5]


def test_a_file_that_changed_back_is_the_first_one(chain: Chain) -> None:
    chain.add(6, new=chain.files[1][SECOND])
    assert chain.read(6) == chain.files[1]
    chain.add(7)
    assert chain.read(7) == chain.files[7]


def test_a_whole_copy_ends_the_chain(chain: Chain) -> None:
    files = {FIRST: b"another first file", SECOND: bytes(10)}
    chain.manifests[6] = chain.commit(6, artifacts.write_bytes(chain.run.store, place(6), files))
    chain.files[6] = files
    chain.add(7)
    for step in range(1, 6):
        artifacts.delete(chain.run.store, chain.manifests[step].output("policy"))
    assert chain.read(7) == {FIRST: b"another first file", SECOND: bytes(7) + b"\x01" + bytes(2)}


def test_a_manifest_that_is_missing_in_between_is_named(chain: Chain) -> None:
    chain.run.store.delete(layout.manifest(POLICY_UPDATE, 3))
    with pytest.raises(
        StoreError, match=r"step-000004/.* on step 3, but .*/step-000003/policy_update/manifest\.json is"
    ):
        chain.read(5)


@pytest.mark.parametrize(("step", "name"), [(1, FIRST), (1, SECOND), (3, f"{SECOND}.delta")])
def test_files_that_retention_deleted_are_named(chain: Chain, step: int, name: str) -> None:
    chain.run.store.delete(f"{place(step)}/{name}")
    with pytest.raises(ObjectNotFoundError) as caught:
        chain.read(5)
    assert f"policy of step-000005/policy_update needs that of step {step}: no object" in str(caught.value)
    assert f"{place(step)}/{name}" in str(caught.value)
    assert chain.run.uri in str(caught.value)


def test_damage_at_any_byte_of_a_delta_is_found(chain: Chain) -> None:
    key = f"{place(3)}/{SECOND}.delta"
    path = Path(chain.run.uri, key)
    delta = path.read_bytes()
    damaged = [delta[:index] + bytes([delta[index] ^ 0x10]) + delta[index + 1 :] for index in range(len(delta))]
    for data in (*damaged, delta[:-1], delta + b"\0", b""):
        path.write_bytes(data)
        with pytest.raises(StoreError, match=rf"{key} is damaged: its sha256 is"):
            chain.read(3)


def test_a_delta_that_is_stored_as_written_but_is_none_is_named(chain: Chain) -> None:
    stored = artifacts.write_bytes(chain.run.store, place(5), {f"{SECOND}.delta": b"no delta"})
    delta = chain.manifests[5].output("policy").delta
    assert delta is not None
    changed = replace(delta, files=stored.files)
    chain.replace(5, lambda artifact: with_delta(artifact, changed))
    with pytest.raises(StoreError, match=rf"{place(5)}/{SECOND}\.delta: not a delta"):
        chain.read(5)


def test_damage_to_the_whole_copy_is_found(chain: Chain) -> None:
    chain.run.store.put(f"{place(1)}/{SECOND}", bytes(1001))
    with pytest.raises(StoreError, match=rf"{place(1)}/{SECOND} is damaged"):
        chain.read(5)


def test_a_delta_from_other_bytes_than_the_base_has_is_found_when_it_is_read(chain: Chain) -> None:
    chain.files[5] = {**chain.files[5], SECOND: bytes(1001)}
    chain.add(6)
    with pytest.raises(StoreError, match=r"made of step 1 and the deltas since, is damaged: its sha256"):
        chain.read(6)


@pytest.mark.parametrize("step", [5, 6])
def test_a_chain_never_leads_in_a_circle(chain: Chain, step: int) -> None:
    delta = chain.manifests[5].output("policy").delta
    assert delta is not None
    chain.replace(5, lambda artifact: with_delta(artifact, replace(delta, step=step)))
    with pytest.raises(StoreError, match=rf"{place(5)} of step 5 builds on step {step}: expected an earlier one"):
        chain.read(5)


def test_a_base_of_another_digest_is_refused(chain: Chain) -> None:
    chain.replace(3, lambda artifact: replace(artifact, files=(entry_of(bytes(1001)), *artifact.files[1:])))
    with pytest.raises(StoreError, match=rf"{place(4)} builds on policy \w+ of step 3, but .*{place(3)} is \w+"):
        chain.read(5)


def test_files_that_the_base_lacks_are_refused(chain: Chain) -> None:
    chain.replace(5, lambda artifact: replace(artifact, files=artifact.files[1:]))
    with pytest.raises(StoreError, match=rf"{place(5)} has other files than .*{place(4)}, which it builds on"):
        chain.read(5)


@pytest.mark.parametrize(
    ("entry", "new", "message"),
    [
        (entry_of(bytes(1001), "other"), bytes(1001), f"no file of this name .* step 5 has: {FIRST}, {SECOND}"),
        (entry_of(bytes(1002)), bytes(1002), "no delta from 1001 to 1002 bytes, given 1001 and 1002"),
        (entry_of(bytes(1001)), bytes(1000), "no delta from 1001 to 1001 bytes, given 1001 and 1000"),
    ],
)
def test_what_cannot_be_a_delta_is_refused(chain: Chain, entry: FileEntry, new: bytes, message: str) -> None:
    base, old = chain.manifests[5].output("policy"), chain.files[5][SECOND]
    with pytest.raises(StoreError, match=message):
        write_delta(chain.run.store, place(6), base, 5, entry, old, new)
    assert list(chain.run.store.list_objects(place(6))) == []
