"""Shows examined completions with their rewards, and grades a DataProto as verl's reward manager of that name does.

The trap: a policy writes anything, terminal control codes and characters that the output cannot encode included; both
are shown escaped, so that looking at samples never breaks a terminal or a run.
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ratchet.rewards.custom import CustomReward
from ratchet.rewards.data_proto import DataProto, GradeRow
from ratchet.rewards.registry import reward_for
from ratchet.rewards.results import RewardResult

if TYPE_CHECKING:
    from torch import Tensor

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _escaped(text: str) -> str:
    text = _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def examine(
    rows: Sequence[GradeRow], results: Sequence[RewardResult], num_examine: int, tokenizer: Any | None = None
) -> None:
    """Write the first `num_examine` rows of each data source, with their rewards, to standard output.

    With a tokenizer the prompt is shown as the policy saw it, template and all.
    """
    shown: dict[str, int] = {}
    for row, result in zip(rows, results, strict=True):
        if shown.get(row.data_source, 0) >= num_examine:
            continue
        shown[row.data_source] = shown.get(row.data_source, 0) + 1
        if tokenizer is not None and row.prompt_token_ids:
            prompt = tokenizer.decode(list(row.prompt_token_ids))
        else:
            prompt = "\n".join(message["content"] for message in row.prompt)
        lines = [
            ("data_source", row.data_source),
            ("prompt", prompt),
            ("completion", row.completion),
            ("ground_truth", row.ground_truth),
            ("reward", f"none, {result.error}" if result.is_failed else result.reward),
            *sorted(result.breakdown.items()),
        ]
        sys.stdout.write("".join(f"[{name}] {_escaped(str(value))}\n" for name, value in lines))
    sys.stdout.flush()


class NaiveRewardManager:
    """Grades a DataProto row by row and prints `num_examine` completions of each data source with their rewards.

    `compute_score` is verl's hook, `(data_source, solution_str, ground_truth, extra_info)`; without it the rule of each
    row's data source grades. `tokenizer` decodes what rows bring as token ids alone; it may be None where they bring
    texts.
    """

    def __init__(
        self, tokenizer: Any = None, num_examine: int = 0, compute_score: Callable[..., Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score
        self._reward = CustomReward(compute_score or _by_rule)

    def __call__(self, data: DataProto, return_dict: bool = False) -> "Tensor | dict[str, Any]":
        """Rewards [B], float64; with `return_dict` {"reward_tensor": rewards, "reward_extra_info": {name: list}}.

        DataError or NumericsError names the row that cannot be graded.
        """
        import torch

        rows = [self._with_text(row) for row in data.rows]
        results = self._reward.score(rows)
        if self.num_examine > 0:
            examine(rows, results, self.num_examine, self.tokenizer)
        rewards = torch.tensor([result.reward for result in results], dtype=torch.float64)
        if not return_dict:
            return rewards
        names = sorted({name for result in results for name in result.breakdown})
        extra = {name: [result.breakdown.get(name) for result in results] for name in names}
        return {"reward_tensor": rewards, "reward_extra_info": extra}

    def _with_text(self, row: GradeRow) -> GradeRow:
        if row.completion or not row.completion_token_ids or self.tokenizer is None:
            return row
        text = self.tokenizer.decode(list(row.completion_token_ids), skip_special_tokens=True)
        return replace(row, completion=text)


def _by_rule(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> RewardResult:
    return reward_for(data_source)(data_source, solution_str, ground_truth, extra_info)
