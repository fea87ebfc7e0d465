"""The tables of the advantage stage, also for rollouts of which nothing is learnt.

The trap: a rollout that could not be graded must stay a row, since later stages join by key; but it has no statistics,
and the loss leaves it out.
"""

from typing import TYPE_CHECKING

import pyarrow as pa

from ratchet.data import schemas
from ratchet.data.ragged import ragged
from ratchet.stages.step_rollouts import StepRollouts

if TYPE_CHECKING:
    from torch import Tensor

_STATISTICS = ("group_reward_mean", "group_reward_std", "group_size")


def trajectories(
    step: StepRollouts,
    rewards: "Tensor",
    advantages: "Tensor",
    returns: "Tensor",
    loss_mask: "Tensor",
    behaviour: "Tensor | None",
    source: str,
) -> pa.Table:
    """The table of TRAJECTORIES; `rewards` is [B], `behaviour` None where the update takes its own, the rest [B, T]."""
    from ratchet.algorithms.advantage import group_statistics

    mean, std, size = group_statistics(rewards, step.group_index)
    columns = {
        **step.key_columns,
        "advantages": ragged(advantages, step.mask),
        "returns": ragged(returns, step.mask),
        "token_rewards": ragged(step.token_rewards, step.mask),
        "loss_mask": ragged(loss_mask, step.mask),
        "behaviour_log_probs": pa.nulls(len(rewards)) if behaviour is None else ragged(behaviour, step.mask),
        "behaviour_source": [source] * len(rewards),
        "group_reward_mean": mean.numpy(),
        "group_reward_std": std.numpy(),
        "group_size": size.numpy(),
    }
    return pa.table(columns).cast(schemas.TRAJECTORIES)


def importance_weights(step: StepRollouts, weights: "Tensor") -> pa.Table:
    """The table of IMPORTANCE_WEIGHTS; `weights` is [B, T]."""
    columns = {**step.key_columns, "importance_weights": ragged(weights, step.mask)}
    return pa.table(columns).cast(schemas.IMPORTANCE_WEIGHTS)


def set_aside(step: StepRollouts, behaviour: "Tensor | None", source: str) -> dict[str, pa.Table]:
    """The tables of rollouts that were not graded: advantage 0, no token in the loss, no statistics."""
    import torch

    nothing, none = torch.zeros(step.mask.shape), torch.zeros(len(step.rewards), dtype=torch.float64)
    table = trajectories(step, none, nothing, nothing, nothing.bool(), behaviour, source)
    for name in _STATISTICS:
        place = table.schema.get_field_index(name)
        empty = pa.nulls(table.num_rows, table.schema.field(place).type)
        table = table.set_column(place, table.schema.field(place), empty)
    return {"trajectories": table, "importance_weights": importance_weights(step, torch.ones(step.mask.shape))}
