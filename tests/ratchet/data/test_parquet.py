"""Tables: equal ones give equal bytes, and what does not fit is named."""

import hashlib
import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.data import parquet, schemas
from ratchet.data.parquet import read_table, table_from_rows, to_bytes, write_table
from ratchet.errors import DataError, StoreError
from ratchet.store import ObjectStore, artifacts, open_store

REWARD: dict[str, Any] = {
    "group_id": "000003/train-0000007",
    "sample_index": 0,
    "reward": 1.0,
    "reward_breakdown": {"gsm8k": 1.0, "a": 0.5},
    "extracted": "6",
    "is_parseable": True,
    "error": None,
}
ALL_SCHEMAS = {
    "prompts": schemas.PROMPTS,
    "rollouts": schemas.ROLLOUTS,
    "rewards": schemas.REWARDS,
    "scores": schemas.scores("policy"),
    "trajectories": schemas.TRAJECTORIES,
    "evaluations": schemas.EVALUATIONS,
}


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path))


def rewards(count: int) -> pa.Table:
    return table_from_rows([{**REWARD, "sample_index": index} for index in range(count)], schemas.REWARDS)


def test_a_table_comes_back_as_it_was(store: ObjectStore) -> None:
    table = table_from_rows([REWARD, {**REWARD, "reward": -0.5, "error": "timeout"}], schemas.REWARDS)
    artifact = write_table(store, "a", table)
    found = read_table(store, artifact, schemas.REWARDS)
    assert found.equals(table)
    assert found.schema.equals(schemas.REWARDS, check_metadata=True)
    assert artifact.rows == 2
    assert [row["error"] for row in found.to_pylist()] == [None, "timeout"]
    assert found.to_pylist()[0]["reward_breakdown"] == [("a", 0.5), ("gsm8k", 1.0)]


@pytest.mark.parametrize("schema", ALL_SCHEMAS.values(), ids=ALL_SCHEMAS)
def test_empty_tables_and_nulls_come_back(store: ObjectStore, schema: pa.Schema) -> None:
    empty = table_from_rows([], schema)
    artifact = write_table(store, "empty", empty)
    assert [entry.path for entry in artifact.files] == ["part-00000.parquet"]
    assert artifact.rows == 0
    assert read_table(store, artifact, schema).equals(empty)
    nulls = table_from_rows([dict.fromkeys(schema.names)] * 3, schema)
    found = read_table(store, write_table(store, "nulls", nulls), schema)
    assert found.equals(nulls)
    assert to_bytes(found) == to_bytes(nulls)


def test_equal_tables_give_equal_bytes_however_they_came_about() -> None:
    table = rewards(9)
    data = to_bytes(table)
    chunked = pa.concat_tables([table.slice(0, 4), table.slice(4)])
    sliced = pa.concat_tables([rewards(3), table]).slice(3)
    described = table.replace_schema_metadata({"pandas": "{}"})
    read_back = pq.read_table(io.BytesIO(data))
    assert to_bytes(chunked) == to_bytes(sliced) == to_bytes(described) == to_bytes(read_back) == data
    assert to_bytes(rewards(8)) != data


def test_the_order_of_a_breakdown_is_not_content() -> None:
    turned = {**REWARD, "reward_breakdown": dict(reversed(REWARD["reward_breakdown"].items()))}
    assert to_bytes(table_from_rows([turned], schemas.REWARDS)) == to_bytes(rewards(1))


@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.text()),
            st.one_of(st.none(), st.lists(st.integers(0, 2**31 - 1), max_size=5)),
            st.one_of(st.none(), st.lists(st.floats(width=32, allow_nan=False), max_size=5)),
        ),
        max_size=8,
    ),
    st.integers(0, 8),
)
def test_any_rows_survive_their_bytes(values: list[tuple[Any, Any, Any]], cut: int) -> None:
    schema = pa.schema([("t", pa.string()), ("i", pa.list_(pa.int32())), ("f", pa.list_(pa.float32()))])
    given_rows = [{"t": text, "i": integers, "f": floats} for text, integers, floats in values]
    table = table_from_rows(given_rows, schema)
    data = to_bytes(table)
    assert pq.read_table(io.BytesIO(data)).to_pylist() == given_rows
    assert to_bytes(pa.concat_tables([table.slice(0, cut), table.slice(cut)])) == data


