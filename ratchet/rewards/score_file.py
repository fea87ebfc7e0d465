"""Scores a file of completions, one JSON object a line, without holding it in memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ratchet.data.json_lines import read_json_lines
from ratchet.errors import DataError
from ratchet.rewards.gsm8k import Gsm8kMode
from ratchet.rewards.registry import reward_for


def score_lines(
    path: str | Path, *, data_source: str = "openai/gsm8k", mode: Gsm8kMode = "default"
) -> Iterator[dict[str, Any]]:
    """Yields {"reward", "extracted", "is_parseable"} for each {"completion", "ground_truth"} line, in order.

    `extracted` is the canonical answer, or None. DataError names the file and the line; lines before it have been
    yielded by then.
    """
    reward = reward_for(data_source, gsm8k_mode=mode)
    for number, record in read_json_lines(path):
        where = f"{path}, line {number}"
        missing = [key for key in ("completion", "ground_truth") if key not in record]
        if missing:
            raise DataError(
                f"{where}: expected the keys completion and ground_truth, got {', '.join(record) or 'none'}"
            )
        completion = record["completion"]
        if not isinstance(completion, str):
            raise DataError(f"{where}: expected completion to be a text, got {type(completion).__name__}")
        try:
            result = reward(data_source, completion, record["ground_truth"], {})
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        yield {"reward": result.reward, "extracted": result.extracted, "is_parseable": result.is_parseable}
