"""The one entry point of everything that grades: rules, reward model, HTTP endpoint and custom rewards, together.

Each part grades every row; the reward is their weighted sum, and the breakdown keeps each part's own value under its
name. The trap: whatever can be wrong before a completion exists (a data source without a rule, a missing ground truth,
a file that cannot be loaded) is found by `open_grader` and `Grader.check`, before a GPU is taken.
"""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from ratchet.config import RunConfig
from ratchet.config.user_code import load_object
from ratchet.data.prompt_rows import PromptRow
from ratchet.errors import ConfigError, DataError, EngineError
from ratchet.rewards.custom import CustomReward, called, load_code
from ratchet.rewards.data_proto import DataProto, GradeRow, place_of
from ratchet.rewards.hooks import name_of
from ratchet.rewards.naive_manager import examine
from ratchet.rewards.parts import NO_GROUND_TRUTH, ModelPart, OpenModel, Part, RulePart
from ratchet.rewards.registry import Rule, registered_data_sources
from ratchet.rewards.results import RewardResult, failed_result, number
from ratchet.rewards.sandbox import SandboxedReward, Worker
from ratchet.rewards.shaping import Shaping

__all__ = ["DataProto", "GradeRow", "Grader", "RewardResult", "open_grader"]

PARTS = ("rule", "model", "api", "judge", "custom")
AGAIN = "submit again once the service answers"
"""What can be done where completions may not be left out, or all would be."""


class Grader:
    """Grades rows by everything that a config names. Made by `open_grader`; cheap until the first row is graded."""

    def __init__(
        self,
        parts: Mapping[str, tuple[float, Part]],
        *,
        shaping: Shaping | None = None,
        num_examine: int = 0,
        excludes: bool = False,
    ) -> None:
        """`excludes` marks the rows that a service cannot grade, where they would raise EngineError."""
        self._excludes = excludes
        self._parts = dict(parts)
        self._shaping = shaping
        self._num_examine = num_examine

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each part, by name."""
        return {name: weight for name, (weight, _) in self._parts.items()}

    def rule(self, data_source: str) -> Rule | None:
        """The rule that grades rows of this source, None where no rule does. DataError as `check`."""
        part = self._parts["rule"][1] if "rule" in self._parts else None
        return part.rule(data_source) if isinstance(part, RulePart) else None

    def needs_ground_truth(self, data_source: str) -> bool:
        """Whether rows of this source must have a ground truth: only rules compare with one. DataError as `check`."""
        rule = self.rule(data_source)
        return rule is not None and rule.needs_ground_truth

    def check(self, data_sources: Iterable[str]) -> None:
        """DataError for a data source that no rule knows, naming the nearest; sources matter to rules alone."""
        for data_source in sorted(set(data_sources)):
            self.rule(data_source)

    def check_prompts(self, rows: Iterable[PromptRow]) -> None:
        """DataError for the first row that could not be graded, naming its place and the fix.

        Refused are sources that no rule knows, and under a rule rows without a ground truth or with one that no
        completion could match.
        """
        rules: dict[str, Rule | None] = {}
        for row in rows:
            where, source = row.where or "a prompt", row.data_source
            if source not in rules:
                rules[source] = called(self.rule, source, name="rule", where=where)
            rule = rules[source]
            if rule is None:
                continue
            ground_truth = row.reward_model.get("ground_truth")
            if ground_truth is None and rule.needs_ground_truth:
                raise DataError(f"{where}: {NO_GROUND_TRUTH.format(source)}")
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

        `shaping=False` leaves out what is added for form and length, as for an evaluation, and excludes nothing:
        accuracies over different rows cannot be compared. Where rows are excluded, all may be: whether any is left is
        for the caller to see, who knows what else was graded.
        """
        if not rows:
            return []
        scored = {name: self._scored(name, part, rows) for name, (_, part) in self._parts.items()}
        results = []
        for index, row in enumerate(rows):
            shaped = self._shaping.of(row) if self._shaping is not None and shaping else {}
            results.append(self._combined(row, {name: column[index] for name, column in scored.items()}, shaped))
        if not (self._excludes and shaping):
            _refuse_failures(rows, results, may_exclude=shaping)
        if self._num_examine > 0:
            examine(rows, results, self._num_examine)
        return results

    def close(self) -> None:
        """Give back what the parts hold open."""
        for _, part in self._parts.values():
            close = getattr(part, "close", None)
            if close is not None:
                close()

    def _scored(self, name: str, part: Part, rows: Sequence[GradeRow]) -> list[RewardResult]:
        try:
            results = part.score(rows)
        except EngineError as error:
            if not self._excludes:
                raise
            results = [failed_result(str(error))] * len(rows)
        if len(results) != len(rows):
            raise DataError(f"{place_of(rows)}: expected {len(rows)} results of the {name} reward, got {len(results)}")
        return results

    def _combined(
        self, row: GradeRow, scored: Mapping[str, RewardResult], shaped: Mapping[str, tuple[float, float]]
    ) -> RewardResult:
        failures = [f"{name}: {result.error}" for name, result in scored.items() if result.is_failed]
        if failures:
            known = {name: result.reward for name, result in scored.items() if not result.is_failed}
            return failed_result("; ".join(failures), known)
        added = math.fsum(weight * value for weight, value in shaped.values())
        weighted = [self._parts[name][0] * result.reward for name, result in scored.items()]
        breakdown = {name: result.reward for name, result in scored.items()}
        breakdown |= {name: value for name, (_, value) in shaped.items()}
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
            number(math.fsum([*weighted, added]), row.place),
            breakdown,
            extracted=next((result.extracted for result in scored.values() if result.extracted is not None), None),
            is_parseable=all(result.is_parseable for result in scored.values()),
            error="; ".join(errors) or None,
            token_rewards=self._token_rewards(row, scored, added),
        )

    def _token_rewards(self, row: GradeRow, scored: Mapping[str, RewardResult], shaped: float) -> list[float] | None:
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
        if total:
            total[-1] += shaped
        return total


