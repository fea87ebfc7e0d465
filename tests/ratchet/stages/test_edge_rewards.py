"""Rewards, controllers and scores where rounding or an absent table once decided."""

import math
from pathlib import Path
from typing import Any

import pytest

from ratchet.data import schemas
from ratchet.engines.sampler import Completion
from ratchet.errors import ConfigError, DataError, NotCommittedError
from ratchet.grains import entry, loop
from ratchet.grains.tasks import PreflightTask
from ratchet.stages.base import Input
from tests.runs import EMPTY, RIGHT, WRONG, one_step_config, prepared, table_rows

N = "actor_rollout_ref.rollout.n"


def test_an_empty_completion_among_equal_rewards_teaches_nothing(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    (tmp_path / "mine.py").write_text("def compute_score(solution_str):\n    return 0.9\n")
    options: dict[str, Any] = {N: 8, "custom_reward_function.path": str(tmp_path / "mine.py")}
    with prepared(tmp_path, one_step_config(tiny_model, problems, **options), *[RIGHT] * 6, EMPTY, EMPTY) as session:
        loop.run_step(session, 1)
        rows = table_rows(session.store_run, "advantage", "trajectories", schemas.TRAJECTORIES)
        metrics = session.store_run.require("advantage", 1).provenance.metrics
    assert {value for row in rows for value in row["advantages"]} == {0.0}
    assert {row["group_reward_std"] for row in rows} == {0.0}
    assert metrics["critic/constant_groups_ratio"] == 1.0


def test_an_adaptive_coefficient_of_0_is_refused(tiny_model: Path, problems: Path) -> None:
    options = {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.kl_ctrl.kl_coef": 0.0,
    }
    with pytest.raises(ConfigError, match=r"kl_ctrl\.kl_coef is 0"):
        one_step_config(tiny_model, problems, **options)


def test_an_output_that_a_stage_has_not_is_named(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    with prepared(tmp_path, one_step_config(tiny_model, problems), RIGHT, WRONG) as session:
        loop.run_step(session, 1)
        missing = Input(session.store_run.require("advantage", 1), "kl_controller")
        with pytest.raises(NotCommittedError, match="step-000001/advantage is committed without kl_controller"):
            _ = missing.digest


def test_the_difference_between_sampler_and_policy_is_told_also_where_the_policy_scores(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    # A sampler that claims to have been certain of every token.
    certain = Completion(RIGHT.token_ids, [0.0] * 3, RIGHT.text, "stop")
    options = {"algorithm.rollout_correction.bypass_mode": False}
    with prepared(tmp_path, one_step_config(tiny_model, problems, **options), certain, certain) as session:
        loop.run_step(session, 1)
        run = session.store_run
    told = run.require("advantage", 1).provenance.metrics["training/rollout_probs_diff_mean"]
    scores = table_rows(run, "policy_scores", "policy_scores", schemas.scores("policy"))
    differences = [1.0 - math.exp(value) for row in scores for value in row["policy_log_probs"]]
    assert told == pytest.approx(sum(differences) / len(differences), rel=1e-4)
    assert not any("rollout_probs_diff" in name for name in run.require("policy_update", 1).provenance.metrics)


def test_a_pipeline_without_a_critic_refuses_a_config_that_needs_one(tmp_path: Path) -> None:
    text = "algorithm:\n  adv_estimator: gae\n"
    with pytest.raises(ConfigError, match="use the pipeline ratchet-ppo-stages"):
        entry.preflight(
            PreflightTask(
                root=str(tmp_path), run_id="run", submission_id="job", config=text, grain="stage", has_critic=False
            )
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("estimator", ["optimal_token_baseline", "tir_optimal_token_baseline", "gae", "grpo"])
def test_a_step_of_empty_completions_trains_nothing(
    estimator: str, tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    config = one_step_config(tiny_model, problems, **{"algorithm.adv_estimator": estimator, N: 2})
    with prepared(tmp_path, config, EMPTY) as session:
        loop.run_step(session, 1)
        assert session.store_run.require("policy_update", 1).provenance.metrics["actor/skipped_mini_batches"] == 1.0


ESTIMATOR = """
from ratchet import register_advantage


@register_advantage("{name}")
def {name}(batch, options):
    {body}
"""


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("raises", "return {}['absent']", "advantages of step 1, by .*raises: KeyError: 'absent'"),
        ("leaves", "raise SystemExit(0)", "advantages of step 1, by .*leaves: SystemExit"),
        (
            "nothing",
            "return None",
            "expected a tuple of two tensors, .* got None",
        ),
        ("short", "return batch.values, batch.rewards", "expected a tuple of two tensors"),
    ],
)
def test_an_estimator_of_a_users_that_misbehaves_is_named(
    name: str, body: str, message: str, tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    (tmp_path / "mine.py").write_text(ESTIMATOR.format(name=name, body=body))
    options = {"code": [str(tmp_path / "mine.py")], "algorithm.adv_estimator": name}
    with (
        prepared(tmp_path, one_step_config(tiny_model, problems, **options), RIGHT, WRONG) as session,
        pytest.raises(DataError, match=message),
    ):
        loop.run_step(session, 1)
    assert session.store_run.manifest("advantage", 1) is None


def test_an_estimator_may_write_to_what_it_is_given(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    body = "shape = batch.token_rewards.clone(); batch.mask.zero_(); batch.token_rewards.zero_(); return shape, shape"
    (tmp_path / "mine.py").write_text(ESTIMATOR.format(name="writes", body=body))
    options = {"code": [str(tmp_path / "mine.py")], "algorithm.adv_estimator": "writes"}
    with prepared(tmp_path, one_step_config(tiny_model, problems, **options), RIGHT, WRONG) as session:
        loop.run_step(session, 1)
        rows = table_rows(session.store_run, "advantage", "trajectories", schemas.TRAJECTORIES)
    assert [row["advantages"] for row in rows] == [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    assert [row["token_rewards"] for row in rows] == [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]


def test_a_reward_that_ends_the_program_is_an_error(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    (tmp_path / "mine.py").write_text("def compute_score(solution_str):\n    raise SystemExit(0)\n")
    options = {"custom_reward_function.path": str(tmp_path / "mine.py")}
    with (
        prepared(tmp_path, one_step_config(tiny_model, problems, **options), RIGHT) as session,
        pytest.raises(DataError, match="raised SystemExit"),
    ):
        loop.run_step(session, 1)
