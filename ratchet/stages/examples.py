"""The examples that offline objectives learn from, tokenised once: what is demonstrated, and what it is preferred to.

Trap: the tokens are those that the objective trains on. A policy ends its turn with the token that it would have
sampled; a reward model reads conversations to the end of what the chat template writes.
"""

import dataclasses
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.conversations import CHOSEN_KEYS, REJECTED, Completion, chosen_of, rejected_of
from ratchet.data.parquet import table_from_rows
from ratchet.data.sources import PromptRow
from ratchet.errors import DataError
from ratchet.rewards.graders import Grader
from ratchet.stages.data_stage import DataStage, Made, Numbered

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tokens:
    """An example as it is trained on."""

    prompt: Sequence[int]
    chosen: Sequence[int]
    chosen_mask: Sequence[bool]
    rejected: Sequence[int] | None = None
    rejected_mask: Sequence[bool] | None = None

    @property
    def longest(self) -> int:
        """Tokens of its longer completion."""
        return max(len(self.chosen), len(self.rejected or ()))


class Examples(DataStage):
    """Commit the examples of one split: `prompt` and `chosen`, and `rejected` where the objective compares."""

    role = "examples"
    id_column = "example_id"
    schema = schemas.EXAMPLES
    is_graded = False
    config_keys = (
        "data.train_batch_size",
        "data.prompt_key",
        "data.data_source",
        "data.max_prompt_length",
        "data.max_response_length",
        "data.filter_overlong_prompts",
        "data.train_max_samples",
        "data.val_max_samples",
        "algorithm.objective",
    )

    def check(self, config: RunConfig, grader: Grader | None, rows: Numbered) -> None:
        """Nothing is left to check: what an example lacks is seen when it is tokenised."""

    def make(self, config: RunConfig, tokenizer: Any, numbered: Numbered, key: str | None) -> Made:
        if key is not None and key in _known:
            return _known[key]
        rows: list[dict[str, Any]] = []
        kept: Numbered = []
        overlong: list[str] = []
        for (example_id, row), values, tokens in self._tokenised(config, tokenizer, numbered):
            if len(tokens.prompt) > config.data.max_prompt_length:
                limit = f"a prompt of {len(tokens.prompt)} tokens, over data.max_prompt_length="
                overlong.append(f"{row.where}: {limit}{config.data.max_prompt_length}")
            elif tokens.longest > config.data.max_response_length:
                limit = f"a completion of {tokens.longest} tokens, over data.max_response_length="
                overlong.append(f"{row.where}: {limit}{config.data.max_response_length}")
            else:
                kept.append((example_id, row))
                rows.append(_columns(example_id, row, values, tokens))
        if overlong and not config.data.filter_overlong_prompts:
            raise DataError(
                f"{self.source(config)}: {len(overlong)} of {len(numbered)} examples are over the limits on length; "
                f"the first is {overlong[0]}. Raise the limit, or set data.filter_overlong_prompts=true to leave them "
                "out"
            )
        table = table_from_rows(rows, schemas.EXAMPLES)
        made = Made(kept, lambda: table)
        if key is not None:
            while len(_known) >= _MOST_KNOWN:
                _known.pop(next(iter(_known)), None)
            _known[key] = made
        return made

    def _tokenised(
        self, config: RunConfig, tokenizer: Any, numbered: Numbered
    ) -> Iterator[tuple[tuple[str, PromptRow], dict[str, Completion | None], Tokens]]:
        is_judged = config.algorithm.objective == "reward_model"
        num_draws = 0
        for example_id, row in numbered:
            chosen, rejected = chosen_of(row.extra_info, row.where), None
            if config.needs_pairs:
                rejected = rejected_of(row.extra_info, row.where)
                if rejected is None:
                    raise DataError(
                        f"{row.where}: algorithm.objective={config.algorithm.objective} compares what was chosen with "
                        "what was rejected; expected a column rejected, got none (algorithm.objective=sft needs none)"
                    )
                num_draws += rejected == chosen
            try:
                tokens = (_judged if is_judged else _sampled)(tokenizer, row.prompt, chosen, rejected)
            except DataError as error:
                raise DataError(f"{row.where}: {error}") from error
            _check_learnable(chosen, tokens, row.where)
            yield (example_id, row), {"chosen": chosen, REJECTED: rejected}, tokens
        if num_draws:
            logger.warning("%s: %d pairs have the same completion on both sides", self.name, num_draws)