def _refuse_failures(rows: Sequence[GradeRow], results: Sequence[RewardResult], *, may_exclude: bool) -> None:
    """EngineError for rows that no service graded; `may_exclude` where the config could leave them out."""
    failed = [(row, result) for row, result in zip(rows, results, strict=True) if result.is_failed]
    if failed:
        row, result = failed[0]
        advice = "reward_model.on_failure=exclude trains on the others" if may_exclude else AGAIN
        raise ungraded_error(len(failed), len(rows), f"{row.place}: {result.error}", advice)


def ungraded_error(num_failed: int, num_rows: int, first: str, advice: str = AGAIN) -> EngineError:
    """The error of completions without a reward; `first` is the place of one, and what was said there."""
    return EngineError(f"{num_failed} of {num_rows} completions could not be graded; {first}; {advice}")


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
    parts = _Opening(config, open_model, custom, entries)
    opened = {name: (weights[name], parts.part(name)) for name in PARTS if name in weights}
    return Grader(
        opened,
        shaping=Shaping(config),
        num_examine=config.reward_model.num_examine,
        excludes=config.reward_model.on_failure == "exclude",
    )


class _Opening:
    """Opens the parts of one grader; those that run a user's code share a process."""

    def __init__(
        self, config: RunConfig, open_model: OpenModel | None, live: Any, entries: Sequence[Mapping[str, str]]
    ) -> None:
        self._config, self._open_model, self._live, self._entries = config, open_model, live, entries
        self._excludes = config.reward_model.on_failure == "exclude"

    def part(self, name: str) -> Part:
        """The reward called `name`."""
        reward = self._config.reward_model
        if name == "rule":
            # A rule that the config names for every row takes the place of registered ones.
            has_code = bool(self._entries and registered_data_sources() and not reward.rule)
            worker = self._worker if has_code else None
            return RulePart(reward.gsm8k_mode, worker, rule=reward.rule, excludes=self._excludes)
        if name == "model":
            return ModelPart(reward.path, self._open_model)
        if name == "api":
            from ratchet.rewards.http import HttpReward

            return HttpReward(reward)
        if name == "judge":
            from ratchet.rewards.judge import JudgePart

            return JudgePart(reward)
        return self._custom()

    def _custom(self) -> Part:
        custom = self._config.custom_reward_function
        if self._live is not None:
            # An object may keep what it has seen, and there is no fresh one to ask in its place.
            has_fresh = inspect.isfunction(self._live) or inspect.isclass(self._live)
            return CustomReward(self._live, excludes=self._excludes, checks_order=has_fresh)
        if not custom.path:
            raise ConfigError("reward_model.type is custom, but custom_reward_function.path is not set: name a file")
        if self._worker is not None:
            return SandboxedReward(self._worker)
        found = load_object(self._entries, custom.path, custom.name)
        return CustomReward(found, custom.reward_kwargs, excludes=self._excludes, checks_order=True)

    @cached_property
    def _worker(self) -> Worker | None:
        """The process that grades, None where the config wants none."""
        custom = self._config.custom_reward_function
        if not custom.sandbox:
            return None
        is_custom = self._live is None and "custom" in self._config.reward_weights
        return Worker(custom, self._entries, custom=is_custom, excludes=self._excludes)
