import pyarrow as pa
import pytest

from ratchet.data.join import align, prompts_by_id
from ratchet.errors import DataError

KEYS = [("g1", 0), ("g1", 1), ("g2", 0)]


def _table(keys: list[tuple[str, int]], values: list[float] | None = None) -> pa.Table:
    columns = {"group_id": [key[0] for key in keys], "sample_index": [key[1] for key in keys]}
    return pa.table({**columns, **({} if values is None else {"reward": values})})


def test_rows_are_joined_by_key_whatever_their_order() -> None:
    other = _table([KEYS[2], KEYS[0], KEYS[1]], [2.0, 0.0, 1.0])
    assert [row["reward"] for row in align(_table(KEYS), other, "rewards")] == [0.0, 1.0, 2.0]


def test_empty_tables_join_to_nothing() -> None:
    assert align(_table([]), _table([], []), "rewards") == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (KEYS[:2], r"rewards: no row for 1 of 3 rollouts; the first is \('g2', 0\)"),
        ([*KEYS, KEYS[1]], r"rewards: 1 keys \(group_id, sample_index\) stand twice: the first is \('g1', 1\)"),
        ([*KEYS, ("g3", 0)], r"rewards: 4 rows for 3 rollouts; \('g3', 0\) is no rollout"),
        ([("g1", 1), ("g1", 1), ("g2", 0)], "stand twice"),
    ],
)
def test_keys_that_do_not_match_one_to_one_are_refused(keys: list[tuple[str, int]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        align(_table(KEYS), _table(keys, [0.0] * len(keys)), "rewards")


def test_rollouts_that_stand_twice_are_refused() -> None:
    with pytest.raises(DataError, match="stand twice"):
        align(_table([KEYS[0], KEYS[0]]), _table([KEYS[0]], [1.0]), "rewards")


def test_prompts_are_found_by_id_each_once() -> None:
    prompts = pa.table({"prompt_id": ["a", "b", "c"], "ability": ["x", "y", "z"]})
    found = prompts_by_id(prompts, ["c", "a", "c"])
    assert {key: row["ability"] for key, row in found.items()} == {"a": "x", "c": "z"}
    with pytest.raises(DataError, match="prompt 'd' is not among the 3 prompts of this run"):
        prompts_by_id(prompts, ["a", "d"])