def test_a_large_table_is_cut_into_parts_in_order(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROWS_PER_PART", 4)
    table = rewards(9)
    artifact = write_table(store, "a", table)
    assert [entry.path for entry in artifact.files] == [f"part-{index:05d}.parquet" for index in range(3)]
    assert read_table(store, artifact, schemas.REWARDS).equals(table)
    assert len(write_table(store, "b", rewards(8)).files) == 2
    assert artifact.digest == write_table(store, "c", pa.concat_tables([table.slice(0, 5), table.slice(5)])).digest


def test_a_table_just_over_one_part_has_two(store: ObjectStore) -> None:
    schema = pa.schema([("x", pa.int32())])
    table = pa.table({"x": pa.array(range(parquet.ROWS_PER_PART + 1), pa.int32())}, schema=schema)
    artifact = write_table(store, "a", table)
    assert len(artifact.files) == 2
    assert read_table(store, artifact, schema).equals(table)


def test_the_bytes_of_a_small_table_stay_what_they_are(store: ObjectStore) -> None:
    metadata = pq.read_metadata(io.BytesIO(to_bytes(rewards(3))))
    column = metadata.row_group(0).column(0)
    assert (metadata.format_version, column.compression, column.has_dictionary_page) == ("2.6", "ZSTD", False)
    first, second = (write_table(store, name, rewards(3)) for name in ("a", "b"))
    assert first.files == second.files
    assert first.files[0].sha256 == hashlib.sha256(to_bytes(rewards(3))).hexdigest()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("sample_index", "x"),
        ("sample_index", 2**40),
        ("sample_index", 2**70),
        ("sample_index", 1.5),
        ("reward", "1"),
        ("is_parseable", 1),
        ("error", "\ud800"),
        ("error", 3),
        ("reward_breakdown", [1]),
        ("reward_breakdown", 3),
        ("reward_breakdown", {"a": "x"}),
        ("reward_breakdown", {"a": 1.0, 3: 1.0}),
    ],
)
def test_a_value_of_the_wrong_type_names_its_column(column: str, value: Any) -> None:
    with pytest.raises(DataError, match=rf"column '{column}' takes "):
        table_from_rows([REWARD, {**REWARD, column: value}], schemas.REWARDS)


def test_a_fraction_among_token_ids_is_refused() -> None:
    schema = pa.schema([("ids", pa.list_(pa.int32()))])
    with pytest.raises(DataError, match=r"column 'ids' takes .*: 2\.5 is not an integer"):
        table_from_rows([{"ids": None}, {"ids": [1, 2.5]}], schema)


def test_missing_and_unknown_columns_are_named() -> None:
    row = {name: value for name, value in REWARD.items() if name != "reward"} | {"score": 1.0}
    with pytest.raises(DataError, match=r"row 1: missing columns \['reward'\], unknown columns \['score'\]"):
        table_from_rows([REWARD, row], schemas.REWARDS)


def test_a_table_of_another_kind_is_named_with_its_differences(store: ObjectStore) -> None:
    artifact = write_table(store, "step-000001/reward/0001-a", rewards(1))
    with pytest.raises(
        DataError, match=r"0001-a/part-00000\.parquet: expected columns policy_log_probs list<"
    ) as caught:
        read_table(store, artifact, schemas.scores("policy"))
    assert "group_id" not in str(caught.value)
    narrow = schemas.REWARDS.set(2, pa.field("reward", pa.float32()))
    with pytest.raises(DataError, match="expected columns reward float; found reward double"):
        read_table(store, artifact, narrow)
    turned = pa.schema(list(reversed(list(schemas.REWARDS))))
    with pytest.raises(DataError, match="expected columns error string"):
        read_table(store, artifact, turned)


def test_what_is_no_table_or_not_the_committed_one_is_named(store: ObjectStore) -> None:
    text = artifacts.write_bytes(store, "a", {"part-00000.parquet": b"no table"})
    with pytest.raises(DataError, match=r"a/part-00000\.parquet is not a Parquet file"):
        read_table(store, text, schemas.REWARDS)
    artifact = write_table(store, "b", rewards(2))
    with pytest.raises(DataError, match="its manifest counts 3 rows, its files hold 2"):
        read_table(store, replace(artifact, rows=3), schemas.REWARDS)
    store.put("b/part-00000.parquet", to_bytes(rewards(3)))
    with pytest.raises(StoreError, match=r"b/part-00000\.parquet is damaged"):
        read_table(store, artifact, schemas.REWARDS)


def test_reading_leaves_no_thread_that_could_outlive_the_process() -> None:
    # Arrow's threads would abort a process that ends while they hold its bytes: one in ten did.
    code = """
import os
from ratchet.data.parquet import from_bytes, to_bytes
import pyarrow as pa
data = to_bytes(pa.table({name: [[1, 2]] * 9 for name in "abcdef"}))
before = len(os.listdir("/proc/self/task"))
assert from_bytes(data).num_rows == 9
print(len(os.listdir("/proc/self/task")) - before)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "0"
