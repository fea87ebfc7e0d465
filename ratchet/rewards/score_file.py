"""Grades a file of completions, one JSON object a line, by whatever a config names, without holding it in memory."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ratchet.config import RunConfig
from ratchet.data.conversations import prompt_messages
from ratchet.data.json_lines import read_json_lines
from ratchet.data.prompt_rows import GSM8K
from ratchet.errors import DataError, NumericsError
from ratchet.rewards.data_proto import GradeRow
from ratchet.rewards.graders import Grader, open_grader
from ratchet.rewards.model_files import open_reward_model
from ratchet.rewards.results import RewardResult
from ratchet.rewards.shaping import is_penalised_by_length

_ROWS_AT_ONCE = 512
_READ_THE_PROMPT = frozenset({"model", "judge"})


def score_lines(
    path: str | Path, config: RunConfig | None = None, *, data_source: str = ""
) -> Iterator[dict[str, Any]]:
    """Yields {"reward", "extracted", "is_parseable"} for each {"completion", ...} line, in order.

    A line has what the reward reads: ground_truth, prompt (text or messages), data_source, extra_info; `data_source`
    takes the place of the lines' own. Several parts of a reward stand in "reward_breakdown", and what a grader said in
    "error"; a completion that a service could not grade has the reward None (reward_model.on_failure=exclude).
    DataError, NumericsError and EngineError name the file and the line; where rules alone grade, the lines before it
    have been yielded by then.
    """
    config = config or RunConfig()
    # What is printed would stand between the results.
    quiet = config.model_copy(update={"reward_model": config.reward_model.model_copy(update={"num_examine": 0})})
    grader = open_grader(quiet, open_model=open_reward_model(quiet))
    try:
        if data_source:
            grader.check([data_source])
        rows = _rows(path, _Reader(quiet, grader, data_source))
        while batch := _taken(rows):
            found, error = batch
            yield from map(_line, _graded(grader, found))
            if error is not None:
                raise error
    finally:
        grader.close()


def _taken(rows: Iterator[GradeRow]) -> tuple[list[GradeRow], Exception | None] | None:
    """The next rows, and what kept the one after them from being read; None at the end."""
    taken: list[GradeRow] = []
    try:
        for row in islice(rows, _ROWS_AT_ONCE):
            taken.append(row)
    except DataError as error:
        return taken, error
    return (taken, None) if taken else None


def _graded(grader: Grader, rows: list[GradeRow]) -> Iterator[RewardResult]:
    try:
        yield from grader.grade(rows)
    except (DataError, NumericsError):
        if set(grader.weights) != {"rule"}:
            raise
        for row in rows:
            yield from grader.grade([row])


def _line(result: RewardResult) -> dict[str, Any]:
    line: dict[str, Any] = {
        "reward": None if result.is_failed else result.reward,
        "extracted": result.extracted,
        "is_parseable": result.is_parseable,
    }
    if len(result.breakdown) > 1:
        line["reward_breakdown"] = result.breakdown
    if result.error is not None:
        line["error"] = result.error
    return line


def _rows(path: str | Path, reader: "_Reader") -> Iterator[GradeRow]:
    for number, record in read_json_lines(path):
        yield reader.row(record, f"{path}, line {number}")


class _Reader:
    """Reads lines as rows that can be graded."""

    def __init__(self, config: RunConfig, grader: Grader, data_source: str) -> None:
        self._config, self._grader, self._source = config, grader, data_source
        self._reads_prompt = not _READ_THE_PROMPT.isdisjoint(grader.weights)
        self._counts = is_penalised_by_length(config)
        self._tokenize = _tokenizer(config) if self._counts or "custom" in grader.weights else None

    def row(self, record: dict[str, Any], where: str) -> GradeRow:
        """The row of a line; DataError for one that lacks what the reward reads."""
        source = self._source or str(record.get("data_source") or self._config.data.data_source or GSM8K)
        try:
            wants_truth = self._grader.needs_ground_truth(source)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        wanted = {"completion": True, "ground_truth": wants_truth, "prompt": self._reads_prompt}
        if any(is_wanted and key not in record for key, is_wanted in wanted.items()):
            keys = " and ".join(key for key, is_wanted in wanted.items() if is_wanted)
            raise DataError(f"{where}: expected the keys {keys}, got {', '.join(record) or 'none'}")
        completion, extra = record["completion"], record.get("extra_info") or {}
        if not isinstance(completion, str):
            raise DataError(f"{where}: expected completion to be a text, got {type(completion).__name__}")
        if not isinstance(extra, dict):
            raise DataError(f"{where}: expected extra_info to be an object, got {type(extra).__name__}")
        return GradeRow(
            where=where,
            data_source=source,
            prompt=prompt_messages(record["prompt"], f"{where}, prompt") if record.get("prompt") is not None else (),
            completion=completion,
            ground_truth=_ground_truth(record.get("ground_truth")),
            extra_info=extra,
            completion_token_ids=self._token_ids(record, completion, where),
            finish_reason=str(record.get("finish_reason") or "stop"),
        )

    def _token_ids(self, record: dict[str, Any], completion: str, where: str) -> list[int]:
        given = record.get("completion_token_ids")
        if given is not None:
            if not isinstance(given, list) or not all(isinstance(one, int) for one in given):
                raise DataError(f"{where}: expected completion_token_ids to be a list of whole numbers")
            return given
        if self._tokenize is not None:
            return self._tokenize(completion)
        if self._counts:
            raise DataError(
                f"{where}: the reward has a penalty on length: expected the key completion_token_ids, or a tokenizer "
                "under actor_rollout_ref.model.path"
            )
        return []


def _tokenizer(config: RunConfig) -> Callable[[str], list[int]] | None:
    """How the policy's tokenizer splits a completion; None where the config names no policy."""
    path = config.actor_rollout_ref.model.path
    if not path:
        return None
    from ratchet.engines.model import load_tokenizer
    from ratchet.engines.model_source import resolve_tokenizer_folder

    tokenizer = load_tokenizer(resolve_tokenizer_folder(path))
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _ground_truth(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
