"""What shapes the signal that a step learns from: DAPO's soft penalty on length and its leaving out of groups without
signal (https://arxiv.org/abs/2503.14476), and a penalty in proportion to length. Plain numbers, no tensors.

Trap: whether a group has a signal is asked of the reward that was given, before any penalty or KL is added to it.
"""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ratchet.algorithms.batch import Compat

GroupId = TypeVar("GroupId", bound=Hashable)


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty_factor: float = 1.0) -> float:
    """Return what a completion of `num_tokens` adds to its reward: 0 or less.

    0 up to `max_tokens - buffer_tokens`, then falling in a straight line to -penalty_factor at `max_tokens` (section
    3.4 of the paper). Raises ValueError for a buffer outside 1..max_tokens or a factor below 0.

    Example: overlong_penalty(90, max_tokens=100, buffer_tokens=20) is -0.5.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(f"expected an overlong buffer of 1 to {max_tokens} tokens, got {buffer_tokens}")
    if not penalty_factor >= 0.0:
        raise ValueError(f"expected an overlong penalty_factor of at least 0, got {penalty_factor}")
    excess = num_tokens - (max_tokens - buffer_tokens)
    return -penalty_factor * excess / buffer_tokens if excess > 0 else 0.0


def length_penalty(num_tokens: int, *, max_tokens: int, free_tokens: int = 0) -> float:
    """Return the share of the way from `free_tokens` to `max_tokens` that a completion has gone, as 0 to -1.

    The cost of each further token is the same everywhere, unlike that of `overlong_penalty`, which begins just before
    the limit. Raises ValueError for free_tokens outside 0..max_tokens - 1.

    Example: length_penalty(60, max_tokens=100, free_tokens=20) is -0.5.
    """
    if not 0 <= free_tokens < max_tokens:
        raise ValueError(f"expected 0 to {max_tokens - 1} free tokens, got {free_tokens}")
    return -max(0, min(num_tokens, max_tokens) - free_tokens) / (max_tokens - free_tokens)


def informative_groups(
    group_ids: Sequence[GroupId], values: Sequence[float], *, compat: "Compat" = "ratchet"
) -> set[GroupId]:
    """Return the groups whose values differ: those that give a group-relative advantage anything to compare.

    `values` has one number per rollout (DAPO: its accuracy or its reward), `group_ids` the group of each. Equal means
    equal, not a standard deviation that rounds to 0. A group of one has nothing to compare with and is not returned;
    `compat="verl"` returns it. Raises ValueError where the lengths differ.
    """
    if len(group_ids) != len(values):
        raise ValueError(f"expected one value for each of {len(group_ids)} rollouts, got {len(values)}")
    of_group: dict[GroupId, list[float]] = {}
    for group_id, value in zip(group_ids, values, strict=True):
        of_group.setdefault(group_id, []).append(value)
    return {
        group_id
        for group_id, own in of_group.items()
        if any(value != own[0] for value in own) or (compat == "verl" and len(own) == 1)
    }
