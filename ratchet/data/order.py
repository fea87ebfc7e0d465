"""Which prompts a step uses, and the seed of every sample; both depend on the run's seed and on keys only.

An epoch's last batch may be smaller, so that no prompt is dropped and none stands twice in a step.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache


def steps_per_epoch(num_prompts: int, batch_size: int) -> int:
    """Return ceil(num_prompts / batch_size)."""
    return math.ceil(num_prompts / batch_size)


def batch_positions(step: int, prompt_ids: Sequence[str], batch_size: int, *, seed: int, shuffle: bool) -> list[int]:
    """Return the positions of the prompts of `step` (steps start at 1), in order.

    Every epoch passes over all prompts once. With `shuffle` its order is that of sha256(seed, epoch, prompt_id).
    """
    per_epoch = steps_per_epoch(len(prompt_ids), batch_size)
    epoch, place = divmod(step - 1, per_epoch)
    order = _epoch_order(tuple(prompt_ids), seed, epoch) if shuffle else range(len(prompt_ids))
    return list(order[place * batch_size : (place + 1) * batch_size])


@lru_cache(maxsize=2)
def _epoch_order(prompt_ids: tuple[str, ...], seed: int, epoch: int) -> list[int]:
    # Every step of the epoch asks for it.
    return sorted(range(len(prompt_ids)), key=lambda position: _digest("order", seed, epoch, prompt_ids[position]))


def refill_positions(step: int, prompt_ids: Sequence[str], used: Sequence[int], *, seed: int) -> list[int]:
    """Return the positions of all prompts but those `used` by the step, in an order of the step's own."""
    taken = set(used)
    order = [position for position in range(len(prompt_ids)) if position not in taken]
    order.sort(key=lambda position: _digest("refill", seed, step, prompt_ids[position]))
    return order


def imitated_positions(
    step: int, example_ids: Sequence[str], num_tokens: Sequence[int], *, seed: int, wanted: float
) -> list[int]:
    """Return the positions of the examples that `step` imitates beside its rollouts, in order.

    They are taken in an order of the step's own until their tokens in the loss, `num_tokens` of each, are at least
    `wanted`, or until there are no more: none is taken twice.
    """
    order = sorted(range(len(example_ids)), key=lambda position: _digest("imitate", seed, step, example_ids[position]))
    taken, total = [], 0
    for position in order:
        if total >= wanted:
            break
        taken.append(position)
        total += num_tokens[position]
    return taken


def sample_seed(seed: int, step: int, prompt_id: str, sample_index: int) -> int:
    """Return the sample's seed, 0 <= seed < 2**63."""
    return int.from_bytes(_digest("sample", seed, step, prompt_id, sample_index)[:8], "big") >> 1


def _digest(purpose: str, *parts: int | str) -> bytes:
    return hashlib.sha256("\x1f".join([purpose, *map(str, parts)]).encode()).digest()
