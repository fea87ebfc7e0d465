"""Records of prepared prompts, on a local folder and on a real S3 server."""

import hashlib
from dataclasses import replace

import pytest

from ratchet.errors import ConfigError, StoreError
from ratchet.store import ObjectNotFoundError, ObjectStore, layout, prepared
from ratchet.store.artifacts import write_bytes
from ratchet.store.prepared import PreparedPrompts

KEY = hashlib.sha256(b"the prompts").hexdigest()
FILES = {"part-00000.parquet": b"first", "part-00001.parquet": b"second"}


@pytest.fixture
def entry(store: ObjectStore) -> PreparedPrompts:
    artifact = write_bytes(store.child("night-1"), "data/train/0001-a/prompts", FILES, rows=7)
    return PreparedPrompts(run_id="night-1", artifact=artifact, source="s3://bucket/gsm8k")


def test_a_record_is_found_by_its_key_and_leads_to_the_bytes(
    root: str, store: ObjectStore, entry: PreparedPrompts
) -> None:
    assert prepared.find(root, KEY) is None
    assert prepared.record(root, KEY, entry)
    assert prepared.find(f"{root}/", KEY) == entry
    assert prepared.read(root, entry) == FILES
    assert [info.key for info in store.list_objects("prepared")] == [f"prepared/{KEY}.json"]


def test_the_first_record_stays_unless_it_is_of_no_use(root: str, entry: PreparedPrompts) -> None:
    later = replace(entry, run_id="night-2")
    prepared.record(root, KEY, entry)
    assert not prepared.record(root, KEY, later)
    assert prepared.find(root, KEY) == entry
    assert prepared.record(root, KEY, later, replace=True)
    assert prepared.find(root, KEY) == later


def test_bytes_that_are_gone_or_others_are_never_returned(
    root: str, store: ObjectStore, entry: PreparedPrompts
) -> None:
    key = f"night-1/{entry.artifact.folder}/part-00001.parquet"
    store.put(key, b"other!")
    with pytest.raises(StoreError, match=r"part-00001\.parquet is damaged"):
        prepared.read(root, entry)
    store.delete(key)
    with pytest.raises(ObjectNotFoundError):
        prepared.read(root, entry)
    with pytest.raises(ConfigError, match="run id"):
        prepared.read(root, replace(entry, run_id="../night-1"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "is not a record of prepared prompts"),
        (b"[]", "is not a record of prepared prompts"),
        (b'{"format":1}', "is not a record of prepared prompts"),
        (b'{"format":1,"artifact":{"files":[{}]},"run_id":"a","source":""}', "is not a record of prepared prompts"),
        (b'{"format":2}', "format 2, but this version reads format 1"),
    ],
)
def test_a_damaged_record_is_named(root: str, store: ObjectStore, body: bytes, message: str) -> None:
    store.put(layout.prepared(KEY), body)
    with pytest.raises(StoreError, match=message) as caught:
        prepared.find(root, KEY)
    assert f"prepared/{KEY}.json" in str(caught.value)
