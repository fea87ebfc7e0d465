"""The one entry point of everything that grades: rules, reward model, HTTP endpoint and custom rewards, together.

Each part grades every row; the reward is their weighted sum, and the breakdown keeps each part's own value under its
name. The trap: whatever can be wrong before a completion exists (a data source without a rule, a missing ground truth,
a file that cannot be loaded) is found by `open_grader` and `Grader.check`, before a GPU is taken.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from ratchet.algorithms.shaping import overlong_penalty
from ratchet.config import RunConfig
from ratchet.data.prompt_rows import PromptRow
from ratchet.errors import ConfigError, DataError
from ratchet.rewards.custom import CustomReward, called, load_code, open_custom
from ratchet.rewards.data_proto import DataProto, GradeRow
from ratchet.rewards.hooks import keyword_call, name_of
from ratchet.rewards.naive_manager import examine
from ratchet.rewards.registry import Rule, rule_for
from ratchet.rewards.results import RewardResult, as_result, number

__all__ = ["DataProto", "GradeRow", "Grader", "RewardResult", "open_grader"]

PARTS = ("rule", "model", "api", "custom")
OVERLONG = "overlong"

OpenModel = Callable[[str], Any]
"""Opens a reward model: an object whose `chat_scores(conversations)` gives one float per list of messages."""


class Part(Protocol):
    """One kind of reward."""

    def score(self, rows: Sequence[GradeRow]) -> list[RewardResult]: ...


class RulePart:
    """The rule of each row's data source."""

    def __init__(self, gsm8k_mode: Any) -> None:
        self._mode = gsm8k_mode

    def rule(self, data_source: str) -> Rule:
        """The rule; DataError names the nearest where there is none."""
        return rule_for(data_source, gsm8k_mode=self._mode)

    def score(self, rows: Sequence[GradeRow]) -> list[RewardResult]:
        calls: dict[str, tuple[Rule, Callable[..., Any]]] = {}
        results = []
        for row in rows:
            if row.data_source not in calls:
                rule = called(self.rule, row.data_source, name="rule", where=row.place)
                calls[row.data_source] = (rule, keyword_call(rule.function))
            rule, call = calls[row.data_source]
            if rule.needs_ground_truth and row.ground_truth is None:
                raise DataError(f"{row.place}: {_NO_GROUND_TRUTH.format(row.data_source)}")
            arguments = (row.data_source, row.completion, row.ground_truth, dict(row.extra_info))
            value = called(call, *arguments, name=name_of(rule.function), where=row.place)
            results.append(as_result(value, f"{row.place}: the reward {name_of(rule.function)}"))
        return results


class ModelPart:
    """A reward model, opened when the first row is graded."""

    def __init__(self, path: str, open_model: OpenModel | None) -> None:
        if not path:
            raise ConfigError("reward_model.path is not set: the reward type model needs a hub id or a folder")
        self._path, self._open_model = path, open_model
        self._model: Any = None

    def score(self, rows: Sequence[GradeRow]) -> list[RewardResult]:
        if self._model is None:
            if self._open_model is None:
                raise ConfigError(f"{self._path}: nothing was given that opens a reward model")
            self._model = self._open_model(self._path)
        conversations = [[*map(dict, row.prompt), {"role": "assistant", "content": row.completion}] for row in rows]
        scores = self._model.chat_scores(conversations)
        if len(scores) != len(rows):
            raise DataError(f"{self._path}: expected {len(rows)} scores, got {len(scores)}")
        return [
            RewardResult(number(score, f"{row.place}: the reward model {self._path}"))
            for row, score in zip(rows, scores, strict=True)
        ]


_NO_GROUND_TRUTH = (
    "no ground truth, which the rule reward of data_source {!r} compares a completion with. Add a column answer or "
    "ground_truth; or grade without one, by reward_model.type=model, api or custom; demonstrations and preferences "
    "(response, chosen, rejected) are for offline objectives"
)


