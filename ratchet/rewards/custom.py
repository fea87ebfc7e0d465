"""Rewards of the user's own: verl's hook for one completion, or anything that is called with a DataProto.

The trap: a user's code may raise anything and return anything. What it raises becomes a DataError that names the rows
and the function, with the cause chained; what it returns is checked entry by entry (`ratchet.rewards.results`). Where
it asks a service that fails, it raises EngineError, which says nothing about the completion.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ratchet.config import RunConfig
from ratchet.config.user_code import load_all, read_code
from ratchet.errors import ConfigError, DataError, EngineError, NumericsError
from ratchet.rewards.data_proto import DataProto, GradeRow, place_of
from ratchet.rewards.hooks import keyword_call, kind_of, name_of
from ratchet.rewards.results import (
    RewardResult,
    as_result,
    failed_result,
    is_sequence,
    number,
    to_list,
    token_result,
)


def load_code(config: RunConfig) -> list[dict[str, str]]:
    """Execute the Python files that the config names, so that what they register exists; return them with their texts.

    The file of custom_reward_function.path is among them.
    """
    entries = [entry.model_dump() if entry.source else read_code(entry.path) for entry in config.code if entry.path]
    path = config.custom_reward_function.path
    if path and path not in {entry["path"] for entry in entries}:
        entries.append(read_code(path))
    load_all({"code": entries})
    return entries


def called(function: Callable[..., Any], *arguments: Any, name: str, where: str) -> Any:
    """Call a user's function; what it raises becomes a DataError that names it and `where`."""
    try:
        return function(*arguments)
    except (DataError, NumericsError, EngineError) as error:
        raise type(error)(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise DataError(f"{where}: the reward {name} raised {type(error).__name__}: {error}") from error


def graded(call: Callable[..., Any], row: GradeRow, *, name: str, excludes: bool = False) -> RewardResult:
    """What a user's hook says of one completion; with `excludes`, its EngineError marks the row and is not raised."""
    arguments = (row.data_source, row.completion, row.ground_truth, dict(row.extra_info))
    try:
        value = called(call, *arguments, name=name, where=row.place)
    except EngineError as error:
        if not excludes:
            raise
        return failed_result(str(error))
    return as_result(value, f"{row.place}: the reward {name}")


class CustomReward:
    """A function, class or object as reward; a class is instantiated with `kwargs`, others are called with them."""

    def __init__(
        self,
        reward: Any,
        kwargs: Mapping[str, Any] | None = None,
        *,
        excludes: bool = False,
        checks_order: bool = False,
    ) -> None:
        """`excludes` marks the rows of a hook that raises EngineError; what grades a batch fails as a whole.

        `checks_order` has the first batch tell whether its rewards are in the rows' order.
        """
        self._excludes = excludes
        kwargs = dict(kwargs or {})
        # Made with the first batch: a class may load a model, which should not be held twice for longer.
        self._fresh = partial(CustomReward, reward, kwargs) if checks_order else None
        self.name = name_of(reward)
        if inspect.isclass(reward):
            reward, kwargs = _instance(reward, kwargs), {}
        if not callable(reward):
            raise ConfigError(f"reward {self.name}: expected a function or an object with __call__, got {reward!r:.80}")
        self.kind = kind_of(reward)
        self._call = keyword_call(reward, **kwargs) if self.kind == "hook" else _batch_call(reward, kwargs)

    def score(self, rows: Sequence[GradeRow]) -> list[RewardResult]:
        """One result per row, in order."""
        if self.kind == "batch":
            results = self._score_batch(rows)
            if self._fresh is not None:
                from ratchet.rewards.order_check import check_order

                check_order(self._fresh(), rows, results)
                self._fresh = None
            return results
        return [graded(self._call, row, name=self.name, excludes=self._excludes) for row in rows]

    def _score_batch(self, rows: Sequence[GradeRow]) -> list[RewardResult]:
        data = DataProto(rows)
        where = place_of(rows)
        returned = called(self._call, data, name=self.name, where=where)
        place = f"{where}: the reward {self.name}"
        columns: dict[str, list[Any]] = {}
        if isinstance(returned, Mapping):
            returned, columns = _of_manager(returned, len(rows), place)
        if not is_sequence(returned):
            raise DataError(f"{place}: expected one reward per row, got {type(returned).__name__} {returned!r:.80}")
        values = to_list(returned)
        _check_length(values, len(rows), place)
        results = [
            _entry(value, row, data.completion_width, f"{row.place}: the reward {self.name}")
            for row, value in zip(rows, values, strict=True)
        ]
        for key, column in columns.items():
            for row, result, value in zip(rows, results, column, strict=True):
                if isinstance(value, int | float):
                    result.breakdown[key] = number(value, f"{row.place}: the reward {self.name}, {key}")
        return results


def _instance(reward: type, kwargs: Mapping[str, Any]) -> Any:
    try:
        return reward(**kwargs)
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(
            f"reward {reward.__qualname__}: cannot be made with custom_reward_function.reward_kwargs "
            f"({', '.join(kwargs) or 'none'}): {type(error).__name__}: {error}"
        ) from error


def _batch_call(reward: Callable[..., Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    try:
        inspect.signature(reward).bind(None, **kwargs)
    except TypeError as error:
        raise ConfigError(f"reward {name_of(reward)}: custom_reward_function.reward_kwargs: {error}") from error
    return lambda data: reward(data, **kwargs)


def _check_length(values: Sequence[Any], expected: int, place: str) -> None:
    if len(values) != expected:
        raise DataError(f"{place}: expected one reward per row ({expected}), got {len(values)}")


def _entry(value: Any, row: GradeRow, width: int, where: str) -> RewardResult:
    if is_sequence(value):
        return token_result(to_list(value), len(row.completion_token_ids), width, where)
    return as_result(value, where)


def _of_manager(returned: Mapping[str, Any], num_rows: int, place: str) -> tuple[Any, dict[str, list[Any]]]:
    """What verl's reward managers return: the rewards, and further columns of the breakdown."""
    if "reward_tensor" not in returned:
        keys = ", ".join(map(str, returned)) or "none"
        raise DataError(f"{place}: expected one reward per row, or a dict with reward_tensor, got the keys {keys}")
    columns = {str(key): to_list(column) for key, column in (returned.get("reward_extra_info") or {}).items()}
    for key, column in columns.items():
        _check_length(column, num_rows, f"{place}, {key}")
    return returned["reward_tensor"], columns
