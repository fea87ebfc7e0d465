"""Sampling in rounds until enough groups teach something: DAPO's dynamic sampling (arXiv:2503.14476, section 3.2).

A group whose rewards are all equal has advantage 0 throughout. Such groups are replaced by groups of other prompts,
drawn in an order that the seed and the step fix; what was left out is counted, not kept. Trap: prompts for the refill
come on top of the epoch's own, so an epoch still passes over every prompt once, however many rounds a step takes.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from ratchet.algorithms.shaping import informative_groups
from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.parquet import table_from_rows
from ratchet.rewards.shaping import penalties
from ratchet.stages.base import Context
from ratchet.stages.reward import check_any_graded, grade_samples

logger = logging.getLogger(__name__)

_DRAWN_PER_MISSING = 2
"""Groups sampled for each one that is missing: some of them will be uninformative, too."""


@dataclass(frozen=True, slots=True)
class Round:
    """Rollouts and their rewards."""

    rollouts: pa.Table
    rewards: pa.Table
    token_rewards: pa.Table | None
    """Where the reward gives any."""

    def of(self, groups: Iterable[str]) -> "Round":
        """Return the rows of `groups`."""
        wanted = pa.array(groups, pa.string())
        tables = (self.rollouts, self.rewards, self.token_rewards)
        return Round(*(one and one.filter(pc.is_in(one["group_id"], value_set=wanted)) for one in tables))


def sample_in_rounds(
    context: Context,
    prompts: pa.Table,
    positions: list[int],
    spare: list[int],
    sample: Callable[[Context, pa.Table, list[int]], pa.Table],
) -> tuple[Round, dict[str, float]]:
    """Sample the groups at `positions`, then groups of `spare` prompts until as many are informative, or none is left.

    Of a step without any informative group the first round with a reward is kept: it trains nothing, but the run goes
    on. EngineError where no round has any. Returns what is kept, group by group in the order in which they were drawn,
    and metrics.
    """
    options, wanted = context.config.algorithm.filter_groups, len(positions)
    kept: list[Round] = []
    graded: list[pa.Table] = []
    first: Round | None = None
    num_kept = num_sampled = rounds = 0
    while positions and num_kept < wanted and rounds < (options.max_num_gen_batches or rounds + 1):
        rollouts = sample(context, prompts, positions)
        current = Round(rollouts, *grade_samples(context, prompts, rollouts))
        graded.append(current.rewards)
        if first is None and current.rewards["reward"].null_count < current.rewards.num_rows:
            first = current
        groups = _informative(context, current.rewards)[: wanted - num_kept]
        kept.append(current.of(groups))
        rounds += 1
        num_sampled += len(positions)
        num_kept += len(groups)
        drawn = (wanted - num_kept) * _DRAWN_PER_MISSING
        positions, spare = spare[:drawn], spare[drawn:]
    check_any_graded(graded)
    assert first is not None
    if num_kept < wanted:
        logger.warning(
            "step %s: %d of %d groups teach something after %d rounds", context.step, num_kept, wanted, rounds
        )
    metrics = {
        "filter_groups/rounds": float(rounds),
        "filter_groups/sampled_groups": float(num_sampled),
        "filter_groups/kept_groups": float(num_kept),
    }
    return _joined(kept) if num_kept else first, metrics


def _joined(rounds: list[Round]) -> Round:
    rollouts, rewards = (pa.concat_tables([getattr(one, name) for one in rounds]) for name in ("rollouts", "rewards"))
    # A round whose rewards are all of whole completions has no table of token rewards.
    by_token = [one.token_rewards for one in rounds if one.token_rewards is not None]
    return Round(rollouts, rewards, _with_every_row(rewards, pa.concat_tables(by_token)) if by_token else None)


def _with_every_row(rewards: pa.Table, token_rewards: pa.Table) -> pa.Table:
    """Return `token_rewards` with a null for each row of `rewards` that it lacks."""
    known = {tuple(row[name] for name in schemas.ROLLOUT_KEY): row for row in token_rewards.to_pylist()}
    keys = rewards.select(list(schemas.ROLLOUT_KEY)).to_pylist()
    rows = [known.get(tuple(key.values()), key | {"token_rewards": None}) for key in keys]
    return table_from_rows(rows, schemas.TOKEN_REWARDS)


def _informative(context: Context, rewards: pa.Table) -> list[str]:
    """Return the groups whose rewards differ, in the order in which they were drawn; who has none is not compared."""
    rewards = rewards.filter(pc.is_valid(rewards["reward"]))
    algorithm = context.config.algorithm
    group_ids = rewards["group_id"].to_pylist()
    compared = _compared(rewards, context.config)
    found = informative_groups(group_ids, compared, compat=algorithm.compat)
    return [group_id for group_id in dict.fromkeys(group_ids) if group_id in found]


def _compared(rewards: pa.Table, config: RunConfig) -> list[float]:
    """Return what must differ within a group.

    The part of the reward that is called like the metric, where every row has it; otherwise the reward, without the
    penalties on length unless the metric is a sum.
    """
    metric = config.algorithm.filter_groups.metric
    parts = [dict(row or ()) for row in rewards["reward_breakdown"].to_pylist()]
    if metric is not None and all(metric in row for row in parts):
        return [row[metric] for row in parts]
    values: list[float] = rewards["reward"].to_pylist()
    if metric in ("seq_reward", "seq_final_reward"):
        return values
    # Rounded, since taking away what was added does not give back the last bit.
    return [round(value - penalties(config, row), 9) for value, row in zip(values, parts, strict=True)]
