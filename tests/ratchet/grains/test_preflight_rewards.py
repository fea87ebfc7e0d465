"""Preflight has every kind of reward grade reference answers and obviously wrong ones."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.data.prompt_rows import PromptRow
from ratchet.grains.checks.finding import Finding
from ratchet.grains.checks.rewards import reward_findings
from tests.ratchet.rewards.servers import Answer, Server
from tests.tiny_models import make_tiny_classifier


def _rows(truths: Sequence[str], data_source: str = "mine") -> list[PromptRow]:
    return [
        PromptRow(
            data_source,
            [{"role": "user", "content": f"Question {number}?"}],
            "math",
            {"style": "rule", "ground_truth": truth},
            where=f"rows.jsonl, line {number + 1}",
        )
        for number, truth in enumerate(truths)
    ]


def _found(rows: list[PromptRow], **reward: Any) -> Finding:
    (finding,) = reward_findings(RunConfig.model_validate({"reward_model": reward}), rows, None)
    return finding


@contextmanager
def _judging(verdict: Callable[[str], str]) -> Iterator[Server]:
    """A server of chat completions that answers a question by `verdict`."""

    def answer(body: dict[str, Any]) -> Answer:
        said = verdict(body["messages"][-1]["content"])
        return 200, {}, json.dumps({"choices": [{"message": {"content": said}}]}).encode()

    with Server() as server:
        server.answer = answer
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_the_rule_of_mathematics_knows_its_own_ground_truths() -> None:
    truths = [r"\frac{1}{2}", "(3, \\frac{\\pi}{2})", r"x \in [-2,7]", "2k+2", r"\text{Evelyn}", "90^\\circ"]
    for rows, keys in ((_rows(truths, "HuggingFaceH4/MATH-500"), {}), (_rows(truths), {"rule": "math"})):
        finding = _found(rows, **keys)
        assert finding.level == "ok"
        assert "gives reference answers 1 and wrong ones 0 on average (6 rows)" in finding.message


def test_a_judge_that_tells_right_from_wrong_is_asked_about_few() -> None:
    def verdict(question: str) -> str:
        answer, _, reference = question.partition("\n\nReference answer:\n")
        return f"Score: {10 if reference.partition(chr(10))[0] in answer else 0}"

    with _judging(verdict) as server:
        rows = _rows([str(1000 + number) for number in range(40)])
        finding = _found(rows, type="judge", judge={"url": server.url, "model": "m"})
    assert finding.level == "ok"
    assert "gives reference answers 1 and wrong ones 0 on average (4 rows)" in finding.message
    assert len(server.bodies) == 12, "two phrasings of four right answers, and four wrong ones"


@pytest.mark.parametrize(
    ("said", "level", "message"),
    [
        ("Score: 7", "warning", "it does not tell them apart, however they are phrased"),
        ("Score: 0", "error", "it gave nothing but 0 to 5 phrasings"),
        ("I cannot judge that.", "error", "graded none of 5 completions; rows.jsonl, line 1"),
    ],
)
def test_a_judge_from_which_nothing_can_be_learnt_is_told(said: str, level: str, message: str) -> None:
    with _judging(lambda question: said) as server:
        finding = _found(_rows(["17"]), type="judge", judge={"url": server.url, "model": "m"})
    assert finding.level == level
    assert message in finding.message


@pytest.mark.parametrize(
    ("wrong", "level", "message"),
    [
        ("Score: 0", "ok", "gives reference answers 1 and wrong ones 0 on average (2 rows)"),
        ("Hm.", "unknown", "gives reference answers 1 on average, and graded none of the wrong ones: rows.jsonl, line"),
    ],
)
def test_a_phrasing_without_a_verdict_says_nothing(wrong: str, level: str, message: str) -> None:
    def verdict(question: str) -> str:
        answer, _, reference = question.partition("\n\nReference answer:\n")
        if reference.partition("\n")[0] not in answer:
            return wrong
        return "Score: 10" if "The answer is 19." in answer else "I cannot judge that."

    with _judging(verdict) as server:
        finding = _found(_rows(["17", "19"]), type="judge", judge={"url": server.url, "model": "m"})
    assert finding.level == level
    assert message in finding.message


def test_an_endpoint_that_fails_for_some_is_asked_about_others_and_one_that_refuses_is_not() -> None:
    def answer(body: dict[str, Any]) -> Answer:
        completions = [row["completion"] for row in body["rows"]]
        if "#### 17" in completions:
            return 503, {}, b"busy"
        rewards = [float(completion.startswith("#### ") and "7777777" not in completion) for completion in completions]
        return 200, {}, json.dumps({"rewards": rewards}).encode()

    with _judging(str) as server:
        server.answer = answer
        finding = _found(_rows(["17", "19"]), type="api", url=server.url)
        assert finding.level == "ok"
        server.answer = lambda body: (503, {}, b"busy")
        del server.bodies[:]
        down = _found(_rows(["17", "19"]), type="api", url=server.url)
    assert down.level == "error"
    assert "graded none of 10 completions; rows.jsonl, line 1" in down.message
    assert "503" in down.message
    unreachable = _found(_rows(["17"]), type="api", url=server.url)
    assert unreachable.level == "error"


def test_a_small_reward_model_is_asked(tmp_path: Path) -> None:
    folder = make_tiny_classifier(tmp_path / "classifier")
    finding = _found(_rows(["17", "19"]), type="model", path=str(folder))
    # Random weights may favour either.
    assert finding.level in ("ok", "warning")
    assert "the model reward of data_source 'mine' gives reference answers " in finding.message


def test_each_part_of_a_mix_is_asked_alone(tmp_path: Path) -> None:
    folder = make_tiny_classifier(tmp_path / "classifier")
    config = RunConfig.model_validate(
        {"reward_model": {"weights": {"rule": 1.0, "model": 0.5}, "path": str(folder), "rule": "gsm8k"}}
    )
    rule, model = reward_findings(config, _rows(["17", "19"]), None)
    assert rule.message.startswith("the rule reward of data_source 'mine' gives reference answers 1 and wrong ones 0")
    assert model.message.startswith("the model reward of data_source 'mine' gives ")
