"""A language model as judge, behind any endpoint that speaks OpenAI's chat completions.

One request a completion: `POST {url}/chat/completions` with the filled template as the user's only message; the number
is the first group of `pattern`'s last match in what the judge writes. The trap: a verdict without a number, or with one
outside the scale, says nothing about the completion. It is marked as failed (reward_model.on_failure), and never a 0.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import regex

from ratchet.config.rewards import JudgeConfig, RewardModelConfig
from ratchet.errors import ConfigError, DataError, EngineError
from ratchet.rewards.data_proto import GradeRow
from ratchet.rewards.endpoint import Endpoint, Question
from ratchet.rewards.results import RewardResult, failed_result
from ratchet.rewards.shaping import SEARCH_S, compiled

_KEY = "reward_model.judge"
_PLACES = regex.compile(r"\{(prompt|completion|ground_truth)\}")
_PATH = "/chat/completions"


class JudgePart:
    """The reward of `reward_model.judge`: its number, mapped from `scale` to 0..1."""

    def __init__(self, config: RewardModelConfig) -> None:
        """ConfigError for a template that does not show the completion, and a pattern or scale that cannot be used."""
        self._judge, self._excludes = config.judge, config.on_failure == "exclude"
        _check(self._judge)
        self._pattern = compiled(self._judge.pattern, f"{_KEY}.pattern")
        if not self._pattern.groups:
            raise ConfigError(f"{_KEY}.pattern: expected a group around the number, got {self._judge.pattern!r}")
        self._endpoint = Endpoint(_address(self._judge.url), config, key=f"{_KEY}.url")

    def score(self, rows: Sequence[GradeRow]) -> list[RewardResult]:
        """One result per row, in order; rows without a usable verdict are marked, with the verdict's end in `error`.

        EngineError where the endpoint fails and reward_model.on_failure is fail, DataError where what it answers is no
        chat completion, or the template wants a ground truth that a row has not.
        """
        answers = self._endpoint.ask([self._question(row) for row in rows], excludes=self._excludes)
        return [failed_result(str(answer)) if isinstance(answer, EngineError) else answer for answer in answers]

    def close(self) -> None:
        """Give the connections back."""
        self._endpoint.close()

    def _question(self, row: GradeRow) -> Question[RewardResult]:
        judge = self._judge
        request = {
            "model": judge.model,
            "messages": [{"role": "user", "content": _filled(judge.prompt, row)}],
            "max_tokens": judge.max_tokens,
            "temperature": judge.temperature,
        }
        return Question(
            body=lambda: json.dumps(request).encode(),
            read=lambda content: self._verdict(_text(content, f"{self._endpoint.shown_url}, {row.place}"), row),
            where=row.place,
        )

    def _verdict(self, text: str, row: GradeRow) -> RewardResult:
        try:
            found = list(self._pattern.finditer(text, timeout=SEARCH_S))
        except TimeoutError as error:
            raise DataError(
                f"{row.place}: {_KEY}.pattern was not found within {SEARCH_S:g} s in {text!r:.80}"
            ) from error
        said = found[-1][1] if found else None
        low, high = self._judge.scale
        if said is None:
            return failed_result(f"no number was found in the judge's verdict, which ends with {text[-80:]!r}")
        try:
            value = float(said)
        except ValueError:
            value = math.nan
        if not min(low, high) <= value <= max(low, high):
            return failed_result(f"the judge's verdict is {said!r}, expected a number from {low:g} to {high:g}")
        return RewardResult((value - low) / (high - low), extracted=said)


def _address(url: str) -> str:
    """Where chat completions are asked for, of an API's address; some have a version in their query."""
    base, mark, query = url.partition("?")
    base = base.rstrip("/")
    return f"{base}{'' if not base or base.endswith(_PATH) else _PATH}{mark}{query}"


def _check(judge: JudgeConfig) -> None:
    low, high = judge.scale
    if low == high or not math.isfinite(low) or not math.isfinite(high):
        raise ConfigError(f"{_KEY}.scale: expected two different numbers, got {low:g} and {high:g}")
    if not judge.model:
        raise ConfigError(f"{_KEY}.model is not set: expected the name that the endpoint knows the model by")
    if "{completion}" not in judge.prompt:
        raise ConfigError(f"{_KEY}.prompt: expected {{completion}} in it, got {judge.prompt!r:.80}")


def _filled(template: str, row: GradeRow) -> str:
    """The template with a row's texts, in one pass: braces in a completion are its own."""
    turns = [f"{message['role']}: {message['content']}" for message in row.prompt]
    texts = {
        # A prompt of one turn is a question; of several it matters who said what.
        "prompt": row.prompt[0]["content"] if len(row.prompt) == 1 else "\n\n".join(turns),
        "completion": row.completion,
        "ground_truth": row.ground_truth,
    }

    def text(match: Any) -> str:
        found = texts[match[1]]
        return "(none given)" if found is None else found

    return str(_PLACES.sub(text, template))


def _text(content: bytes, where: str) -> str:
    """What the model wrote; DataError for what is no chat completion."""
    try:
        text = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        excerpt = content[:80].decode("utf-8", "replace")
        raise DataError(f"{where}: expected a chat completion as of OpenAI's API, got {excerpt!r}") from error
    if text is not None and not isinstance(text, str):
        raise DataError(f"{where}: expected the message's content as text, got {type(text).__name__}")
    # A model that thinks until max_tokens has written nothing.
    return text or ""
