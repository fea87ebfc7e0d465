"""Rewards over HTTP, against a real server that answers, fails, hangs and lies."""

import gzip
import json
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from ratchet.config.rewards import RewardModelConfig
from ratchet.errors import ConfigError, DataError, EngineError, NumericsError
from ratchet.rewards import endpoint
from ratchet.rewards.data_proto import GradeRow
from ratchet.rewards.http import HttpReward
from tests.ratchet.rewards.servers import Answer, Handler, Server, lengths, rewards


def _rows(*completions: str) -> list[GradeRow]:
    return [
        GradeRow(
            where=f"rollout {index}",
            data_source="mine",
            prompt=[{"role": "user", "content": "q"}],
            completion=completion,
            ground_truth="72",
            extra_info={"index": index},
        )
        for index, completion in enumerate(completions)
    ]


def _score(server: Server, rows: list[GradeRow], **settings: Any) -> list[float]:
    config = RewardModelConfig(type="api", **{"url": server.url, "timeout": 5.0, **settings})
    with closing(HttpReward(config)) as reward:
        return [result.reward for result in reward.score(rows)]


def _in_turn(*answers: Answer) -> Callable[[dict[str, Any]], Answer]:
    queue = list(answers)
    return lambda body: queue.pop(0) if len(queue) > 1 else queue[0]


def test_rows_go_out_in_batches_and_rewards_come_back_in_order(server: Server) -> None:
    rows = _rows(*["x" * index for index in range(10)])
    assert _score(server, rows, batch_size=3) == [float(index) for index in range(10)]
    assert sorted(len(body["rows"]) for body in server.bodies) == [1, 3, 3, 3]
    assert [row for body in server.bodies for row in body["rows"] if row["extra_info"]["index"] == 4] == [
        {
            "prompt": [{"role": "user", "content": "q"}],
            "completion": "xxxx",
            "ground_truth": "72",
            "data_source": "mine",
            "extra_info": {"index": 4},
        }
    ]


def test_requests_are_under_way_at_once_up_to_the_limit(server: Server) -> None:
    limit, under_way, most = 8, 0, 0
    # Nobody is answered before as many requests as may be are there: one after another would never get that far.
    all_here = threading.Barrier(limit, timeout=4.0)

    def meet(body: dict[str, Any]) -> Answer:
        nonlocal under_way, most
        with server.lock:
            under_way += 1
            most = max(most, under_way)
        all_here.wait()
        with server.lock:
            under_way -= 1
        return lengths(body)

    server.answer = meet
    rows = _rows(*["x" * (index % 50) for index in range(2048)])
    config = RewardModelConfig(type="api", url=server.url, concurrency=limit)
    with closing(HttpReward(config)) as reward:
        results = reward.score(rows)
    assert [result.reward for result in results] == [float(index % 50) for index in range(2048)]
    assert len(server.bodies) == 32
    assert most == limit


def test_connections_stay_open_from_one_step_to_the_next(server: Server) -> None:
    config = RewardModelConfig(type="api", url=server.url, batch_size=1)
    with closing(HttpReward(config)) as reward:
        for _ in range(2):
            reward.score(_rows(*["x"] * 64))
    assert len(server.bodies) == 128
    assert server.num_connections <= config.concurrency


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_failure_that_may_pass_is_tried_again(server: Server, status: int) -> None:
    server.answer = _in_turn((status, {"Retry-After": "0"}, b"busy"), (status, {}, b"busy"), rewards(0.5))
    assert _score(server, _rows("a")) == [0.5]
    assert len(server.bodies) == 3


def test_a_response_that_breaks_off_is_tried_again(server: Server) -> None:
    whole = rewards(0.5)
    server.answer = _in_turn((200, {"Content-Length": "99", "Connection": "close"}, rewards(0.25)[2]), whole)
    assert _score(server, _rows("a")) == [0.5]


def test_retries_are_counted_and_the_last_failure_is_told_with_url_status_and_rows(server: Server) -> None:
    server.answer = lambda body: (503, {}, b"no model loaded")
    with pytest.raises(
        EngineError,
        match=rf"{server.url}, 2 rows, rollout 0 to rollout 1: expected status 200, got 503 .*no model .*\(3 tries\)",
    ):
        _score(server, _rows("a", "b"), retries=2)
    assert len(server.bodies) == 3


