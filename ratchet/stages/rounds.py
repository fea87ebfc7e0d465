"""Sampling in rounds until enough groups teach something: DAPO's dynamic sampling (arXiv:2503.14476, section 3.2).

A group whose rewards are all equal has advantage 0 throughout. Such groups are replaced by groups of other prompts,
drawn in an order that the seed and the step fix; what was left out is counted, not kept. Trap: prompts for the refill
come on top of the epoch's own, so an epoch still passes over every prompt once, however many rounds a step takes.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from ratchet.algorithms.shaping import informative_groups
from ratchet.rewards.graders import OVERLONG
from ratchet.stages.base import Context
from ratchet.stages.reward import grade_samples

logger = logging.getLogger(__name__)

_DRAWN_PER_MISSING = 2
"""Groups sampled for each one that is missing: some of them will be uninformative, too."""


@dataclass(frozen=True, slots=True)
class Round:
    """Rollouts and their rewards."""

    rollouts: pa.Table
    rewards: pa.Table
    has_token_rewards: bool = False
    """Whether `rewards` does not say everything, and the rollouts must be graded again for it."""


def sample_in_rounds(
    context: Context,
    prompts: pa.Table,
    positions: list[int],
    spare: list[int],
    sample: Callable[[Context, pa.Table, list[int]], pa.Table],
) -> tuple[Round, dict[str, float]]:
    """Sample the groups at `positions`, then groups of `spare` prompts until as many are informative, or none is left.

    Of a step without any informative group the first round is kept: it trains nothing, but the run goes on. Returns
    what is kept, group by group in the order in which they were drawn, and metrics.
    """
    algorithm, wanted = context.config.algorithm, len(positions)
    most, compat = algorithm.filter_groups.max_num_gen_batches, algorithm.compat
    kept: list[Round] = []
    first: Round | None = None
    num_kept = num_sampled = rounds = 0
    while positions and (most == 0 or rounds < most):
        rollouts = sample(context, prompts, positions)
        rewards, per_token = grade_samples(context, rollouts)
        rounds += 1
        num_sampled += len(positions)
        first = first or Round(rollouts, rewards, bool(per_token))
        group_ids = rewards["group_id"].to_pylist()
        informative = informative_groups(group_ids, _compared(rewards, algorithm.filter_groups.metric), compat=compat)
        groups = [group_id for group_id in dict.fromkeys(group_ids) if group_id in informative][: wanted - num_kept]
        num_kept += len(groups)
        is_kept = pc.is_in(rollouts["group_id"], value_set=pa.array(groups, pa.string()))
        kept.append(Round(rollouts.filter(is_kept), rewards.filter(is_kept)))
        missing = wanted - num_kept
        positions, spare = spare[: missing * _DRAWN_PER_MISSING], spare[missing * _DRAWN_PER_MISSING :]
        if not missing:
            break
    assert first is not None
    if num_kept < wanted:
        logger.warning(
            "step %s: %d of %d groups are informative after %d rounds", context.step, num_kept, wanted, rounds
        )
    metrics = {
        "filter_groups/rounds": float(rounds),
        "filter_groups/sampled_groups": float(num_sampled),
        "filter_groups/kept_groups": float(num_kept),
    }
    if not num_kept:
        return first, metrics
    rollouts, rewards = (pa.concat_tables([getattr(one, name) for one in kept]) for name in ("rollouts", "rewards"))
    return Round(rollouts, rewards, first.has_token_rewards), metrics


def _compared(rewards: pa.Table, metric: str | None) -> list[float]:
    """Return what must differ within a group: the reward, without the penalty on length unless the metric is a sum."""
    values: list[float] = rewards["reward"].to_pylist()
    if metric in ("seq_reward", "seq_final_reward"):
        return values
    penalties = [dict(parts or ()).get(OVERLONG, 0.0) for parts in rewards["reward_breakdown"].to_pylist()]
    # Rounded, since taking away what was added does not give back the last bit.
    return [round(value - penalty, 9) for value, penalty in zip(values, penalties, strict=True)]
