"""Manifests: canonical bytes, digests of content alone, and what is refused."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.errors import StoreError
from ratchet.store.manifest import Artifact, Delta, FileEntry, Manifest, canonical_json, digest_of, finite_metrics
from tests.ratchet.store.records import make_manifest

FINITE = st.floats(allow_nan=False, allow_infinity=False)


def test_writing_and_reading_changes_no_byte() -> None:
    manifest = make_manifest(step=3, stage="reward", metrics={"critic/score/mean": 0.1 + 0.2, "tiny": 5e-324})
    data = manifest.to_json()
    assert Manifest.from_json(data, key="k") == manifest
    assert Manifest.from_json(data, key="k").to_json() == data
    assert manifest.sha256 == hashlib.sha256(data).hexdigest()
    assert b" " not in data.replace(b"cpu 1", b"")
    assert data.isascii()


@given(
    st.dictionaries(st.text(max_size=5), FINITE, max_size=4),
    st.text(max_size=5),
    FINITE,
    st.one_of(st.none(), st.integers(0, 10**9)),
)
def test_any_manifest_survives_its_bytes(metrics: dict[str, float], text: str, time: float, step: int | None) -> None:
    manifest = make_manifest(step=step, stage="rollout", metrics=metrics, device=text, started=time)
    assert Manifest.from_json(manifest.to_json(), key="k") == manifest


def test_the_trainers_state_and_a_table_without_rows_survive() -> None:
    state = Artifact(folder="f", files=(FileEntry(path="a", bytes=1, sha256="0"),))
    manifest = make_manifest(step=1, stage="policy_update", trainer_state=state)
    assert Manifest.from_json(manifest.to_json(), key="k").provenance.trainer_state == state


def test_a_delta_survives_and_changes_neither_the_digest_nor_the_bytes_of_manifests_without_one() -> None:
    whole = Artifact(folder="f", files=(FileEntry(path="a", bytes=1, sha256="0"),))
    delta = Delta(base="b", step=2, folder="g", files=(FileEntry(path="a.delta", bytes=5, sha256="1"),))
    manifest = make_manifest(step=3, stage="policy_update", artifacts={"policy": replace(whole, delta=delta)})
    data = manifest.to_json()
    assert Manifest.from_json(data, key="k") == manifest
    expected = {"base": "b", "step": 2, "folder": "g", "files": [{"path": "a.delta", "bytes": 5, "sha256": "1"}]}
    assert json.loads(data)["provenance"]["artifacts"]["policy"]["delta"] == expected
    assert manifest.output("policy").digest == whole.digest
    assert manifest.output("policy").stored == ("g", delta.files)
    without = make_manifest(step=3, stage="policy_update", artifacts={"policy": whole}, trainer_state=whole)
    as_before = b'{"files":[{"bytes":1,"path":"a","sha256":"0"}],"folder":"f","rows":null}'
    assert b'"artifacts":{"policy":' + as_before + b"}" in without.to_json()
    assert b'"trainer_state":' + as_before in without.to_json()
    assert whole.stored == ("f", whole.files)


def test_the_content_digest_does_not_depend_on_how_it_was_made() -> None:
    manifest = make_manifest(step=1, stage="reward")
    other = make_manifest(
        step=1, stage="reward", run_id="another", attempt="0009-ffff", epoch=9, started=5.0, metrics={"x": 1.0}
    )
    assert manifest.content_digest == other.content_digest
    assert manifest.sha256 != other.sha256


@pytest.mark.parametrize(
    "change",
    [
        {"step": 2},
        {"stage": "rollout"},
        {"policy_version": 7},
        {"inputs": {"rollouts": "b" * 64}},
        {"outputs": {"rewards": "b" * 64}},
        {"config": "c"},
    ],
)
def test_the_content_digest_depends_on_all_content(change: dict[str, Any]) -> None:
    manifest = make_manifest(step=1, stage="reward")
    assert replace(manifest, content=replace(manifest.content, **change)).content_digest != manifest.content_digest


def test_equal_files_have_one_digest_wherever_they_lie_and_in_any_order() -> None:
    files = (FileEntry(path="a", bytes=1, sha256="0"), FileEntry(path="b", bytes=2, sha256="1"))
    digest = Artifact(folder="x", files=files).digest
    assert digest == Artifact(folder="y", files=files[::-1], rows=5).digest == digest_of({"a": "0", "b": "1"})
    assert digest == hashlib.sha256(b'{"a":"0","b":"1"}').hexdigest()
    assert digest != Artifact(folder="x", files=files[:1]).digest


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        make_manifest(step=1, stage="reward", metrics={"x": value}).to_json()
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"x": [value]})
    assert finite_metrics({"x": value, "y": 2}) == {"y": 2.0, "nonfinite/x": 1.0}


def test_another_format_is_named() -> None:
    raw = json.loads(make_manifest(step=1, stage="reward").to_json())
    with pytest.raises(StoreError, match=r"k/manifest\.json: format 99, .* reads format 1"):
        Manifest.from_json(canonical_json({**raw, "format": 99}), key="k/manifest.json")


DELTA: dict[str, Any] = {"base": "b", "step": 2, "folder": "g", "files": []}
WRONG_DELTAS: list[Any] = [{}, {"base": "b"}, 3, [], {**DELTA, "more": 1}, {**DELTA, "files": [3]}]


def with_delta(raw: dict[str, Any], delta: Any) -> bytes:
    artifact = {**raw["provenance"]["artifacts"]["rewards"], "delta": delta}
    return canonical_json({**raw, "provenance": {**raw["provenance"], "artifacts": {"rewards": artifact}}})


def damaged() -> list[bytes]:
    data = make_manifest(step=1, stage="reward", metrics={"x": 1.0}).to_json()
    raw = json.loads(data)
    return [
        b"",
        b"\xff\xfe",
        b"[]",
        b"3",
        b'"text"',
        b"null",
        data[:-1],
        data + b"\n",
        json.dumps(raw, indent=1).encode(),
        data.replace(b'"x":1.0', b'"x":1e999'),
        data.replace(b'"x":1.0', b'"x":1.00'),
        data.replace(b'"x":1.0', b'"x":0.5,"x":1.0'),
        canonical_json({**raw, "more": 1}),
        canonical_json({"format": 1, "content": raw["content"]}),
        canonical_json({**raw, "content": {**raw["content"], "colour": "red"}}),
        *(with_delta(raw, delta) for delta in WRONG_DELTAS),
        data.replace(b'"rows":1', b'"delta":null,"rows":1'),
        canonical_json({**raw, "provenance": {**raw["provenance"], "artifacts": []}}),
        canonical_json({**raw, "provenance": {**raw["provenance"], "artifacts": {"rewards": 3}}}),
    ]


@pytest.mark.parametrize("data", damaged())
def test_what_is_not_as_it_was_written_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(StoreError, match=r"^k/manifest\.json is not "):
        Manifest.from_json(data, key="k/manifest.json")


def test_an_output_that_the_stage_lacks_is_named_with_those_it_has() -> None:
    manifest = make_manifest(step=1, stage="reward")
    assert manifest.output("rewards").folder == "step-000001/reward/0001-a"
    with pytest.raises(StoreError, match="stage reward has no output 'weights'; it has: rewards"):
        manifest.output("weights")