class Grader:
    """Grades rows by everything that a config names. Made by `open_grader`; cheap until the first row is graded."""

    def __init__(
        self,
        parts: Mapping[str, tuple[float, Part]],
        *,
        overlong: Callable[[int], float] | None = None,
        num_examine: int = 0,
    ) -> None:
        self._parts = dict(parts)
        self._overlong = overlong
        self._num_examine = num_examine

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each part, by name."""
        return {name: weight for name, (weight, _) in self._parts.items()}

    def _rule(self, data_source: str) -> Rule | None:
        part = self._parts["rule"][1] if "rule" in self._parts else None
        return part.rule(data_source) if isinstance(part, RulePart) else None

    def needs_ground_truth(self, data_source: str) -> bool:
        """Whether rows of this source must have a ground truth: only rules compare with one. DataError as `check`."""
        rule = self._rule(data_source)
        return rule is not None and rule.needs_ground_truth

    def check(self, data_sources: Iterable[str]) -> None:
        """DataError for a data source that no rule knows, naming the nearest; sources matter to rules alone."""
        for data_source in sorted(set(data_sources)):
            self._rule(data_source)

    def check_prompts(self, rows: Iterable[PromptRow]) -> None:
        """DataError for the first row that could not be graded, naming its place and the fix.

        Refused are sources that no rule knows, and under a rule rows without a ground truth or with one that no
        completion could match.
        """
        rules: dict[str, Rule | None] = {}
        for row in rows:
            where, source = row.where or "a prompt", row.data_source
            if source not in rules:
                rules[source] = called(self._rule, source, name="rule", where=where)
            rule = rules[source]
            if rule is None:
                continue
            ground_truth = row.reward_model.get("ground_truth")
            if ground_truth is None and rule.needs_ground_truth:
                raise DataError(f"{where}: {_NO_GROUND_TRUTH.format(source)}")
            if ground_truth is not None and rule.check_ground_truth is not None:
                try:
                    called(rule.check_ground_truth, ground_truth, name=name_of(rule.function), where=where)
                except DataError as error:
                    raise DataError(
                        f"{error}; the rule reward of data_source {source!r} compares with it: give the answer itself "
                        "in a column answer or ground_truth"
                    ) from error

    def grade(self, rows: Sequence[GradeRow], *, shaping: bool = True) -> list[RewardResult]:
        """One result per row, in the rows' order. DataError, NumericsError or EngineError name the row.

        `shaping=False` leaves the overlong penalty out, as for an evaluation.
        """
        if not rows:
            return []
        scored = {name: part.score(rows) for name, (_, part) in self._parts.items()}
        results = []
        for index, row in enumerate(rows):
            penalty = self._overlong(len(row.completion_token_ids)) if self._overlong and shaping else None
            results.append(self._combined(row, {name: column[index] for name, column in scored.items()}, penalty))
        if self._num_examine > 0:
            examine(rows, results, self._num_examine)
        return results

    def close(self) -> None:
        """Give back what the parts hold open."""
        for _, part in self._parts.values():
            close = getattr(part, "close", None)
            if close is not None:
                close()

    def _combined(self, row: GradeRow, scored: Mapping[str, RewardResult], penalty: float | None) -> RewardResult:
        weighted = [self._parts[name][0] * result.reward for name, result in scored.items()]
        breakdown = {name: result.reward for name, result in scored.items()}
        if penalty is not None:
            weighted.append(penalty)
            breakdown[OVERLONG] = penalty
        for name, result in scored.items():
            for key, value in result.breakdown.items():
                if key in breakdown:
                    raise DataError(
                        f"{row.place}: the {name} reward returned {key!r}, which another part of the reward is called; "
                        "rename it"
                    )
                breakdown[key] = number(value, f"{row.place}: the {name} reward, {key}")
        errors = [result.error for result in scored.values() if result.error is not None]
        return RewardResult(
            number(math.fsum(weighted), row.place),
            breakdown,
            extracted=next((result.extracted for result in scored.values() if result.extracted is not None), None),
            is_parseable=all(result.is_parseable for result in scored.values()),
            error="; ".join(errors) or None,
            token_rewards=self._token_rewards(row, scored, penalty),
        )

    def _token_rewards(
        self, row: GradeRow, scored: Mapping[str, RewardResult], penalty: float | None
    ) -> list[float] | None:
        """The weighted sum by token, None where no part rewards tokens; other parts reward the last one."""
        if all(result.token_rewards is None for result in scored.values()):
            return None
        total = [0.0] * len(row.completion_token_ids)
        for name, result in scored.items():
            weight = self._parts[name][0]
            if result.token_rewards is not None:
                if len(result.token_rewards) != len(total):
                    raise DataError(
                        f"{row.place}: the {name} reward has {len(result.token_rewards)} token rewards, the completion "
                        f"{len(total)} tokens"
                    )
                total = [sum_ + weight * own for sum_, own in zip(total, result.token_rewards, strict=True)]
            elif total:
                total[-1] += weight * result.reward
        if total and penalty is not None:
            total[-1] += penalty
        return total


def _overlong(config: RunConfig) -> Callable[[int], float] | None:
    buffer, longest = config.reward_model.overlong_buffer, config.data.max_response_length
    if not buffer.enable:
        return None
    return lambda length: overlong_penalty(
        length, max_tokens=longest, buffer_tokens=buffer.len, penalty_factor=buffer.penalty_factor
    )


def open_grader(config: RunConfig, *, open_model: OpenModel | None = None, custom: Any = None) -> Grader:
    """The grader of a config. Loads the Python files that it names; a reward model is opened with the first row.

    `custom` is a reward that exists already (a function or object). It takes the place of custom_reward_function where
    the weights name it, else of everything.
    ConfigError where something named is missing: a file, a URL, the environment variable of a secret.
    """
    entries = load_code(config)
    weights: dict[str, float] = dict(config.reward_weights)
    if custom is not None and "custom" not in weights:
        weights = {"custom": 1.0}
    opened = {
        name: (weights[name], _open_part(name, config, open_model, custom, entries))
        for name in PARTS
        if name in weights
    }
    return Grader(opened, overlong=_overlong(config), num_examine=config.reward_model.num_examine)


def _open_part(
    name: str, config: RunConfig, open_model: OpenModel | None, custom: Any, entries: Sequence[Mapping[str, str]]
) -> Part:
    if name == "rule":
        return RulePart(config.reward_model.gsm8k_mode)
    if name == "model":
        return ModelPart(config.reward_model.path, open_model)
    if name == "api":
        from ratchet.rewards.http import HttpReward

        return HttpReward(config.reward_model)
    return open_custom(config, entries) if custom is None else CustomReward(custom)
