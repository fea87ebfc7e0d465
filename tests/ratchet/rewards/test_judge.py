"""A language model as judge, behind a real server that speaks OpenAI's chat completions."""

import json
from contextlib import closing
from typing import Any

import pytest

from ratchet.config.rewards import RewardModelConfig
from ratchet.errors import ConfigError, DataError, EngineError
from ratchet.rewards.data_proto import GradeRow
from ratchet.rewards.judge import JudgePart
from ratchet.rewards.results import RewardResult
from tests.ratchet.rewards.servers import Answer, Server

QUESTION = ({"role": "user", "content": "What is 6 * 7?"},)


def says(text: Any, **message: Any) -> Answer:
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": "stop"}
    return 200, {}, json.dumps({"id": "1", "object": "chat.completion", "choices": [choice]}).encode()


def config_of(url: str, *, judge: dict[str, Any] | None = None, **settings: Any) -> RewardModelConfig:
    section = {"url": url, "model": "judge-7b", **(judge or {})}
    return RewardModelConfig(**{"type": "judge", "timeout": 5.0, "retries": 0, "judge": section, **settings})


def _rows(*completions: str, prompt: Any = QUESTION, ground_truth: str | None = "42") -> list[GradeRow]:
    return [
        GradeRow(
            where=f"rollout {index}", data_source="mine", prompt=prompt, completion=text, ground_truth=ground_truth
        )
        for index, text in enumerate(completions)
    ]


def _score(server: Server, rows: list[GradeRow], **settings: Any) -> list[RewardResult]:
    with closing(JudgePart(config_of(server.url.removesuffix("/score") + "/v1", **settings))) as judge:
        return judge.score(rows)


def test_each_completion_is_one_request_of_the_chat_api_and_its_number_is_the_reward(server: Server) -> None:
    server.answer = lambda body: says(
        "It says 42. Score: 9" if "42" in body["messages"][0]["content"].split("Answer:")[1][:8] else "Score: 2.5"
    )
    found = _score(server, _rows("42", "41"))
    assert [(one.reward, one.extracted) for one in found] == [(0.9, "9"), (0.25, "2.5")]
    assert server.paths == ["/v1/chat/completions"] * 2
    body = next(body for body in server.bodies if "Answer:\n42" in body["messages"][0]["content"])
    assert body.keys() == {"model", "messages", "max_tokens", "temperature"}
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("judge-7b", 512, 0.0)
    (message,) = body["messages"]
    assert message["role"] == "user"
    for part in ("Question:\nWhat is 6 * 7?", "Answer:\n42", "Reference answer:\n42"):
        assert part in message["content"]


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/v1/", "/v1/chat/completions"),
        ("", "/chat/completions"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/openai?api-version=1", "/openai/chat/completions?api-version=1"),
    ],
)
def test_the_address_of_the_api_or_of_its_chat_completions_will_do(server: Server, url: str, path: str) -> None:
    server.answer = lambda body: says("Score: 1")
    _score(server, _rows("a"), judge={"url": server.url.removesuffix("/score") + url})
    assert server.paths == [path]


def test_the_template_is_filled_once_and_other_braces_are_its_own(server: Server) -> None:
    server.answer = lambda body: says("Score: 1")
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi {completion}"}]
    prompt = 'Say {"ok": 1}. {prompt}|{completion}|{ground_truth}'
    _score(server, _rows("{ground_truth}", prompt=turns, ground_truth=None), judge={"prompt": prompt})
    filled = server.bodies[0]["messages"][0]["content"]
    assert filled == 'Say {"ok": 1}. system: Be brief.\n\nuser: Hi {completion}|{ground_truth}|(none given)'


@pytest.mark.parametrize(
    ("text", "settings", "reward"),
    [
        ("Score: 3\nNo, that is too strict.\nScore: 7", {}, 0.7),
        ("Good work.\n**Score (0-10):** 8/10.", {}, 0.8),
        ("Final score = .5 out of 10", {}, 0.05),
        ("**Score**: 10/10", {}, 1.0),
        ("score = 0", {}, 0.0),
        ("[[2]]", {"pattern": r"\[\[(\d+)\]\]", "scale": [1, 5]}, 0.25),
        ("Score: 1", {"scale": [5, 1]}, 1.0),
        ("Score: -2", {"scale": [-4, 4]}, 0.25),
    ],
)
def test_the_last_number_that_the_pattern_finds_is_mapped_from_the_scale(
    server: Server, text: str, settings: dict[str, Any], reward: float
) -> None:
    server.answer = lambda body: says(text)
    assert [one.reward for one in _score(server, _rows("a"), judge=settings)] == [reward]


