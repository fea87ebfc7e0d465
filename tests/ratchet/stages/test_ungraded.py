"""Completions that a service could not grade: marked, and in no group, no metric and no loss."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.engines.sampler import Completion
from ratchet.errors import EngineError
from ratchet.grains import loop
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.tracking.show import completion_lines
from tests.runs import CUT, RIGHT, WRONG, one_step_config, prepared, table_rows, write_problems

N, ESTIMATOR = "actor_rollout_ref.rollout.n", "algorithm.adv_estimator"
REWARD = f"""
from ratchet.errors import EngineError

def compute_score(solution_str, ground_truth):
    if solution_str == {CUT.text!r}:
        raise EngineError("the judge is down")
    return float(solution_str == "#### 1")
"""


@pytest.fixture
def excluding(tmp_path: Path) -> dict[str, Any]:
    """A reward whose judge does not answer for CUT, and what to do about that."""
    (tmp_path / "mine.py").write_text(REWARD)
    return {"custom_reward_function.path": str(tmp_path / "mine.py"), "reward_model.on_failure": "exclude"}


def _trajectories(run: Run) -> list[dict[str, Any]]:
    return table_rows(run, "advantage", "trajectories", schemas.TRAJECTORIES)


def _policy(run: Run) -> dict[str, torch.Tensor]:
    folder = Path(run.uri) / run.require(POLICY_UPDATE, 1).output("policy").folder
    return load_file(folder / "model.safetensors")


def test_it_is_left_out_of_statistics_advantages_metrics_and_loss(
    tmp_path: Path, tiny_model: Path, problems: Path, excluding: dict[str, Any]
) -> None:
    with prepared(
        tmp_path, one_step_config(tiny_model, problems, **excluding, **{N: 4}), RIGHT, CUT, WRONG, WRONG
    ) as session:
        loop.run_step(session, 1)
        run = session.store_run
        rewards, rows = table_rows(run, "reward", "rewards", schemas.REWARDS), _trajectories(run)
        metrics = run.require("reward", 1).provenance.metrics | run.require("advantage", 1).provenance.metrics
        policy = _policy(run)
        shown = "\n".join(completion_lines(run, 1))
    assert [row["reward"] for row in rewards] == [1.0, None, 0.0, 0.0]
    assert rewards[1]["error"] == "custom: rollout 000001/train-0000000, sample 1: the judge is down"
    # Rewards 1, 0, 0: mean 1/3, standard deviation (n - 1) sqrt(1/3).
    expected = [(2 / 3) * 3**0.5, 0.0, -(1 / 3) * 3**0.5, -(1 / 3) * 3**0.5]
    for row, advantage in zip(rows, expected, strict=True):
        assert row["advantages"] == pytest.approx([advantage] * len(row["advantages"]), rel=1e-4)
    assert [row["loss_mask"] for row in rows] == [[True] * 3, [False] * 6, [True] * 3, [True] * 3]
    assert [row["group_reward_mean"] for row in rows] == [pytest.approx(1 / 3), None, *[pytest.approx(1 / 3)] * 2]
    assert [row["group_size"] for row in rows] == [3, None, 3, 3]
    assert metrics["reward/excluded_ratio"] == 0.25
    assert metrics["critic/score/mean"] == metrics["critic/rewards/mean"] == pytest.approx(1 / 3)
    assert metrics["critic/advantages/min"] == pytest.approx(expected[2], rel=1e-4)
    assert metrics["critic/constant_groups_ratio"] == 0.0
    assert CUT.text not in shown
    # The update is that of a step in which nobody sampled it.
    without = one_step_config(tiny_model, problems, **excluding, **{N: 3})
    with prepared(tmp_path / "without", without, RIGHT, WRONG, WRONG) as session:
        loop.run_step(session, 1)
        for name, weights in _policy(session.store_run).items():
            torch.testing.assert_close(policy[name], weights, rtol=0, atol=1e-7)


def test_a_step_fails_where_the_config_says_so_or_nothing_is_graded(
    tmp_path: Path, tiny_model: Path, problems: Path, excluding: dict[str, Any]
) -> None:
    failing = one_step_config(tiny_model, problems, **{**excluding, "reward_model.on_failure": "fail"})
    with (
        prepared(tmp_path / "fail", failing, RIGHT, CUT) as session,
        pytest.raises(EngineError, match="rollout 000001/train-0000000, sample 1: the judge is down"),
    ):
        loop.run_step(session, 1)
    with (
        prepared(tmp_path / "all", one_step_config(tiny_model, problems, **excluding), CUT) as session,
        pytest.raises(EngineError, match=r"2 of 2 completions could not be graded; rollout .*, sample 0: .*is down"),
    ):
        loop.run_step(session, 1)


def test_a_group_is_told_to_teach_by_those_of_it_that_were_graded(
    tmp_path: Path, tiny_model: Path, excluding: dict[str, Any]
) -> None:
    problems = write_problems(tmp_path / "problems.jsonl", 3)
    options = {N: 3, "algorithm.filter_groups.enable": True, "data.train_batch_size": 1}
    config = one_step_config(tiny_model, problems, **excluding, **options)
    # The first group has one reward, of WRONG; the second would be told apart.
    with prepared(tmp_path, config, WRONG, CUT, WRONG, RIGHT, CUT, WRONG) as session:
        loop.run_step(session, 1)
        rows, rewards = (
            _trajectories(session.store_run),
            table_rows(session.store_run, "reward", "rewards", schemas.REWARDS),
        )
    assert [row["reward"] for row in rewards] == [1.0, None, 0.0]
    assert [row["group_size"] for row in rows] == [2, None, 2]


def _in_rounds(problems: Path, tiny_model: Path, excluding: dict[str, Any]) -> RunConfig:
    options = {N: 3, "algorithm.filter_groups.enable": True, "data.train_batch_size": 1}
    return one_step_config(tiny_model, problems, **excluding, **options)


@pytest.mark.parametrize(
    ("last", "kept"),
    [
        ((RIGHT, CUT, WRONG), [1.0, None, 0.0]),
        # Nothing teaches: what is kept is a round that has rewards.
        ((WRONG, CUT, WRONG), [None, None, None, 0.0, None, 0.0]),
    ],
)
def test_a_round_without_a_graded_completion_does_not_end_the_step(
    tmp_path: Path, tiny_model: Path, excluding: dict[str, Any], last: tuple[Completion, ...], kept: list[float | None]
) -> None:
    config = _in_rounds(write_problems(tmp_path / "problems.jsonl", 3), tiny_model, excluding)
    # The first round has one group, the second two.
    with prepared(tmp_path, config, CUT, CUT, CUT, *last) as session:
        loop.run_step(session, 1)
        rewards = table_rows(session.store_run, "reward", "rewards", schemas.REWARDS)
    assert [row["reward"] for row in rewards] == kept


def test_rounds_without_any_graded_completion_end_the_step(
    tmp_path: Path, tiny_model: Path, excluding: dict[str, Any]
) -> None:
    config = _in_rounds(write_problems(tmp_path / "problems.jsonl", 3), tiny_model, excluding)
    said = r"9 of 9 completions could not be graded; rollout .*, sample 0: .*is down; submit again once the service"
    with prepared(tmp_path, config, CUT) as session, pytest.raises(EngineError, match=said):
        loop.run_step(session, 1)


def test_correction_weights_have_a_row_for_it(
    tmp_path: Path, tiny_model: Path, problems: Path, excluding: dict[str, Any]
) -> None:
    options = {"algorithm.rollout_correction.bypass_mode": False, "algorithm.rollout_correction.rollout_is": "token"}
    config = one_step_config(tiny_model, problems, **excluding, **options, **{N: 3})
    with prepared(tmp_path, config, CUT, RIGHT, WRONG) as session:
        loop.run_step(session, 1)
        weighed = table_rows(session.store_run, "advantage", "importance_weights", schemas.IMPORTANCE_WEIGHTS)
    assert weighed[0]["importance_weights"] == [1.0] * 6
    assert all(weight != 1.0 for row in weighed[1:] for weight in row["importance_weights"])


def test_without_the_reward_that_a_group_is_compared_with_none_of_it_is_learnt(
    tmp_path: Path, tiny_model: Path, excluding: dict[str, Any]
) -> None:
    problems = write_problems(tmp_path / "problems.jsonl", 2)
    config = one_step_config(
        tiny_model, problems, **excluding, **{ESTIMATOR: "remax", N: 2, "data.train_batch_size": 2}
    )
    # The greedy completions are the first that are sampled in each step: CUT for one prompt, RIGHT for the other.
    with prepared(tmp_path, config, CUT, RIGHT, RIGHT, RIGHT, WRONG, WRONG) as session:
        loop.run_step(session, 1)
        rows, greedy = (
            _trajectories(session.store_run),
            table_rows(session.store_run, "reward", "greedy_rewards", schemas.REWARDS),
        )
    ungraded = {row["group_id"] for row in greedy if row["reward"] is None}
    assert len(ungraded) == 1
    assert {row["group_id"] for row in rows if not any(row["loss_mask"])} == ungraded


class _Endpoint(BaseHTTPRequestHandler):
    """Answers 503 for CUT, and 1 for everything else."""

    def do_POST(self) -> None:
        (row,) = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["rows"]
        body = json.dumps({"rewards": [1.0]}).encode()
        self.send_response(503 if row["completion"] == CUT.text else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Endpoint) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/score"
        server.shutdown()


def test_the_part_of_a_mix_that_could_be_graded_is_kept(
    tmp_path: Path, tiny_model: Path, problems: Path, url: str
) -> None:
    options = {
        "reward_model.weights": {"rule": 1.0, "api": 0.5},
        "reward_model.url": url,
        "reward_model.batch_size": 1,
        "reward_model.retries": 0,
        "reward_model.on_failure": "exclude",
        ESTIMATOR: "gdpo",
        N: 3,
    }
    with prepared(tmp_path, one_step_config(tiny_model, problems, **options), RIGHT, CUT, WRONG) as session:
        loop.run_step(session, 1)
        rewards = table_rows(session.store_run, "reward", "rewards", schemas.REWARDS)
        rows = _trajectories(session.store_run)
    assert [row["reward"] for row in rewards] == [1.5, None, 0.5]
    assert [dict(row["reward_breakdown"]) for row in rewards] == [
        {"rule": 1.0, "api": 1.0},
        {"rule": 0.0},
        {"rule": 0.0, "api": 1.0},
    ]
    assert "api: " in rewards[1]["error"]
    assert "expected status 200, got 503" in rewards[1]["error"]
    assert [any(row["loss_mask"]) for row in rows] == [True, False, True]
