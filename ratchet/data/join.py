"""Joining tables of one step by key, never by position."""

from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ratchet.data.schemas import ROLLOUT_KEY
from ratchet.errors import DataError


def aligned(rollouts: pa.Table, other: pa.Table, name: str) -> pa.Table:
    """Return `other` with its rows in the order of `rollouts`, joined by (group_id, sample_index).

    A key that is missing, stands twice or belongs to no rollout is a DataError that names it.
    """
    keys, wanted = _keys(other), _keys(rollouts)
    found = {key: place for place, key in enumerate(keys)}
    for what, all_keys in ((name, keys), ("rollouts", wanted)):
        if len(set(all_keys)) < len(all_keys):
            twice = [key for key, count in Counter(all_keys).items() if count > 1]
            raise DataError(f"{what}: {len(twice)} keys (group_id, sample_index) stand twice: the first is {twice[0]}")
    if missing := [key for key in wanted if key not in found]:
        raise DataError(f"{name}: no row for {len(missing)} of {len(wanted)} rollouts; the first is {missing[0]}")
    if len(found) != len(wanted):
        stray = next(iter(found.keys() - set(wanted)))
        raise DataError(f"{name}: {len(found)} rows for {len(wanted)} rollouts; {stray} is no rollout")
    return other.take(pa.array([found[key] for key in wanted], pa.int64()))


def align(rollouts: pa.Table, other: pa.Table, name: str) -> list[dict[str, Any]]:
    """Return the rows of `aligned` as dicts."""
    rows: list[dict[str, Any]] = aligned(rollouts, other, name).to_pylist()
    return rows


def prompts_by_id(prompts: pa.Table, prompt_ids: list[str]) -> dict[str, dict[str, Any]]:
    """Return prompt_id -> row for the given ids; an unknown id is a DataError."""
    wanted = pa.array(sorted(set(prompt_ids)), pa.string())
    selected = prompts.filter(pc.is_in(prompts["prompt_id"], value_set=wanted))
    found = {row["prompt_id"]: row for row in selected.to_pylist()}
    for prompt_id in prompt_ids:
        if prompt_id not in found:
            raise DataError(f"prompt {prompt_id!r} is not among the {prompts.num_rows} prompts of this run")
    return found


def _keys(table: pa.Table) -> list[tuple[str, int]]:
    return list(zip(*(table[name].to_pylist() for name in ROLLOUT_KEY), strict=True))
