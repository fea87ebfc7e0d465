"""Joining tables of one step by key, never by position."""

from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ratchet.data.schemas import ROLLOUT_KEY
from ratchet.errors import DataError


def align(rollouts: pa.Table, other: pa.Table, name: str) -> list[dict[str, Any]]:
    """Return the rows of `other` in the order of `rollouts`, joined by (group_id, sample_index).

    A key that is missing, stands twice or belongs to no rollout is a DataError that names it.
    """
    rows = other.to_pylist()
    found = {_key(row): row for row in rows}
    wanted = [_key(row) for row in rollouts.select(list(ROLLOUT_KEY)).to_pylist()]
    for what, keys in ((name, list(map(_key, rows))), ("rollouts", wanted)):
        counts = Counter(keys)
        if twice := [key for key, count in counts.items() if count > 1]:
            raise DataError(f"{what}: {len(twice)} keys (group_id, sample_index) stand twice: the first is {twice[0]}")
    if missing := [key for key in wanted if key not in found]:
        raise DataError(f"{name}: no row for {len(missing)} of {len(wanted)} rollouts; the first is {missing[0]}")
    if len(found) != len(wanted):
        stray = next(iter(found.keys() - set(wanted)))
        raise DataError(f"{name}: {len(found)} rows for {len(wanted)} rollouts; {stray} is no rollout")
    return [found[key] for key in wanted]


def prompts_by_id(prompts: pa.Table, prompt_ids: list[str]) -> dict[str, dict[str, Any]]:
    """Return prompt_id -> row for the given ids; an unknown id is a DataError."""
    wanted = pa.array(sorted(set(prompt_ids)), pa.string())
    selected = prompts.filter(pc.is_in(prompts["prompt_id"], value_set=wanted))
    found = {row["prompt_id"]: row for row in selected.to_pylist()}
    for prompt_id in prompt_ids:
        if prompt_id not in found:
            raise DataError(f"prompt {prompt_id!r} is not among the {prompts.num_rows} prompts of this run")
    return found


def _key(row: dict[str, Any]) -> tuple[str, int]:
    return row["group_id"], row["sample_index"]