@pytest.mark.parametrize("status", [301, 302, 400, 401, 404])
def test_a_failure_that_will_not_pass_is_told_at_once_and_redirects_are_not_followed(
    server: Server, status: int
) -> None:
    server.answer = lambda body: (status, {"Location": "/elsewhere"}, b"no")
    with pytest.raises(EngineError, match=f"got {status} "):
        _score(server, _rows("a"))
    assert len(server.bodies) == 1


def test_one_failed_batch_ends_the_others_tries(server: Server) -> None:
    def answer(body: dict[str, Any]) -> Answer:
        return (400, {}, b"bad row") if body["rows"][0]["completion"] == "bad" else (503, {"Retry-After": "30"}, b"")

    server.answer = answer
    started = time.perf_counter()
    with pytest.raises(EngineError, match=r"/score, rollout 1: .*bad row"):
        _score(server, _rows("a", "bad", "c"), batch_size=1)
    while any(thread.name.startswith("reward") for thread in threading.enumerate()):
        time.sleep(0.01)
    assert time.perf_counter() - started < 3


def test_a_server_that_hangs_is_given_up_after_the_timeout(server: Server) -> None:
    release = threading.Event()
    server.answer = lambda body: (release.wait(10), rewards(1.0))[1]
    with pytest.raises(EngineError, match=r"no answer within 0\.2 s \(2 tries\)"):
        _score(server, _rows("a"), timeout=0.2, retries=1)
    release.set()


@pytest.mark.parametrize(
    ("start", "drop"),
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", b" ", id="body"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX-Wait: ", b"a", id="header"),
        pytest.param(b"", b"HTTP/1.1 100 Continue\r\n\r\n", id="continue"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0", id="length of a chunk"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", id="chunks"),
        pytest.param(b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 100\r\n\r\n", b" ", id="redirect"),
        pytest.param(b"HTTP/1.1 500 Oh\r\nContent-Length: 100\r\n\r\n", b" ", id="failure"),
    ],
)
def test_a_server_that_sends_a_byte_now_and_then_is_given_up_after_the_timeout(
    server: Server, monkeypatch: pytest.MonkeyPatch, start: bytes, drop: bytes
) -> None:
    def trickle(self: Handler) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.wfile.write(start)
        for _ in range(40):
            self.wfile.write(drop)
            time.sleep(0.05)

    monkeypatch.setattr(Handler, "do_POST", trickle)
    started = time.perf_counter()
    # A redirect is told from its headers; of its body nothing is read.
    reason = "redirects are not followed" if b" 302 " in start else r"no answer within 0\.3 s"
    with pytest.raises(EngineError, match=reason):
        _score(server, _rows("a"), timeout=0.3, retries=0)
    assert time.perf_counter() - started < 1.5


@pytest.mark.parametrize(
    "place", ["file:///etc/passwd", "http://169.254.169.254/latest/meta-data/", "http://127.0.0.1:1/", "//[::1", "\x00"]
)
def test_no_place_that_an_answer_points_to_is_visited(server: Server, place: str) -> None:
    server.answer = lambda body: (307, {"Location": place}, b" " * 2**20)
    with pytest.raises(EngineError, match=r"got 307 .*redirects are not followed|Invalid HTTP header"):
        _score(server, _rows("a"), retries=0)
    assert len(server.bodies) == 1


@pytest.mark.parametrize("encoding", ["gzip", "gzip, gzip", "zstd"])
def test_an_answer_is_never_unpacked(server: Server, encoding: str) -> None:
    content = gzip.compress(json.dumps({"rewards": [1.0]}).encode())
    server.answer = lambda body: (200, {"Content-Encoding": encoding}, content)
    with pytest.raises(DataError, match=f"is not compressed, as was asked, got '{encoding}'"):
        _score(server, _rows("a"))
    assert server.headers[0]["Accept-Encoding"] == "identity"


def test_what_a_server_says_writes_no_line_of_a_log(server: Server) -> None:
    server.answer = lambda body: (400, {}, b"\x1b[2J\r\nINFO all is well\x07")
    with pytest.raises(EngineError, match="all is well") as caught:
        _score(server, _rows("a"))
    assert str(caught.value).isprintable()


