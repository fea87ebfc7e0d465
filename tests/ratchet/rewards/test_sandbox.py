"""A user's reward in a process of its own: what it may do to itself, and that it can never do it silently."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.errors import ConfigError, DataError, EngineError, NumericsError
from ratchet.rewards import wire
from ratchet.rewards.graders import Grader, GradeRow, RewardResult, open_grader

MINE = """
import os, re, signal, sys, time
import mine_beside

def hook(data_source, solution_str, ground_truth, extra_info=None):
    print("a line of the user's own")
    return {"score": float(solution_str == ground_truth), "index": extra_info["index"], "pred": solution_str}

def plain(solution_str, ground_truth):
    return float(solution_str == ground_truth)

def tokens(data):
    return [[0.5] * len(item.completion_token_ids) for item in data]

def hangs(solution_str):
    if solution_str == "b":
        time.sleep(60)
    return 1.0

def hangs_in_c(solution_str):
    if solution_str == "b":
        pow(7, 10**20000, 10**5000 + 1)
    return 1.0

def slow_in_all(solution_str):
    time.sleep(0.4)
    return 1.0

def hangs_as_a_whole(data):
    time.sleep(60)

def exits(solution_str):
    if solution_str == "b":
        os._exit(7)
    return 1.0

def leaves(solution_str):
    sys.exit(3)

def crashes(solution_str):
    if solution_str == "c":
        os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0

def eats(solution_str):
    if solution_str == "b":
        return float(len(bytearray(2**30)))
    return 1.0

def nan(solution_str):
    return float("nan") if solution_str == "c" else 0.0

def short(data):
    return [1.0] * (len(data) - 1)

def raises(solution_str):
    return {"a": 1.0}[solution_str]

def speaks_out_of_turn(solution_str):
    for fd in range(3, 64):
        try:
            os.write(fd, b"nonsense")
        except OSError:
            pass
    return 1.0

def by_length(data):
    return sorted(float(len(item.completion)) for item in data)

def by_rank(data):
    lengths = sorted(len(item.completion) for item in data)
    return [float(lengths.index(len(item.completion))) for item in data]

def at_random(data, state=[0]):
    state[0] += 1
    return [float((7 * state[0] + 3 * index) % 5 > 2) for index in range(len(data))]

class Counts:
    def __init__(self):
        self.calls = 0
    def __call__(self, data):
        self.calls += 1
        return [self.calls + len(item.completion) / 10 for item in data]

def environment(solution_str):
    return {"score": 1.0, "pred": repr(sorted(os.environ))}

def unreachable(solution_str):
    from ratchet.errors import EngineError
    if solution_str == "b":
        raise EngineError("the judge of mine is down")
    return 1.0

def unreachable_as_a_whole(data):
    from ratchet.errors import EngineError
    raise EngineError("the judge of mine is down")

class NeedsMore:
    def __init__(self, size):
        pass
    def __call__(self, data):
        return []
"""
RULE = """
import os
from ratchet.rewards.registry import register_reward

@register_reward("my-org/capitals")
def capital(solution_str, ground_truth):
    return {"score": float(solution_str == ground_truth), "pid": os.getpid()}
