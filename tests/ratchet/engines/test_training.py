"""Rows as columns: what is in the loss, its weights, and what is refused."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from ratchet.algorithms.aggregation import LossTotals
from ratchet.engines.packed import pack
from ratchet.engines.training import LossTokens, check_columns
from ratchet.errors import DataError, NumericsError

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Columns:
    loss_mask: Any
    prompt_token_ids: Any = (1,)

    @property
    def completion_token_ids(self) -> list[int]:
        return [7] * len(self.loss_mask)


ROWS = [Columns([True, False, True]), Columns([]), Columns([False]), Columns(np.array([True, True]))]
NUMBERS = [[0.1, float("nan"), 0.3], [], [4.0], np.array([5.0, 6.0])]


def test_loss_tokens_are_those_inside_the_masks_in_order() -> None:
    tokens = LossTokens.of(ROWS)
    assert tokens.mask.tolist() == [True, False, True, False, True, True]
    assert tokens.counts.tolist() == [2, 0, 0, 2]
    taken = tokens.take(NUMBERS, CPU)
    assert taken.dtype == torch.float32
    assert torch.equal(taken, torch.tensor([0.1, 0.3, 5.0, 6.0]))
    assert tokens.spread(np.arange(4)).tolist() == [0, 0, 3, 3]
    # Two rows have tokens, two each: half of a row's share for each of them.
    weights = tokens.weights("seq-mean-token-mean", LossTotals(4, 2), None, CPU)
    assert weights.tolist() == [0.25] * 4
    assert weights.dtype == torch.float32


@pytest.mark.parametrize("rows", [[], [Columns([])]])
def test_no_token_is_no_token(rows: list[Columns]) -> None:
    tokens = LossTokens.of(rows)
    assert tokens.counts.tolist() == [0] * len(rows)
    assert tokens.take([[]] * len(rows), CPU).shape == (0,)


def test_columns_that_do_not_fit_are_refused_by_row_and_name() -> None:
    check_columns(ROWS, {"numbers": NUMBERS, "others": [None, None, None, [1, 2]]})
    for error, message, numbers in (
        (DataError, "row 2 has 0 numbers for 1 completion tokens", [*NUMBERS[:2], [], NUMBERS[3]]),
        (NumericsError, "row 3 has numbers in the loss", [*NUMBERS[:3], [0.0, float("inf")]]),
        (NumericsError, "row 0 has numbers in the loss", [[float("nan"), 0.0, 0.0], *NUMBERS[1:]]),
    ):
        with pytest.raises(error, match=message):
            check_columns(ROWS, {"numbers": numbers})
    with pytest.raises(DataError, match="row 1 has no prompt token"):
        check_columns([ROWS[0], Columns([True], np.array([], np.int64))], {})


@pytest.mark.parametrize("kind", [list, np.array])
def test_a_pack_by_hand(kind: Any) -> None:
    packed = pack([kind([5, 6]), kind([7])], [kind([8, 9]), kind([3])], [kind([False, True]), kind([True])], CPU)
    assert packed.input_ids.tolist() == [[5, 6, 8, 9, 7, 3]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert packed.sequence_lengths == [4, 2]
    # The 9 at place 3 is predicted at place 2, the 3 at place 5 at place 4.
    assert packed.predictors.tolist() == [2, 4]
    assert packed.targets.tolist() == [9, 3]
