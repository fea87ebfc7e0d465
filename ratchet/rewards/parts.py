"""The kinds of reward that are computed here: the rules of data sources, and a reward model."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ratchet.config.rewards import RuleName
from ratchet.errors import ConfigError, DataError
from ratchet.rewards.custom import called, graded
from ratchet.rewards.data_proto import GradeRow
from ratchet.rewards.hooks import keyword_call, name_of
from ratchet.rewards.registry import Rule, rule_for
from ratchet.rewards.results import RewardResult, number
from ratchet.rewards.sandbox import Worker

OpenModel = Callable[[str], Any]
"""Opens a reward model: an object whose `chat_scores(conversations)` gives one float per list of messages."""

NO_GROUND_TRUTH = (
    "no ground truth, which the rule reward of data_source {!r} compares a completion with. Add a column answer or "
    "ground_truth; or grade without one, by reward_model.type=model, api or custom; demonstrations and preferences "
    "(response, chosen, rejected) are for offline objectives"
)


class Part(Protocol):
    """One kind of reward."""

    def score(self, rows: Sequence[GradeRow]) -> list[RewardResult]: ...


class RulePart:
    """The rule of each row's data source; rules that came as Python files grade in `worker`, where there is one."""

    def __init__(
        self, gsm8k_mode: Any, worker: Worker | None = None, *, rule: RuleName = "", excludes: bool = False
    ) -> None:
        """`rule` grades every row where it is given; `excludes` marks the rows of a rule that raises EngineError."""
        self._mode, self._worker, self._name, self._excludes = gsm8k_mode, worker, rule, excludes
        self._calls: dict[str, tuple[Rule, Callable[..., Any]]] = {}

    def rule(self, data_source: str) -> Rule:
        """The rule; DataError names the nearest where there is none."""
        return rule_for(data_source, gsm8k_mode=self._mode, rule=self._name)

    def score(self, rows: Sequence[GradeRow]) -> list[RewardResult]:
        """One result per row, in order."""
        of_worker = self._worker.data_sources if self._worker else frozenset()
        outside = [index for index, row in enumerate(rows) if row.data_source in of_worker]
        here = [index for index, row in enumerate(rows) if row.data_source not in of_worker]
        found = dict(zip(here, self._score_here([rows[index] for index in here]), strict=True))
        if outside and self._worker is not None:
            graded = self._worker.score([rows[index] for index in outside], by="rule")
            found |= dict(zip(outside, graded, strict=True))
        return [found[index] for index in range(len(rows))]

    def close(self) -> None:
        """Stop the worker."""
        if self._worker is not None:
            self._worker.close()

    def _score_here(self, rows: Sequence[GradeRow]) -> list[RewardResult]:
        found: dict[int, RewardResult] = {}
        together: dict[Callable[..., list[RewardResult]], list[int]] = {}
        for index, row in enumerate(rows):
            if row.data_source not in self._calls:
                rule = called(self.rule, row.data_source, name="rule", where=row.place)
                self._calls[row.data_source] = (rule, keyword_call(rule.function))
            rule, call = self._calls[row.data_source]
            if rule.needs_ground_truth and row.ground_truth is None:
                raise DataError(f"{row.place}: {NO_GROUND_TRUTH.format(row.data_source)}")
            if rule.grade_rows is not None:
                together.setdefault(rule.grade_rows, []).append(index)
            else:
                found[index] = graded(call, row, name=name_of(rule.function), excludes=self._excludes)
        for grade_rows, places in together.items():
            found |= zip(places, grade_rows([rows[index] for index in places]), strict=True)
        return [found[index] for index in range(len(rows))]


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
