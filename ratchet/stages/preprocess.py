"""From what users bring to the run's prompts: read, check, number, drop or refuse what is too long, commit."""

import functools
import json
import logging
from collections.abc import Sequence
from typing import Any, Literal

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.parquet import table_from_rows, write_table
from ratchet.data.sources import PromptRow, load_rows
from ratchet.errors import ConfigError, DataError, RatchetError
from ratchet.rewards.graders import Grader
from ratchet.stages.base import Context, Input, Result, Stage
from ratchet.store.manifest import digest_of
from ratchet.store.run import POLICY_UPDATE, Run

logger = logging.getLogger(__name__)


class Preprocess(Stage):
    """Commit the prompts of one split under `data/<split>`."""

    config_keys = (
        "data.train_batch_size",
        "data.prompt_key",
        "data.data_source",
        "data.max_prompt_length",
        "data.filter_overlong_prompts",
        "data.train_max_samples",
        "data.val_max_samples",
    )

    def __init__(self, split: Literal["train", "val"]) -> None:
        self.split = split
        self.name = f"preprocess/{split}"
        # Read once: the digest and the rows must be of the same bytes.
        self._load = functools.lru_cache(maxsize=1)(load_rows)

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        return {"policy": Input(run.require(POLICY_UPDATE, 0), "policy")}

    def outside_inputs(self, config: RunConfig) -> dict[str, str] | None:
        try:
            rows = self.rows(config)
        except RatchetError:
            return None
        return {"source": digest_of([_row_values(row) for row in rows])}

    def compute(self, context: Context) -> Result:
        kept, num_overlong = self.usable(context.config, context.residents.tokenizer(), context.residents.grader())
        table = table_from_rows(
            [{"prompt_id": prompt_id, **_row_values(row)} for prompt_id, row in kept], schemas.PROMPTS
        )
        artifact = write_table(context.store, f"{context.folder}/prompts", table)
        distinct = {json.dumps(row.prompt, sort_keys=True) for _, row in kept}
        metrics = {
            f"data/{self.split}/num_prompts": float(len(kept)),
            f"data/{self.split}/num_overlong_prompts": float(num_overlong),
            f"data/{self.split}/num_duplicate_prompts": float(len(kept) - len(distinct)),
        }
        return Result(outputs={"prompts": artifact}, metrics=metrics)

    def usable(self, config: RunConfig, tokenizer: Any, grader: Grader) -> tuple[list[tuple[str, PromptRow]], int]:
        """Return (prompt_id, row) for each usable prompt, and how many are over the length limit.

        Everything that can be wrong with prompts is found here, before a run or a GPU is taken for them.
        """
        rows = self.rows(config)
        limit = config.data.train_max_samples if self.split == "train" else config.data.val_max_samples
        if limit >= 0:
            rows = rows[:limit]
        numbered = [(f"{self.split}-{position:07d}", row) for position, row in enumerate(rows)]
        kept = self._within_limit(config, tokenizer, numbered)
        batch_size = config.data.train_batch_size
        if not kept:
            raise DataError(f"{self._source(config)}: no {self.split} prompt is left")
        if self.split == "train" and len(kept) < batch_size:
            raise ConfigError(f"data.train_batch_size is {batch_size}, but the run has {len(kept)} training prompts")
        grader.check_prompts(row for _, row in kept)
        return kept, len(numbered) - len(kept)

    def _source(self, config: RunConfig) -> str:
        key = f"data.{self.split}_files"
        source = config.data.train_files if self.split == "train" else config.data.val_files
        if not source:
            raise ConfigError(
                f"{key} is not set: expected a file, an s3:// object, a dataset id or ratchet/word-problems?level=1"
            )
        return source

    def rows(self, config: RunConfig) -> Sequence[PromptRow]:
        """Read the source; DataError or ConfigError where that cannot be done."""
        data = config.data
        # Data sets call their held-out split test.
        split = "train" if self.split == "train" else "test"
        # Whether a row needs a ground truth is the grader's to say (`usable`).
        return self._load(
            self._source(config),
            split=split,
            data_source=data.data_source,
            prompt_key=data.prompt_key,
            needs_ground_truth=False,
        )

    def _within_limit(
        self, config: RunConfig, tokenizer: Any, numbered: list[tuple[str, PromptRow]]
    ) -> list[tuple[str, PromptRow]]:
        from ratchet.engines.model import chat_prompt_ids

        data = config.data
        lengths = [len(chat_prompt_ids(tokenizer, row.prompt)) for _, row in numbered]
        overlong = [index for index, length in enumerate(lengths) if length > data.max_prompt_length]
        if overlong and not data.filter_overlong_prompts:
            first = overlong[0]
            raise DataError(
                f"{self._source(config)}: {len(overlong)} of {len(numbered)} prompts are longer than "
                f"data.max_prompt_length={data.max_prompt_length} tokens; the first is row {first} with "
                f"{lengths[first]}. Raise the limit, or set data.filter_overlong_prompts=true to leave them out"
            )
        if overlong:
            logger.warning("%s: %d of %d prompts are over the limit", self.name, len(overlong), len(numbered))
        dropped = set(overlong)
        return [item for index, item in enumerate(numbered) if index not in dropped]


def _row_values(row: PromptRow) -> dict[str, Any]:
    return {
        "data_source": row.data_source,
        "prompt": [dict(message) for message in row.prompt],
        "ability": row.ability,
        "reward_model": dict(row.reward_model),
        "extra_info": json.dumps(row.extra_info, sort_keys=True, ensure_ascii=False),
    }
