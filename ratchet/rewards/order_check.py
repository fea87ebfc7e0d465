"""Whether a reward that is called with many rows returns its numbers in the rows' order.

The trap: rewards that lie in another order look as good as any, and teach the policy noise. A row that is graded alone
cannot be confused, so a few are, and compared with what they earned among others. Only a reward that gives the same
numbers to other rows is refused: one that compares rows with each other, or that draws at random, gives other numbers.
"""

import math
from collections.abc import Sequence

from ratchet.errors import DataError, RatchetError
from ratchet.rewards.custom import CustomReward
from ratchet.rewards.data_proto import GradeRow
from ratchet.rewards.results import RewardResult

MOST = 8
"""Rows that are graded alone, once for a process that grades."""


def check_order(reward: CustomReward, rows: Sequence[GradeRow], results: Sequence[RewardResult]) -> None:
    """DataError that names the first row which got another's reward; `results` are those of all `rows` together.

    `reward` is one that has graded nothing yet, so that the state of the one that grades stays as it is.
    """
    rewards = [result.reward for result in results]
    if len(rows) < 2 or min(rewards) == max(rewards):
        return
    count = min(MOST, len(rows))
    places = [index * len(rows) // count for index in range(count)]
    picked, among = [rows[place] for place in places], [rewards[place] for place in places]
    try:
        alone = _alone(reward, picked)
        if _same(alone, among) or not _same(alone, _alone(reward, picked)):
            return
        is_confused = any(_confuses(reward, picked[::way], alone[::way]) for way in (1, -1))
    except RatchetError:
        # What cannot grade a row alone is not judged by that.
        return
    if is_confused:
        at = next(index for index in range(count) if not _same(alone[index : index + 1], among[index : index + 1]))
        raise DataError(
            f"{picked[at].place}: the reward {reward.name} gives it {among[at]:g} among {len(rows)} rows and "
            f"{alone[at]:g} alone, and the same numbers to other rows: expected one reward per row, in the rows' order"
        )


def _confuses(reward: CustomReward, rows: Sequence[GradeRow], alone: Sequence[float]) -> bool:
    """Whether the rows together earn what they earn alone, but not each its own."""
    together = [result.reward for result in reward.score(rows)]
    return not _same(together, alone) and _same(sorted(together), sorted(alone))


def _alone(reward: CustomReward, rows: Sequence[GradeRow]) -> list[float]:
    return [reward.score([row])[0].reward for row in rows]


def _same(one: Sequence[float], other: Sequence[float]) -> bool:
    # A model's numbers differ a little between batches.
    return all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-4) for a, b in zip(one, other, strict=True))