"""
Open = Callable[..., Grader]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Open the grader of a function of MINE; what it opened is closed."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine_beside.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    graders: list[Grader] = []

    def open_(name: str, *, on_failure: str = "fail", **options: Any) -> Grader:
        custom = {"path": str(tmp_path / "mine.py"), "name": name, **options}
        config = {"reward_model": {"type": "custom", "on_failure": on_failure}, "custom_reward_function": custom}
        graders.append(open_grader(RunConfig.model_validate(config)))
        return graders[-1]

    yield open_
    for grader in graders:
        grader.close()


def _rows(*completions: str) -> list[GradeRow]:
    return [
        GradeRow(
            where=f"rollout {index}",
            data_source="mine",
            completion=text,
            ground_truth="b",
            extra_info={"index": index},
            completion_token_ids=[5] * (index + 1),
        )
        for index, text in enumerate(completions)
    ]


ABC = _rows("a", "b", "c")


def test_it_grades_as_in_this_process_and_what_it_prints_is_in_nobody_s_output(
    opened: Open, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("hook", "tokens"):
        outside, inside = opened(name), opened(name, sandbox=False)
        grades = outside.grade(ABC)
        capfd.readouterr()
        assert grades == inside.grade(ABC)
    assert [result.token_rewards for result in grades] == [[0.5], [0.5, 0.5], [0.5, 0.5, 0.5]]
    first, second, _ = opened("hook").grade(ABC)
    assert first == RewardResult(0.0, {"custom": 0.0, "index": 0.0}, "a")
    assert second == RewardResult(1.0, {"custom": 1.0, "index": 1.0}, "b")
    said = capfd.readouterr()
    assert "a line of the user's own" not in said.out
    assert said.err.count("a line of the user's own") == 3


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("hangs", DataError, r"rollout 1: the reward hangs has not ended within 0\.4 s \(one row, .*\.timeout\)"),
        ("hangs_in_c", DataError, r"rollout 1: the reward hangs_in_c has not ended within 0\.4 s"),
        ("hangs_as_a_whole", DataError, r"3 rows, rollout 0 to rollout 2: .*within 0\.4 s \(one call"),
        ("exits", DataError, r"rollout 1: the reward exits ended the process that grades \(exit status 7\)"),
        ("leaves", DataError, "rollout 0: the reward leaves raised SystemExit: 3"),
        ("crashes", DataError, r"rollout 2: .*\(signal SIGSEGV\); it may use 0\.5 GiB"),
        ("eats", DataError, r"rollout 1: the reward eats raised MemoryError: .*memory_gib is 0\.5"),
        ("nan", NumericsError, "rollout 2: .*expected a finite number"),
        ("short", DataError, r"rollout 2: .*expected one reward per row \(3\), got 2"),
        ("raises", DataError, "rollout 1: the reward raises raised KeyError: 'b'"),
        ("speaks_out_of_turn", DataError, "the reward speaks_out_of_turn broke the process"),
        ("unreachable", EngineError, "rollout 1: the judge of mine is down"),
    ],
)
def test_what_it_does_to_itself_is_an_error_that_names_the_row(
    opened: Open, name: str, kind: type[Exception], message: str
) -> None:
    grader = opened(name, timeout=0.4 if "hangs" in name else 60.0, memory_gib=0.5)
    with pytest.raises(kind, match=message):
        grader.grade(ABC)


def test_a_process_that_was_stopped_or_has_ended_is_replaced(opened: Open) -> None:
    grader = opened("exits")
    for _ in range(2):
        with pytest.raises(DataError, match="exit status 7"):
            grader.grade(ABC)
    assert [result.reward for result in grader.grade(ABC[:1])] == [1.0]


def test_the_time_is_that_of_one_row_however_many_there_are(opened: Open) -> None:
    grades = opened("slow_in_all", timeout=1.0).grade(ABC)
    assert [result.reward for result in grades] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("sandbox", [True, False])
def test_a_reward_in_another_order_than_the_rows_is_refused_and_one_that_compares_or_draws_is_not(
    opened: Open, sandbox: bool
) -> None:
    rows = _rows("long one", "b", "cc", "ddd")
    with pytest.raises(DataError, match=r"rollout 0: the reward by_length gives it 1 among 4 rows and 8 alone"):
        opened("by_length", sandbox=sandbox).grade(rows)
    assert [result.reward for result in opened("by_rank", sandbox=sandbox).grade(rows)] == [3.0, 0.0, 1.0, 2.0]
    assert [result.reward for result in opened("at_random", sandbox=sandbox).grade(rows)] == [0.0, 0.0, 1.0, 0.0]
    counts = opened("Counts", sandbox=sandbox)
    assert [[result.reward for result in counts.grade(rows)][1] for _ in range(2)] == [1.1, 2.1]


def test_it_gets_no_variables_but_those_of_the_place_and_those_it_asks_for(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "HTTPS_PROXY", "JUDGE_KEY"):
        monkeypatch.setenv(name, "planted-secret")
    (without,), (with_one,) = (opened("environment", env=env).grade(ABC[:1]) for env in ((), ("JUDGE_KEY",)))
    assert without.extracted is not None
    assert with_one.extracted is not None
    assert "'PATH'" in without.extracted
    assert not [name for name in ("AWS", "HF_TOKEN", "PROXY", "JUDGE", "RATCHET") if name in without.extracted]
    assert "'JUDGE_KEY'" in with_one.extracted
    with pytest.raises(ConfigError, match=r"custom_reward_function\.env: the environment variable NOT_THERE is not"):
        opened("environment", env=("NOT_THERE",))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "has no 'nothing'; it defines"),
        ("NeedsMore", "NeedsMore: cannot be made with"),
    ],
)
def test_what_cannot_be_a_reward_is_refused_when_it_is_opened(opened: Open, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(name)


def test_a_failure_of_a_service_marks_the_rows_where_the_config_excludes_them(opened: Open) -> None:
    first, second, third = opened("unreachable", on_failure="exclude").grade(ABC)
    assert (first.reward, third.reward, first.is_failed, third.is_failed) == (1.0, 1.0, False, False)
    assert second.is_failed
    assert math.isnan(second.reward)
    assert second.error == "custom: rollout 1: the judge of mine is down"
    # That all of one call failed is for the caller to judge.
    assert all(result.is_failed for result in opened("unreachable_as_a_whole", on_failure="exclude").grade(ABC))
    with pytest.raises(EngineError, match=r"1 of 3 completions .* is down; submit again once the service answers$"):
        opened("unreachable", on_failure="exclude").grade(ABC, shaping=False)


def test_results_are_joined_by_number_and_none_may_be_missing() -> None:
    results = [RewardResult(float(index)) for index in range(3)]
    message = wire.results_message(results, ABC)
    message["results"].reverse()
    assert wire.results_of(message, ABC, "mine") == results
    del message["results"][1]
    with pytest.raises(DataError, match="rollout 1: the reward mine: expected one reward per row, got none"):
        wire.results_of(message, ABC, "mine")
    message = wire.results_message(results, ABC)
    message["results"][2]["reward"] = float("inf")
    with pytest.raises(NumericsError, match=r"rollout 2: the reward mine: .*expected a finite number"):
        wire.results_of(message, ABC, "mine")


def test_a_row_costs_less_than_a_millisecond_more_than_in_this_process(opened: Open) -> None:
    rows = [
        GradeRow(where=f"rollout {index}", data_source="mine", completion="word " * 200, ground_truth="72")
        for index in range(1024)
    ]
    seconds = {}
    for sandbox in (True, False):
        grader = opened("plain", sandbox=sandbox)
        grader.grade(rows[:1])
        begun = time.perf_counter()
        grader.grade(rows)
        seconds[sandbox] = time.perf_counter() - begun
    assert (seconds[True] - seconds[False]) / len(rows) < 0.001


def test_rules_that_came_as_files_grade_there_too(tmp_path: Path) -> None:
    (tmp_path / "rule.py").write_text(RULE)
    config = RunConfig.model_validate({"code": [{"path": str(tmp_path / "rule.py"), "sha256": "", "source": ""}]})
    grader = open_grader(config)
    gsm8k = GradeRow(data_source="openai/gsm8k", completion="#### 72", ground_truth="72")
    paris = GradeRow(data_source="my-org/capitals", completion="Paris", ground_truth="Paris")
    results = grader.grade([gsm8k, paris, gsm8k])
    grader.close()
    assert [result.reward for result in results] == [1.0, 1.0, 1.0]
    assert "pid" not in results[0].breakdown
    assert results[1].breakdown["pid"] != os.getpid()


def test_it_ends_with_the_process_that_started_it_even_in_the_midst_of_c(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        f"import os\n\ndef stuck(solution_str):\n    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "    return pow(7, 10**20000, 10**5000 + 1)\n"
    )
    program = (
        "from ratchet.config import RunConfig\nfrom ratchet.rewards.graders import GradeRow, open_grader\n"
        f"custom = {{'path': {str(tmp_path / 'mine.py')!r}, 'name': 'stuck'}}\n"
        "config = RunConfig.model_validate({'reward_model': {'type': 'custom'}, 'custom_reward_function': custom})\n"
        "open_grader(config).grade([GradeRow(data_source='mine', completion='a')])\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program])
    pid = _eventually(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text())
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert _eventually(lambda: not _is_alive(int(pid)))


def _eventually(found: Callable[[], Any]) -> Any:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if value := found():
            return value
        time.sleep(0.02)
    return None


def _is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return status != "Z"
