"""The rollouts of one step with everything that was said of them, joined by key, as padded tensors."""

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ratchet.data import schemas
from ratchet.data.join import aligned
from ratchet.data.parquet import read_table
from ratchet.data.ragged import lengths_of, padded
from ratchet.errors import DataError, EngineError, NumericsError
from ratchet.stages.base import Context

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True, slots=True)
class StepRollouts:
    """B rollouts padded to T completion tokens, in the order of the rollouts table."""

    table: pa.Table
    mask: "Tensor"
    """bool [B, T]."""
    group_index: "Tensor"
    """int64 [B]."""
    rewards: "Tensor"
    """float64 [B], as they were graded; NaN where they were not."""
    is_graded: "Tensor"
    """bool [B]: whether the row has a reward, and what that is compared with."""
    token_rewards: "Tensor"
    """float64 [B, T]: a sum of float32 rewards is not always the reward that a completion without tokens has."""
    reward_parts: "dict[str, Tensor]" = field(default_factory=dict)
    greedy_rewards: "Tensor | None" = None
    sampler_log_probs: "Tensor | None" = None
    """0 in rows that the sampler was not asked about; None if it was asked about none."""
    is_sampled: "Tensor"
    """bool [B]: whether the row has sampler_log_probs."""
    policy_log_probs: "Tensor | None" = None
    reference_log_probs: "Tensor | None" = None
    sum_pi_squared: "Tensor | None" = None
    values: "Tensor | None" = None

    @property
    def key_columns(self) -> dict[str, pa.ChunkedArray]:
        """The columns that a table of these rollouts is joined by."""
        return {name: self.table[name] for name in schemas.ROLLOUT_KEY}

    def name(self, row: int) -> str:
        """Return what to call a row in a message."""
        group_id, sample_index = (self.table[name][row].as_py() for name in schemas.ROLLOUT_KEY)
        return f"rollout {group_id}, sample {sample_index}"

    def of(self, is_wanted: "Tensor") -> "StepRollouts":
        """Return the rows where `is_wanted` (bool [B]) holds, as wide as before."""
        return StepRollouts(**{one.name: _rows(getattr(self, one.name), is_wanted) for one in fields(self)})


def _rows(values: Any, is_wanted: "Tensor") -> Any:
    if isinstance(values, pa.Table):
        return values.filter(pa.array(is_wanted.numpy()))
    if isinstance(values, dict):
        return {name: column[is_wanted] for name, column in values.items()}
    return None if values is None else values[is_wanted]


def read_step(context: Context) -> StepRollouts:
    """Join the tables that the stage's inputs name; DataError where one does not fit the rollouts."""
    import torch

    rollouts = _table(context, "rollouts", schemas.ROLLOUTS)
    rewards = aligned(rollouts, _table(context, "rewards", schemas.REWARDS), "rewards")
    lengths = lengths_of(rollouts["completion_token_ids"])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    groups: dict[str, int] = {}
    group_ids = rollouts["group_id"].to_pylist()
    is_graded = torch.tensor(rewards["reward"].is_valid().to_pylist())
    step = StepRollouts(
        table=rollouts,
        mask=mask,
        group_index=torch.tensor([groups.setdefault(group_id, len(groups)) for group_id in group_ids]),
        rewards=torch.tensor(rewards["reward"].fill_null(math.nan).to_pylist(), dtype=torch.float64),
        is_graded=is_graded,
        token_rewards=torch.zeros(mask.shape, dtype=torch.float64),
        is_sampled=torch.from_numpy(rollouts["sampler_log_probs"].is_valid().to_numpy()),
        reward_parts=_parts(rewards, is_graded),
    )
    _check_finite(step)
    rows = torch.arange(len(lengths))[is_graded & (lengths > 0)]
    step.token_rewards[rows, lengths[rows] - 1] = step.rewards[rows]
    if "token_rewards" in context.inputs:
        _spread(step, aligned(rollouts, _table(context, "token_rewards", schemas.TOKEN_REWARDS), "token_rewards"))
    if bool(step.is_sampled.any()):
        step.sampler_log_probs = torch.zeros(mask.shape)
        known = rollouts["sampler_log_probs"].drop_null()
        step.sampler_log_probs[step.is_sampled] = padded(known, mask[step.is_sampled])
    for role in ("policy", "reference"):
        name = f"{role}_scores"
        if name in context.inputs:
            with_squares = role == "policy" and "sum_pi_squared" in context.config.advantage_needs
            schema = schemas.scores(role, with_sum_pi_squared=with_squares)
            scores = aligned(rollouts, _table(context, name, schema), name)
            setattr(step, f"{role}_log_probs", padded(scores[f"{role}_log_probs"], mask))
            if with_squares:
                step.sum_pi_squared = padded(scores["sum_pi_squared"], mask)
    if "values" in context.inputs:
        step.values = padded(aligned(rollouts, _table(context, "values", schemas.VALUES), "values")["values"], mask)
    if "greedy_rewards" in context.inputs:
        step.greedy_rewards = _greedy_rewards(context, group_ids)
        step.is_graded = is_graded & ~step.greedy_rewards.isnan()
    if not bool(step.is_graded.any()):
        raise EngineError(f"step {context.step}: none of its {len(lengths)} rollouts could be graded")
    return step


def _table(context: Context, role: str, schema: pa.Schema) -> pa.Table:
    return read_table(context.run.store, context.inputs[role].artifact, schema)


def _check_finite(step: StepRollouts) -> None:
    import torch

    for row in (step.is_graded & ~torch.isfinite(step.rewards)).nonzero()[:1]:
        raise NumericsError(f"{step.name(int(row))}: the reward is {step.rewards[row].item()}")


def _parts(rewards: pa.Table, is_graded: "Tensor") -> "dict[str, Tensor]":
    """The parts that every graded row has, as columns; NaN in other rows."""
    import torch

    rows: list[dict[str, float]] = [dict(parts or ()) for parts in rewards["reward_breakdown"].to_pylist()]
    graded = [row for row, is_known in zip(rows, is_graded.tolist(), strict=True) if is_known]
    names = set(graded[0]).intersection(*graded[1:]) if graded else set()
    return {
        name: torch.tensor([row.get(name, math.nan) for row in rows], dtype=torch.float64) for name in sorted(names)
    }


def _spread(step: StepRollouts, table: pa.Table) -> None:
    """Put the token rewards of rows that have them in place of the one on the last token."""
    import torch

    for row, values in enumerate(table["token_rewards"].to_pylist()):
        if values is None:
            continue
        length = int(step.mask[row].sum())
        if len(values) != length:
            raise DataError(f"{step.name(row)}: {len(values)} token rewards for {length} completion tokens")
        step.token_rewards[row, :length] = torch.tensor(values, dtype=torch.float64)


def _greedy_rewards(context: Context, group_ids: list[str]) -> "Tensor":
    import torch

    table: list[dict[str, Any]] = _table(context, "greedy_rewards", schemas.REWARDS).to_pylist()
    by_group = {row["group_id"]: row["reward"] for row in table}
    if missing := sorted(set(group_ids) - by_group.keys()):
        raise DataError(f"greedy_rewards: no row for {len(missing)} groups; the first is {missing[0]}")
    rewards = [by_group[group_id] for group_id in group_ids]
    return torch.tensor([math.nan if reward is None else reward for reward in rewards], dtype=torch.float64)
