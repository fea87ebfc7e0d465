"""The examples of one step as the rows that trainers take."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.join import aligned
from ratchet.data.order import batch_positions, imitated_positions
from ratchet.data.ragged import list_column, true_counts
from ratchet.stages.base import Input
from ratchet.stages.run_tables import run_table
from ratchet.store.objects import ObjectStore
from ratchet.store.run import Run

if TYPE_CHECKING:
    from ratchet.engines.offline_rows import PairRow, SFTRow

logger = logging.getLogger(__name__)

CHOSEN, REJECTED = 0, 1
"""sample_index of a pair's completions."""
EXAMPLES_OF_STEP = ("data.train_batch_size", "data.shuffle", "trainer.seed")
"""The keys that say which examples a step trains on."""


def examples_of(run: Run, split: str) -> Input:
    """Return the committed examples of a split; NotCommittedError where there are none yet."""
    return Input(run.require(f"preprocess/{split}", None), "examples")


def step_examples(store: ObjectStore, examples: Input, config: RunConfig, step: int) -> pa.Table:
    """Return the examples that `step` trains on, in order: those that its prompts would be under the same seed."""
    table = run_table(store, examples.artifact, schemas.EXAMPLES)
    ids: list[str] = table["example_id"].to_pylist()
    data = config.data
    return table.take(batch_positions(step, ids, data.train_batch_size, seed=config.trainer.seed, shuffle=data.shuffle))


def imitated_examples(store: ObjectStore, examples: Input, config: RunConfig, step: int, num_tokens: int) -> pa.Table:
    """Return the examples that `step` of a hybrid run imitates beside rollouts of `num_tokens` tokens in the loss.

    Of all tokens in the loss algorithm.hybrid.mix_ratio are theirs: a little more, since examples are taken whole, or
    less where there are no more examples.
    """
    table = run_table(store, examples.artifact, schemas.EXAMPLES)
    ids: list[str] = table["example_id"].to_pylist()
    ratio = config.algorithm.hybrid.mix_ratio
    counts: list[int] = true_counts(table["chosen_loss_mask"]).tolist()
    wanted = num_tokens * ratio / (1 - ratio)
    positions = imitated_positions(step, ids, counts, seed=config.trainer.seed, wanted=wanted)
    found = sum(counts[position] for position in positions)
    if step == 1 and found < wanted:
        logger.warning(
            "algorithm.hybrid.sft_files holds %d loss tokens, and %.0f would make the share mix_ratio=%g beside the "
            "rollouts of this step: each example counts the more; add examples, or lower mix_ratio",
            found,
            wanted,
            ratio,
        )
    return table.take(positions)


def sft_rows(examples: pa.Table) -> "list[SFTRow]":
    """Return what each example demonstrates."""
    from ratchet.engines.offline_rows import SFTRow

    columns = ("prompt_token_ids", "chosen_token_ids", "chosen_loss_mask")
    return [SFTRow(*values) for values in _rows(examples, columns)]


def pair_rows(examples: pa.Table, reference: Sequence[Sequence[float]] | None = None) -> "list[PairRow]":
    """Return the two completions of each example; `reference` has log-probs of each, as `pair_sides` orders them."""
    from ratchet.engines.offline_rows import PairRow

    columns = ("prompt", "chosen", "rejected")
    masks = ("chosen_loss_mask", "rejected_loss_mask")
    rows = list(_rows(examples, (*(f"{name}_token_ids" for name in columns), *masks)))
    scores: Sequence[Any] = [None] * (2 * len(rows)) if reference is None else reference
    return [PairRow(*row, *scores[2 * place : 2 * place + 2]) for place, row in enumerate(rows)]


def pair_sides(examples: pa.Table) -> tuple[list[Any], list[Any]]:
    """Return (prompt_token_ids, completion_token_ids) of what was chosen and rejected, one after the other by pair."""
    sides = [side for row in pair_rows(examples) for side in row.sides()]
    return [side.prompt_token_ids for side in sides], [side.completion_token_ids for side in sides]


def pair_keys(examples: pa.Table, step: int) -> dict[str, list[Any]]:
    """Return the keys of the completions that `pair_sides` returns."""
    groups = [f"{step:06d}/{example_id}" for example_id in examples["example_id"].to_pylist()]
    return {
        "group_id": [group for group in groups for _ in (CHOSEN, REJECTED)],
        "sample_index": [index for _ in groups for index in (CHOSEN, REJECTED)],
    }


def reference_of(examples: pa.Table, scores: pa.Table, step: int) -> list[Any]:
    """Return the reference's log-probs of each completion that `pair_sides` returns, joined by key."""
    keys = pa.table(pair_keys(examples, step), schema=schemas.scores("reference").remove(2))
    return list_column(aligned(keys, scores, "reference_scores")["reference_log_probs"])


def _rows(examples: pa.Table, columns: Sequence[str]) -> Any:
    return zip(*(list_column(examples[name]) for name in columns), strict=True)
