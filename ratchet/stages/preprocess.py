"""The prompts that the policy is asked: checked by what grades their completions, and within the limit on length."""

from typing import Any

import pyarrow as pa

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.parquet import table_from_rows
from ratchet.errors import DataError
from ratchet.rewards.graders import Grader
from ratchet.stages.data_stage import DataStage, Made, Numbered, row_values


class Preprocess(DataStage):
    """Commit the prompts of one split."""

    role = "prompts"
    id_column = "prompt_id"
    schema = schemas.PROMPTS
    is_graded = True
    config_keys = (
        "data.train_batch_size",
        "data.prompt_key",
        "data.data_source",
        "data.max_prompt_length",
        "data.filter_overlong_prompts",
        "data.train_max_samples",
        "data.val_max_samples",
    )

    def check(self, config: RunConfig, grader: Grader | None, rows: Numbered) -> None:
        assert grader is not None
        grader.check_prompts(row for _, row in rows)

    def make(self, config: RunConfig, tokenizer: Any, numbered: Numbered, key: str | None) -> Made:
        limit = config.data.max_prompt_length
        overlong = _overlong(tokenizer, numbered, limit, key)
        if overlong and not config.data.filter_overlong_prompts:
            first = min(overlong)
            raise DataError(
                f"{self.source(config)}: {len(overlong)} of {len(numbered)} prompts are longer than "
                f"data.max_prompt_length={limit} tokens; the first is row {first} with {overlong[first]}. Raise the "
                "limit, or set data.filter_overlong_prompts=true to leave them out"
            )
        kept = [item for index, item in enumerate(numbered) if index not in overlong]
        return Made(kept, lambda: _table(kept))


_MOST_KNOWN = 8
_known_overlong: dict[str, dict[int, int]] = {}
"""By the digest of what decides it: the check before a run and its first stage would both tokenise everything."""


def _overlong(tokenizer: Any, numbered: Numbered, limit: int, key: str | None) -> dict[int, int]:
    """Index and length, in tokens, of the prompts that are longer than `limit`."""
    if key is not None and key in _known_overlong:
        return _known_overlong[key]
    from ratchet.engines.model import chat_prompts_ids

    lengths = map(len, chat_prompts_ids(tokenizer, [row.prompt for _, row in numbered]))
    found = {index: length for index, length in enumerate(lengths) if length > limit}
    if key is not None:
        while len(_known_overlong) >= _MOST_KNOWN:
            _known_overlong.pop(next(iter(_known_overlong)), None)
        _known_overlong[key] = found
    return found


def _table(prompts: Numbered) -> pa.Table:
    rows = [{"prompt_id": prompt_id, **row_values(row)} for prompt_id, row in prompts]
    return table_from_rows(rows, schemas.PROMPTS)
