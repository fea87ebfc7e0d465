"""Rollouts as custom rewards see them: rows with texts, token ids and ground truths, and padded tensors on demand.

The layout of the tensors is verl's: prompts are padded on the left, responses on the right, and one attention mask lies
over both. The trap: padding is told from the mask alone, for the padding id may be a real token's id. torch is imported
when a tensor is asked for, and not before.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeRow:
    """One completion that is to be graded.

    Example: GradeRow(data_source="openai/gsm8k", prompt=[{"role": "user", "content": "..."}], completion="#### 72",
    ground_truth="72", prompt_token_ids=[5, 6], completion_token_ids=[7, 2]).
    """

    data_source: str
    prompt: Sequence[Mapping[str, str]] = ()
    """Chat messages of "role" and "content"."""
    completion: str
    ground_truth: str | None = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    prompt_token_ids: Sequence[int] = ()
    completion_token_ids: Sequence[int] = ()
    finish_reason: str = "stop"
    """"stop" or "length"."""
    where: str = ""
    """Names the row in errors."""

    @property
    def place(self) -> str:
        """What errors call this row."""
        return self.where or f"completion {self.completion[:40]!r}"


def place_of(rows: Sequence[GradeRow]) -> str:
    """What errors call several rows."""
    return rows[0].place if len(rows) == 1 else f"{len(rows)} rows, {rows[0].place} to {rows[-1].place}"


class DataItem:
    """One row of a DataProto."""

    def __init__(self, data: "DataProto", index: int) -> None:
        self._data = data
        self._index = index
        self.row: GradeRow = data.rows[index]

    @property
    def data_source(self) -> str:
        return self.row.data_source

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as chat messages of "role" and "content"."""
        return [dict(message) for message in self.row.prompt]

    @property
    def prompt(self) -> str:
        """The prompt's text: what its messages say, one below the other, without the chat template."""
        return "\n".join(message["content"] for message in self.row.prompt)

    @property
    def completion(self) -> str:
        """The completion's text, without special tokens; `response` and `solution_str` are the same."""
        return self.row.completion

    response = completion
    solution_str = completion

    @property
    def ground_truth(self) -> str | None:
        """What the answer is compared with; None where the data have none."""
        return self.row.ground_truth

    @property
    def extra_info(self) -> dict[str, Any]:
        """Whatever else the data say about the prompt; a copy."""
        return dict(self.row.extra_info)

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(self.row.prompt_token_ids)

    @property
    def completion_token_ids(self) -> list[int]:
        return list(self.row.completion_token_ids)

    @property
    def finish_reason(self) -> str:
        """ "stop", or "length" where the completion was cut off."""
        return self.row.finish_reason

    @property
    def batch(self) -> "dict[str, Tensor]":
        """This row of each tensor of `DataProto.batch`, padding included."""
        return {key: tensor[self._index] for key, tensor in self._data.batch.items()}

    @property
    def non_tensor_batch(self) -> dict[str, Any]:
        """ "data_source", "reward_model" (with its "ground_truth"), "extra_info" and "raw_prompt"."""
        return _non_tensors(self.row)


def _non_tensors(row: GradeRow) -> dict[str, Any]:
    return {
        "data_source": row.data_source,
        "reward_model": {"ground_truth": row.ground_truth, "style": "rule"},
        "extra_info": dict(row.extra_info),
        "raw_prompt": [dict(message) for message in row.prompt],
    }


class DataProto:
    """A batch of rollouts: `len(data)`, iteration and indexing over items, and tensors of all rows.

    A slice is a DataProto, padded like the whole.
    """

    def __init__(
        self, rows: Sequence[GradeRow], *, pad_token_id: int = 0, widths: tuple[int, int] | None = None
    ) -> None:
        self.rows = tuple(rows)
        self._pad_token_id = pad_token_id
        longest = (
            max((len(row.prompt_token_ids) for row in self.rows), default=0),
            max((len(row.completion_token_ids) for row in self.rows), default=0),
        )
        self.prompt_width, self.completion_width = widths or longest

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[DataItem]:
        return (DataItem(self, index) for index in range(len(self.rows)))

    @overload
    def __getitem__(self, index: int) -> DataItem: ...
    @overload
    def __getitem__(self, index: slice) -> "DataProto": ...
    def __getitem__(self, index: "int | slice") -> "DataItem | DataProto":
        if isinstance(index, slice):
            widths = (self.prompt_width, self.completion_width)
            return DataProto(self.rows[index], pad_token_id=self._pad_token_id, widths=widths)
        return DataItem(self, range(len(self.rows))[index])

    @cached_property
    def batch(self) -> "dict[str, Tensor]":
        """Integer tensors of all rows: "prompts" [B, P] padded left, "responses" [B, T] padded right, "input_ids" and
        "attention_mask" [B, P + T] over both, "response_mask" [B, T]."""
        import torch

        prompts = torch.full((len(self), self.prompt_width), self._pad_token_id, dtype=torch.int64)
        responses = torch.full((len(self), self.completion_width), self._pad_token_id, dtype=torch.int64)
        mask = torch.zeros((len(self), self.prompt_width + self.completion_width), dtype=torch.int64)
        for index, row in enumerate(self.rows):
            start, length = self.prompt_width - len(row.prompt_token_ids), len(row.completion_token_ids)
            prompts[index, start:] = torch.tensor(list(row.prompt_token_ids), dtype=torch.int64)
            responses[index, :length] = torch.tensor(list(row.completion_token_ids), dtype=torch.int64)
            mask[index, start : self.prompt_width + length] = 1
        return {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": mask,
            "response_mask": mask[:, self.prompt_width :],
        }

    @cached_property
    def non_tensor_batch(self) -> dict[str, Any]:
        """The items' `non_tensor_batch`, each key as an object array [B]."""
        import numpy as np

        items = [_non_tensors(row) for row in self.rows]
        columns: dict[str, Any] = {}
        for key in ("data_source", "reward_model", "extra_info", "raw_prompt"):
            columns[key] = np.empty(len(items), dtype=object)
            for index, item in enumerate(items):
                columns[key][index] = item[key]
        return columns