def test_a_server_that_is_not_there_is_named(server: Server) -> None:
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:1/score, rollout 0: .*Connection refused \(2 tries\)"):
        _score(server, _rows("a"), url="http://127.0.0.1:1/score?key=hidden", retries=1)


def test_a_request_that_cannot_be_sent_is_told_at_once(server: Server) -> None:
    with pytest.raises(EngineError, match=r"http://\.\.\./, rollout 0: ") as caught:
        _score(server, _rows("a"), url="http://.../")
    assert "tries" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>", "expected JSON with the key rewards, got '<html>'"),
        (b"\xff\xfe", "expected JSON"),
        (b"[1.0]", r'expected \{"rewards": \[...\]\}, got'),
        (b'{"scores": [1.0]}', r'expected \{"rewards": \[...\]\}, got'),
        (b'{"rewards": 1.0}', r'expected \{"rewards": \[...\]\}, got'),
        (b'{"rewards": [1.0]}', "expected 2 rewards, got 1"),
        (b'{"rewards": [1.0, 2.0, 3.0]}', "expected 2 rewards, got 3"),
        (b'{"rewards": [1.0, "2"]}', "rollout 1: .*expected a number as reward, got str '2'"),
        (b'{"rewards": [1.0, null]}', "rollout 1: .*expected a number as reward, got NoneType"),
        (b'{"rewards": [1.0, true]}', "rollout 1: expected a number .*got true"),
        (b'{"rewards": [1.0, [2.0]]}', "rollout 1: .*expected a number as reward, got list"),
        (b'{"rewards": [1.0, ' + b"[" * 100_000, "expected JSON with the key rewards, got"),
        (b'{"rewards": [1.0, ' + b"9" * 10**6 + b"]}", "expected JSON with the key rewards, got"),
    ],
)
def test_an_answer_that_cannot_be_used_is_an_error_and_not_a_zero(server: Server, content: bytes, message: str) -> None:
    server.answer = lambda body: (200, {}, content)
    with pytest.raises(DataError, match=message) as caught:
        _score(server, _rows("a", "b"))
    assert server.url in str(caught.value)
    assert len(server.bodies) == 1


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"1e999", b"1" + b"0" * 400])
def test_a_reward_that_is_not_finite_names_its_row(server: Server, value: bytes) -> None:
    server.answer = lambda body: (200, {}, b'{"rewards": [0.0, ' + value + b"]}")
    with pytest.raises(NumericsError, match=r"rollout 1: .*expected a finite number"):
        _score(server, _rows("a", "b"))


def test_an_endless_response_is_cut_off(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_RESPONSE_BYTES", 2**20)
    server.answer = lambda body: (200, {}, b" " * (2**20 + 1))
    with pytest.raises(DataError, match="longer than 1 MiB"):
        _score(server, _rows("a"))


def test_the_authorization_header_comes_from_the_environment_and_is_never_shown(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "Bearer s3cr3t\n")
    assert _score(server, _rows("a"), auth_env="REWARD_TOKEN") == [1.0]
    assert server.headers[0]["Authorization"] == "Bearer s3cr3t"
    server.answer = lambda body: (503, {}, b"Bearer s3cr3t is over its quota; key=s3cr3t")
    with pytest.raises(EngineError, match=r"\*\*\* is over its quota") as caught:
        _score(server, _rows("a"), auth_env="REWARD_TOKEN", retries=1)
    assert "s3cr3t" not in str(caught.value) + caplog.text


def test_no_other_credentials_are_sent(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password mine\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    _score(server, _rows("a"))
    assert "Authorization" not in server.headers[0]


@pytest.mark.parametrize("value", [None, "", "two\nlines", "Bearer \u20ac"])
def test_a_secret_that_cannot_be_sent_is_refused_without_being_shown(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("REWARD_TOKEN", raising=False)
    else:
        monkeypatch.setenv("REWARD_TOKEN", value)
    with pytest.raises(ConfigError, match="REWARD_TOKEN") as caught:
        HttpReward(RewardModelConfig(type="api", url="http://host/score", auth_env="REWARD_TOKEN"))
    assert "two" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["", "host/score", "ftp://host", "http://", "http://user:pw@host/", "http://host:port/", "http://[::1"]
)
def test_a_url_that_cannot_be_posted_to_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"reward_model\.url") as caught:
        HttpReward(RewardModelConfig(type="api", url=url))
    assert "pw" not in str(caught.value)
