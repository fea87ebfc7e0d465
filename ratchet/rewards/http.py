"""A reward behind an HTTP endpoint: rows go out in batches over several connections, numbers come back.

Request: `POST {"rows": [{"prompt", "completion", "ground_truth", "data_source", "extra_info"}, ...]}`; response:
`{"rewards": [1.0, ...]}`, one finite number per row, in the rows' order. `ratchet.rewards.endpoint` has the limits.
"""

import json
from collections.abc import Sequence

from ratchet.config.rewards import RewardModelConfig
from ratchet.errors import DataError, EngineError
from ratchet.rewards.data_proto import GradeRow, place_of
from ratchet.rewards.endpoint import Endpoint, Question
from ratchet.rewards.results import RewardResult, failed_result, number


class HttpReward:
    """The reward of `reward_model.url`; safe to call again, and to close once it is not needed."""

    def __init__(self, config: RewardModelConfig) -> None:
        self._endpoint = Endpoint(config.url, config, key="reward_model.url")
        self._batch_size, self._excludes = config.batch_size, config.on_failure == "exclude"

    def score(self, rows: Sequence[GradeRow]) -> list[RewardResult]:
        """One result per row, in order. EngineError where the endpoint fails, DataError where its answer is unusable;
        both name the URL and the rows. With reward_model.on_failure=exclude the rows of a request that failed are
        marked instead."""
        batches = [rows[start : start + self._batch_size] for start in range(0, len(rows), self._batch_size)]
        answers = self._endpoint.ask([self._question(batch) for batch in batches], excludes=self._excludes)
        return [
            result
            for batch, answer in zip(batches, answers, strict=True)
            for result in ([failed_result(str(answer))] * len(batch) if isinstance(answer, EngineError) else answer)
        ]

    def close(self) -> None:
        """Give the connections back."""
        self._endpoint.close()

    def _question(self, rows: Sequence[GradeRow]) -> Question[list[RewardResult]]:
        url, where = self._endpoint.shown_url, place_of(rows)
        return Question(
            body=lambda: _request_body(rows, f"{url}, {where}"),
            read=lambda content: _rewards(content, rows, url),
            where=where,
        )


def _request_body(rows: Sequence[GradeRow], where: str) -> bytes:
    payload = [
        {
            "prompt": [dict(message) for message in row.prompt],
            "completion": row.completion,
            "ground_truth": row.ground_truth,
            "data_source": row.data_source,
            "extra_info": dict(row.extra_info),
        }
        for row in rows
    ]
    try:
        return json.dumps({"rows": payload}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: cannot be written as JSON ({error})") from error


def _rewards(content: bytes, rows: Sequence[GradeRow], url: str) -> list[RewardResult]:
    where, excerpt = f"{url}, {place_of(rows)}", content[:80].decode("utf-8", "replace")
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: expected JSON with the key rewards, got {excerpt!r}") from error
    values = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(values, list):
        raise DataError(f'{where}: expected {{"rewards": [...]}}, got {excerpt!r}')
    if len(values) != len(rows):
        raise DataError(f"{where}: expected {len(rows)} rewards, got {len(values)}")
    for row, value in zip(rows, values, strict=True):
        if isinstance(value, bool):
            raise DataError(f"{row.place}: expected a number from {where}, got {json.dumps(value)}")
    return [RewardResult(number(value, f"{row.place}: {url}")) for row, value in zip(rows, values, strict=True)]
