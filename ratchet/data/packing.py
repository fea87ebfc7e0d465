"""How rows of unequal length are put together into micro-batches, and micro-batches onto ranks.

Trap: every rank must run the same number of micro-batches, since each one is a collective; a rank with fewer would
leave the others waiting for ever. Empty micro-batches fill the gap.
"""

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import DTypeLike

Item = TypeVar("Item")

MicroBatch = list[int]
"""Row indices, ascending. Example: [0, 3, 4]."""
Entries = Sequence[float] | np.ndarray
"""What one row has for each of its tokens: ids, numbers or truth values."""


def flat(columns: Sequence[Entries], dtype: DTypeLike) -> np.ndarray:
    """Lay the entries of all rows one after another. Example: [[1, 2], [], [3]] gives [1, 2, 3]."""
    return np.concatenate([np.asarray(column, dtype) for column in columns]) if columns else np.empty(0, dtype)


def pack_by_tokens(lengths: Sequence[int], max_tokens: int, *, multiple_of: int = 1) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` tokens, of about equal size, holding every row once.

    `lengths` is tokens per row. First-fit decreasing decides how many micro-batches are needed; the rows are then dealt
    out evenly over that many, rounded up to a multiple of `multiple_of` where there are rows enough. A row longer than
    `max_tokens` gets a micro-batch of its own. The same lengths give the same micro-batches. Raises ValueError for a
    length below 0 or `max_tokens` or `multiple_of` below 1.
    """
    if max_tokens < 1 or multiple_of < 1:
        raise ValueError(f"expected max_tokens and multiple_of of at least 1, got {max_tokens} and {multiple_of}")
    if any(length < 0 for length in lengths):
        raise ValueError(f"expected lengths of at least 0, got {min(lengths)} in row {lengths.index(min(lengths))}")
    # Ties break by row index, so that the order is a function of the lengths alone.
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    packed = _first_fit(order, lengths, max_tokens)
    count = min(len(lengths), -(-len(packed) // multiple_of) * multiple_of)
    dealt = _deal(order, lengths, count)
    # Dealing evenly may exceed the budget where first-fit does not; then an uneven but fitting packing is better.
    is_fitting = all(len(rows) == 1 or sum(lengths[row] for row in rows) <= max_tokens for rows in dealt)
    return _ordered(dealt if is_fitting else packed)


def even_runs(items: Sequence[Item], count: int) -> list[list[Item]]:
    """Cut a sequence into `count` runs of nearly equal length, in order. Example: [1, 2, 3] gives [1], [2, 3]."""
    edges = [len(items) * number // count for number in range(count + 1)]
    return [list(items[start:end]) for start, end in pairwise(edges)]


def pack_by_count(num_rows: int, rows_per_micro_batch: int) -> list[MicroBatch]:
    """Micro-batches of `rows_per_micro_batch` rows in order; the last may hold fewer. Raises ValueError below 1."""
    if rows_per_micro_batch < 1:
        raise ValueError(f"expected rows_per_micro_batch of at least 1, got {rows_per_micro_batch}")
    return [
        list(range(start, min(start + rows_per_micro_batch, num_rows)))
        for start in range(0, num_rows, rows_per_micro_batch)
    ]


def split_over_ranks(
    micro_batches: Sequence[MicroBatch], lengths: Sequence[int], world_size: int
) -> list[list[MicroBatch]]:
    """Micro-batches per rank: as many on each rank, about as many tokens on each, empty ones last.

    Raises ValueError for a `world_size` below 1.
    """
    if world_size < 1:
        raise ValueError(f"expected a world_size of at least 1, got {world_size}")
    tokens = [sum(lengths[row] for row in rows) for rows in micro_batches]
    order = sorted(range(len(micro_batches)), key=lambda index: (-tokens[index], index))
    per_rank = -(-len(micro_batches) // world_size)
    ranks: list[list[MicroBatch]] = [[] for _ in range(world_size)]
    # Round by round: the heaviest micro-batch of a round goes to the rank that carries least so far.
    load = [0] * world_size
    for start in range(0, len(order), world_size):
        free = sorted(range(world_size), key=lambda rank: (load[rank], rank))
        for rank, index in zip(free, order[start : start + world_size], strict=False):
            ranks[rank].append(list(micro_batches[index]))
            load[rank] += tokens[index]
    return [batches + [[] for _ in range(per_rank - len(batches))] for batches in ranks]


def _first_fit(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[MicroBatch]:
    bins: list[MicroBatch] = []
    room: list[int] = []
    for row in order:
        place = next((index for index, free in enumerate(room) if lengths[row] <= free), None)
        if place is None:
            bins.append([row])
            room.append(max_tokens - lengths[row])
        else:
            bins[place].append(row)
            room[place] -= lengths[row]
    return bins


def _deal(order: Sequence[int], lengths: Sequence[int], count: int) -> list[MicroBatch]:
    bins: list[MicroBatch] = [[] for _ in range(count)]
    heap = [(0, index) for index in range(count)]
    for row in order:
        tokens, index = heapq.heappop(heap)
        bins[index].append(row)
        heapq.heappush(heap, (tokens + lengths[row], index))
    return [rows for rows in bins if rows]


def _ordered(bins: Sequence[MicroBatch]) -> list[MicroBatch]:
    return sorted((sorted(rows) for rows in bins), key=lambda rows: rows[0])
