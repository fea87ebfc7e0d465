"""Whether a reward knows its own reference answers: each data source's are graded, and obviously wrong ones as well.

A reward that gives 0 to what is right teaches nothing, and a run shows it after hours. Trap: how a reference answer
has to be phrased is known for rules that say so (`Rule.reference_answer`); for other rewards several phrasings are
tried, and only one that gives nothing but 0 to every one of them, and to wrong answers as well, is refused.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratchet.config import RunConfig
from ratchet.data.prompt_rows import PromptRow
from ratchet.errors import ConfigError, DataError, EngineError, NumericsError
from ratchet.grains.checks.finding import Finding, Level
from ratchet.rewards.data_proto import GradeRow
from ratchet.rewards.graders import PARTS, Grader, RewardResult, open_grader
from ratchet.rewards.model_files import open_reward_model
from ratchet.rewards.results import failed_result

MOST, FEW = 64, 4
"""Rows of one data source that are graded; few where each takes a model."""
TIMEOUT_S, JUDGE_TIMEOUT_S = 5.0, 30.0
"""For one answer of an endpoint, and of a judge, which has to write it."""
_SMALL_BYTES = 2**30
"""Weights of a reward model that may be loaded for this, on the CPU."""

Phrase = Callable[[str], str]

_PHRASES: tuple[Phrase, ...] = (
    "{}".format,
    "#### {}".format,
    "The answer is {}.".format,
    r"\boxed{{{}}}".format,
    "<answer>{}</answer>".format,
)
_WRONG_TEXT = "I do not know."
_ENOUGH = 0.5


def spread(sources: Sequence[str], most: int = MOST) -> list[int]:
    """Positions of up to `most` rows of each data source, evenly spread, in order."""
    of_source: dict[str, list[int]] = {}
    for position, source in enumerate(sources):
        of_source.setdefault(source, []).append(position)
    picked = [
        places[index * len(places) // min(most, len(places))]
        for places in of_source.values()
        for index in range(min(most, len(places)))
    ]
    return sorted(picked)


def reward_findings(config: RunConfig, rows: Sequence[PromptRow], tokenizer: Any) -> Iterator[Finding]:
    """Grade reference answers of `rows` by each part of the reward; `tokenizer` may be None.

    A reward model is loaded where it is small and a folder here.
    """
    for kind in [kind for kind in PARTS if kind in config.reward_weights]:
        if kind == "model" and not _is_small_and_here(config.reward_model.path):
            yield Finding("reward", "unknown", "the reward model is not loaded here, so that nothing was graded by it")
            continue
        most = FEW if kind in ("model", "judge") else MOST
        chosen = [rows[position] for position in spread([row.data_source for row in rows], most)]
        alone = _alone(config, kind)
        try:
            grader = open_grader(alone, open_model=open_reward_model(alone, "cpu"))
        except (ConfigError, DataError) as error:
            yield Finding("reward", "error", str(error))
            continue
        try:
            for source in dict.fromkeys(row.data_source for row in chosen):
                own = [row for row in chosen if row.data_source == source]
                reward = _Reward(kind, source, grader, tokenizer)
                yield _judged(reward, config, own)
                yield from _outside(reward, config)
        except (DataError, NumericsError) as error:
            yield Finding("reward", "error", str(error))
        except EngineError as error:
            yield _unreachable(error)
        finally:
            grader.close()


@dataclass(frozen=True)
class _Reward:
    kind: str
    source: str
    grader: Grader
    tokenizer: Any
    given: list[float] = field(default_factory=list)
    """Every reward that it gave here."""
    refused: list[str] = field(default_factory=list)
    """What was said of each row that a service did not grade."""

    @property
    def name(self) -> str:
        return f"the {self.kind} reward of data_source {self.source!r}"

    def grade(self, rows: Sequence[PromptRow], completions: Sequence[str]) -> list[RewardResult]:
        graded = []
        for row, completion in zip(rows, completions, strict=True):
            ids = self.tokenizer(completion, add_special_tokens=False)["input_ids"] if self.tokenizer else [0]
            graded.append(
                GradeRow(
                    where=row.where or "a prompt",
                    data_source=row.data_source,
                    prompt=row.prompt,
                    ground_truth=row.reward_model.get("ground_truth"),
                    extra_info=row.extra_info,
                    completion=completion,
                    prompt_token_ids=ids[:1],
                    completion_token_ids=ids,
                )
            )
        results = self._results(graded)
        self.given.extend(result.reward for result in results if not result.is_failed)
        self.refused.extend(f"{row.place}: {it.error}" for row, it in zip(graded, results, strict=True) if it.is_failed)
        return results

    def _results(self, rows: Sequence[GradeRow]) -> list[RewardResult]:
        """One result per row; where a service fails for some, a few are tried alone to find those that it grades."""
        try:
            return self.grader.grade(rows, shaping=False)
        except EngineError as error:
            if self.kind == "model" or _is_unreachable(error):
                raise
            if len(rows) == 1:
                return [failed_result(str(error))]
            alone = [result for row in rows[:FEW] for result in self._results([row])]
            # One that is down should not be waited for as often as there are rows.
            return alone + [failed_result(str(error))] * (len(rows) - len(alone))

    def check_any_graded(self) -> None:
        """EngineError where it has graded nothing yet of what it was asked."""
        if not self.given:
            raise EngineError(f"{self.name} graded none of {len(self.refused)} completions; {self.refused[0]}")


@dataclass(frozen=True)
class _Graded:
    completions: list[str]
    results: list[RewardResult]

    @property
    def mean(self) -> float | None:
        """Over those that were graded: the others say nothing. None where none was."""
        rewards = [result.reward for result in self.results if not result.is_failed]
        return sum(rewards) / len(rewards) if rewards else None


def _alone(config: RunConfig, kind: str) -> RunConfig:
    """The config with one part of its reward, which is asked once and answers soon or not at all."""
    reward = config.reward_model
    timeout = min(reward.timeout, JUDGE_TIMEOUT_S if kind == "judge" else TIMEOUT_S)
    quick = {"retries": 0, "timeout": timeout, "num_examine": 0, "on_failure": "fail"}
    return config.model_copy(
        update={"reward_model": reward.model_copy(update={"weights": {kind: 1.0}, "type": kind, **quick})}
    )


def _is_small_and_here(path: str) -> bool:
    """Whether a reward model can be asked at once; whether it could be loaded at all is checked with the sources."""
    from ratchet.engines.model_folder import weight_files
    from ratchet.engines.reward_model import check_reward_model

    folder = Path(path).expanduser()
    if not folder.is_dir():
        return False
    try:
        check_reward_model(folder)
    except (EngineError, DataError):
        return False
    return sum(file.stat().st_size for file in weight_files(folder)) <= _SMALL_BYTES


def _judged(reward: _Reward, config: RunConfig, rows: Sequence[PromptRow]) -> Finding:
    known = [row for row in rows if row.reward_model.get("ground_truth") is not None]
    if not known:
        # Whether it answers at all shows without a ground truth as well.
        reward.grade(rows[:1], [_WRONG_TEXT])
        reward.check_any_graded()
        return Finding("reward", "unknown", f"{reward.name}: no row has a reference answer that could be graded")
    own = reward.grader.rule(reward.source)
    phrase = own.reference_answer if own is not None else None
    truths = [row.reward_model["ground_truth"] for row in known]
    found: dict[Phrase, _Graded] = {}
    means: dict[Phrase, float] = {}
    for each in (phrase,) if phrase is not None else _PHRASES:
        found[each] = _graded(reward, known, [each(truth) for truth in truths])
        if (mean := found[each].mean) is not None:
            means[each] = mean
        if reward.kind in ("api", "judge") and means.get(each, 0.0) > 0 and len(found) > 1:
            # Each request may cost something.
            break
    reward.check_any_graded()
    best = max(means, key=lambda each: means[each])
    right, wrong = means[best], _graded(reward, known, [best(_wrong(truth)) for truth in truths]).mean
    if wrong is None and any(reward.given):
        text = f"{reward.name} gives reference answers {right:.2g} on average, and graded none of the wrong ones"
        return Finding("reward", "unknown", f"{text}: {reward.refused[-1]}")
    wrong = wrong or 0.0
    is_silent = not any(reward.given)
    level, said = _verdict(right, wrong, len(means), is_phrased=phrase is not None, is_silent=is_silent)
    shown = f"{reward.name} gives reference answers {right:.2g} and wrong ones {wrong:.2g} on average"
    if level == "ok":
        return Finding("reward", level, f"{shown} ({len(known)} rows)")
    return Finding(
        "reward", level, f"{shown}: {said}; {_example(known, found[best])}. {_REMEDIES.get(reward.kind, _REMEDY)}"
    )


def _graded(reward: _Reward, rows: Sequence[PromptRow], completions: list[str]) -> _Graded:
    return _Graded(completions, reward.grade(rows, completions))


def _verdict(right: float, wrong: float, num_phrases: int, *, is_phrased: bool, is_silent: bool) -> tuple[Level, str]:
    if is_phrased and right == 0:
        return "error", "nothing can be learnt from it"
    if is_silent:
        return "error", f"it gave nothing but 0 to {num_phrases} phrasings, and nothing can be learnt from that"
    if right <= wrong:
        return "warning", "it does not tell them apart" + ("" if is_phrased else ", however they are phrased")
    if is_phrased and right < _ENOUGH:
        return "warning", "it does not know most of its own reference answers"
    return "ok", ""


def _example(rows: Sequence[PromptRow], graded: _Graded) -> str:
    """The reference answer that earned least."""
    own = [index for index, result in enumerate(graded.results) if not result.is_failed]
    at = min(own, key=lambda index: graded.results[index].reward)
    row, result = rows[at], graded.results[at]
    read = f", read as {result.extracted!r}," if result.extracted is not None else ""
    return (
        f"in {row.where or 'a prompt'} the completion {graded.completions[at]!r:.80}{read} against the ground truth "
        f"{row.reward_model['ground_truth']!r:.80} earns {result.reward:g}"
    )


_REMEDIES = {
    "rule": "Correct the ground truths, the rows' data_source or the rule (reward_model.gsm8k_mode, reward_model.rule)",
    "model": "It may grade something else than right answers: look at what it rewards by `ratchet score`",
    "judge": "Correct reward_model.judge.prompt or the ground truths, or ask another judge",
}
_REMEDY = (
    "Correct it or the ground truths; if it wants another form, register it as a rule whose reference_answer writes "
    "that (docs/rewards.md)"
)


def _outside(reward: _Reward, config: RunConfig) -> Iterator[Finding]:
    """Rewards that are no shares, where the policy is to be promoted by its accuracy."""
    weight = config.reward_weights.get(reward.kind, 1.0)
    worst = max((value * weight for value in reward.given), key=lambda value: abs(value - 0.5), default=0.5)
    if config.promotion.name and not 0 <= worst <= 1:
        yield Finding(
            "promotion",
            "warning",
            f"{reward.name} gave {worst:g} here: a held-out reward outside [0, 1] is no accuracy, and where there is "
            "one nothing is promoted",
        )


def _wrong(truth: str) -> str:
    """What nobody could take for the reference answer, nor find it in."""
    if any(character.isdigit() for character in truth):
        return next((digit * 7 for digit in "7394261580" if digit not in truth), _WRONG_TEXT)
    return _WRONG_TEXT


def _is_unreachable(error: EngineError) -> bool:
    """Whether there was no answer at all, which other completions would not change."""
    import aiohttp

    return isinstance(error.__cause__, OSError | aiohttp.ClientError)


def _unreachable(error: EngineError) -> Finding:
    """An endpoint that is slow may be starting; one that refuses is an error."""
    import aiohttp

    cause = error.__cause__
    is_slow = isinstance(cause, TimeoutError) and not isinstance(cause, aiohttp.ConnectionTimeoutError)
    return Finding("reward", "warning" if is_slow else "error", str(error))