def _check_learnable(chosen: Completion, tokens: Tokens, where: str) -> None:
    """DataError for an example from which nothing can be learnt, or a pair of which one side has nothing to compare."""
    texts = [chosen] if isinstance(chosen, str) else [turn["content"] for turn in chosen]
    if not any(text.strip() for text in texts) or not any(tokens.chosen_mask):
        raise DataError(f"{where}: expected a chosen completion to learn from, got {chosen!r:.80}")
    if tokens.rejected_mask is not None and not any(tokens.rejected_mask):
        raise DataError(f"{where}: no token of the rejected completion is the assistant's: expected at least its end")


def longest_example(examples: pa.Table) -> int:
    """Return the tokens of the longest sequence of a table that has a row: a prompt with either completion."""
    prompt, chosen, rejected = (
        pc.fill_null(pc.list_value_length(examples[f"{part}_token_ids"]), 0)
        for part in ("prompt", "chosen", "rejected")
    )
    return int(pc.max(pc.add(prompt, pc.max_element_wise(chosen, rejected))).as_py())


_MOST_KNOWN = 3
_known: dict[str, Made] = {}
"""By the digest of what decides it: the check before a run and its first stage would both tokenise everything."""


def _sampled(tokenizer: Any, prompt: list[dict[str, str]], chosen: Completion, rejected: Completion | None) -> Tokens:
    """As a policy would have sampled it."""
    from ratchet.engines.chat_template import conversation_ids

    prompt_ids, chosen_ids, mask = conversation_ids(tokenizer, prompt, chosen)
    tokens = Tokens(prompt_ids, chosen_ids, mask)
    if rejected is None:
        return tokens
    other_prompt, rejected_ids, rejected_mask = conversation_ids(tokenizer, prompt, rejected)
    if other_prompt != prompt_ids:
        raise DataError(
            "the chat template says the prompt otherwise before the rejected completion than before the chosen one; "
            "expected the same tokens"
        )
    return dataclasses.replace(tokens, rejected=rejected_ids, rejected_mask=rejected_mask)


def _judged(tokenizer: Any, prompt: list[dict[str, str]], chosen: Completion, rejected: Completion | None) -> Tokens:
    """As a reward model reads it."""
    from ratchet.engines.reward_model import conversations_of_a_prompt

    assert rejected is not None
    turns = [[{"role": "assistant", "content": one}] if isinstance(one, str) else one for one in (chosen, rejected)]
    prompt_ids, (chosen_ids, rejected_ids) = conversations_of_a_prompt(tokenizer, prompt, turns)
    masks = [[True] * len(ids) for ids in (chosen_ids, rejected_ids)]
    return Tokens(prompt_ids, chosen_ids, masks[0], rejected_ids, masks[1])


def _columns(example_id: str, row: PromptRow, values: dict[str, Completion | None], tokens: Tokens) -> dict[str, Any]:
    shown = next(key for key in CHOSEN_KEYS if row.extra_info.get(key) is not None)
    # They have columns of their own.
    others = {key: value for key, value in row.extra_info.items() if key not in (shown, REJECTED)}
    return {
        "example_id": example_id,
        "data_source": row.data_source,
        "prompt": [dict(message) for message in row.prompt],
        **{key: _text(value) for key, value in values.items()},
        "prompt_token_ids": tokens.prompt,
        "chosen_token_ids": tokens.chosen,
        "chosen_loss_mask": tokens.chosen_mask,
        "rejected_token_ids": tokens.rejected,
        "rejected_loss_mask": tokens.rejected_mask,
        "extra_info": json.dumps(others, sort_keys=True, ensure_ascii=False),
    }


def _text(value: Completion | None) -> str | None:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