@pytest.mark.parametrize(
    "text", ["Score 1-10: 7", "score - 3 points off: 7", "The score depends: 4", "Scores: 5 and 6", "Score: 7 or 8"]
)
def test_a_number_that_only_looks_like_a_score_is_no_verdict(server: Server, text: str) -> None:
    server.answer = lambda body: says(text)
    (found,) = _score(server, _rows("a"), on_failure="exclude")
    assert found.error is not None
    assert "no number was found" in found.error


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("I would rather not say.", "ends with 'I would rather not say.'"),
        ("", "no number was found"),
        (None, "no number was found"),
        ("Score: 11", "the judge's verdict is '11', expected a number from 0 to 10"),
    ],
)
def test_a_verdict_that_is_none_is_a_marked_failure_and_no_0(server: Server, text: str | None, said: str) -> None:
    server.answer = lambda body: says(text if "odd" in body["messages"][0]["content"] else "Score: 4")
    fine, failed = _score(server, _rows("a", "odd"))
    assert (fine.reward, fine.is_failed) == (0.4, False)
    assert failed.is_failed
    assert failed.reward != failed.reward, "NaN, which nobody takes for a wrong answer"
    assert failed.error is not None
    assert said in failed.error


def test_a_number_that_a_pattern_finds_and_that_is_none_is_a_failure(server: Server) -> None:
    server.answer = lambda body: says("Verdict: nan")
    (found,) = _score(server, _rows("a"), judge={"pattern": "Verdict: (.*)"})
    assert found.is_failed


def test_a_judge_that_is_down_fails_or_marks_its_rows_as_configured(server: Server) -> None:
    server.answer = lambda body: (503, {}, b"") if "bad" in body["messages"][0]["content"] else says("Score: 5")
    with pytest.raises(EngineError, match=r"/v1/chat/completions, rollout 1: expected status 200, got 503"):
        _score(server, _rows("good", "bad"))
    good, bad = _score(server, _rows("good", "bad"), on_failure="exclude")
    assert (good.reward, good.is_failed, bad.is_failed) == (0.5, False, True)
    assert "got 503" in str(bad.error)


@pytest.mark.parametrize("content", [b"<html>", b"{}", b'{"choices": []}', b'{"choices": [{"text": "Score: 1"}]}'])
def test_what_is_no_chat_completion_is_an_error(server: Server, content: bytes) -> None:
    server.answer = lambda body: (200, {}, content)
    with pytest.raises(DataError, match=r"rollout 0: expected a chat completion as of OpenAI's API, got"):
        _score(server, _rows("a"))


def test_content_in_parts_is_named(server: Server) -> None:
    server.answer = lambda body: says([{"type": "text", "text": "Score: 1"}])
    with pytest.raises(DataError, match="expected the message's content as text, got list"):
        _score(server, _rows("a"))


def test_a_pattern_that_would_take_for_ever_is_ended_and_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratchet.rewards.judge.SEARCH_S", 0.2)
    server.answer = lambda body: says("a" * 40 + "!")
    with pytest.raises(DataError, match=r"rollout 0: reward_model\.judge\.pattern .* within 0\.2 s"):
        _score(server, _rows("a"), judge={"pattern": r"(?:(a|aa|aaa)+)+b"})


def test_the_secret_is_sent_as_the_authorization_header(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "Bearer s3cr3t")
    server.answer = lambda body: says("Score: 1")
    _score(server, _rows("a"), auth_env="JUDGE_KEY")
    assert server.headers[0]["Authorization"] == "Bearer s3cr3t"


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        ({"url": ""}, r"reward_model\.judge\.url is not set"),
        ({"model": ""}, r"reward_model\.judge\.model is not set"),
        ({"prompt": "Grade {prompt}"}, r"reward_model\.judge\.prompt: expected \{completion\} in it"),
        ({"pattern": "("}, r"reward_model\.judge\.pattern: expected a regular expression"),
        ({"pattern": r"\d+"}, r"reward_model\.judge\.pattern: expected a group around the number"),
        ({"scale": [1, 1]}, r"reward_model\.judge\.scale: expected two different numbers"),
    ],
)
def test_a_section_that_cannot_work_is_refused_before_anything_is_asked(judge: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JudgePart(config_of("http://127.0.0.1:1/v1", judge=judge))
