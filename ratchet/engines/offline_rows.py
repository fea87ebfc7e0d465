"""Rows of examples to train on: one completion, or two that are compared.

Trap: what is compared is a whole text and not a token: a pair with a side that has no token in the loss says nothing,
and is refused rather than counted as a draw.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ratchet.data.packing import Entries
from ratchet.engines.training import LossTokens, check_columns
from ratchet.errors import DataError


@dataclass(frozen=True, slots=True)
class SFTRow:
    """One completion to imitate; the mask has one entry per completion token.

    Columns are lists or arrays. Example: SFTRow(prompt_token_ids=[1, 4093], completion_token_ids=[24, 2],
    loss_mask=[True, True]).
    """

    prompt_token_ids: Sequence[int] | np.ndarray
    completion_token_ids: Sequence[int] | np.ndarray
    loss_mask: Sequence[bool] | np.ndarray
    """False keeps a token in the attention and out of the loss."""


@dataclass(frozen=True, slots=True)
class PairRow:
    """Two completions of one prompt, the first of which is preferred; columns of a side have one entry per its token.

    Example: PairRow(prompt_token_ids=[1, 4093], chosen_token_ids=[24, 2], rejected_token_ids=[7, 2],
    chosen_loss_mask=[True, True], rejected_loss_mask=[True, True]).
    """

    prompt_token_ids: Sequence[int] | np.ndarray
    chosen_token_ids: Sequence[int] | np.ndarray
    rejected_token_ids: Sequence[int] | np.ndarray
    chosen_loss_mask: Sequence[bool] | np.ndarray
    rejected_loss_mask: Sequence[bool] | np.ndarray
    reference_chosen_log_probs: Entries | None = None
    """Nats, of each chosen token under the reference; needed by DPO unless it is without a reference."""
    reference_rejected_log_probs: Entries | None = None

    def sides(self) -> tuple[SFTRow, SFTRow]:
        """The chosen completion and the rejected one."""
        return (
            SFTRow(self.prompt_token_ids, self.chosen_token_ids, self.chosen_loss_mask),
            SFTRow(self.prompt_token_ids, self.rejected_token_ids, self.rejected_loss_mask),
        )

    def num_tokens(self) -> int:
        """Of both sequences, the prompt counted twice."""
        return 2 * len(self.prompt_token_ids) + len(self.chosen_token_ids) + len(self.rejected_token_ids)

    def references(self) -> tuple[Entries | None, Entries | None]:
        """The reference's log-probs of the chosen completion and of the rejected one."""
        return self.reference_chosen_log_probs, self.reference_rejected_log_probs


SIDES = ("chosen", "rejected")


def check_pairs(rows: Sequence[PairRow], *, needs_reference: bool) -> None:
    """Raise DataError for columns of unequal length, a side without a token in the loss or a missing reference.

    NumericsError for a reference's log-prob inside the loss mask that is not finite.
    """
    for place, side in enumerate(SIDES):
        sequences = [row.sides()[place] for row in rows]
        references = [row.references()[place] for row in rows]
        for index, (sequence, reference) in enumerate(zip(sequences, references, strict=True)):
            if not np.asarray(sequence.loss_mask, np.bool_).any():
                raise DataError(f"row {index} has no {side} token in the loss: such a pair prefers nothing")
            if needs_reference and reference is None:
                raise DataError(f"row {index} has no reference_{side}_log_probs: give them, or set reference_free")
        columns = {f"reference_{side}_log_probs": references} if needs_reference else {}
        check_columns(sequences, columns, of=side)


def pair_rewards(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """What is measured of pairs in training, by TRL's names: sums over the pairs, of each side's rewards [P]."""
    measured = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).double(),
        "rewards/margins": chosen - rejected,
    }
    return {name: values.sum() for name, values in measured.items()}


def pair_means(sums: Mapping[str, float], num_pairs: int) -> dict[str, float]:
    """A mini-batch's metrics, from what its pairs' shares add up to; "loss" is a mean already."""
    means = {name: value / num_pairs for name, value in sums.items() if name != "loss"}
    return {"actor/loss": sums["loss"]} | means


def pair_outcomes(losses: Tensor, margins: Tensor, tokens: LossTokens) -> list[dict[str, float]]:
    """ "loss", "margin", "accuracy" and "tokens" of each pair, from [P], [P] and the loss tokens of both sides of each.

    The accuracy is 1 for a margin above 0, else 0: a draw prefers nothing.
    """
    counts = tokens.counts.reshape(-1, 2).sum(1)
    return [
        {"loss": loss, "margin": margin, "accuracy": float(margin > 0), "tokens": float(count)}
        for loss, margin, count in zip(losses.tolist(), margins.tolist(), counts, strict=True)
    ]
