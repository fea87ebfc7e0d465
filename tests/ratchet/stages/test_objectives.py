"""What each objective adds to a step: greedy baselines, rounds, controllers, corrections, token rewards."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ratchet.algorithms.catalog import ADVANTAGES, POLICY_LOSSES, Catalog
from ratchet.data import schemas
from ratchet.engines.sampler import Completion
from ratchet.grains import loop
from ratchet.store.artifacts import read_bytes
from ratchet.store.run import Run
from tests.runs import (
    EMPTY,
    RIGHT,
    WRONG,
    ScriptedSampler,
    one_step_config,
    prepared,
    table_rows,
    use_sampler,
    write_problems,
)

N = "actor_rollout_ref.rollout.n"
ESTIMATOR = "algorithm.adv_estimator"


def _advantages(run: Run, step: int = 1) -> list[list[float]]:
    return [row["advantages"] for row in table_rows(run, "advantage", "trajectories", schemas.TRAJECTORIES, step)]


def test_remax_compares_with_a_greedy_completion_of_the_same_prompt(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    config = one_step_config(tiny_model, problems, **{ESTIMATOR: "remax", N: 2})
    # The scripted sampler answers the greedy request, the first of its call, with RIGHT.
    with prepared(tmp_path, config, RIGHT, WRONG) as session:
        loop.run_step(session, 1)
        run = session.store_run
    greedy = table_rows(run, "reward", "greedy_rewards", schemas.REWARDS)
    assert [(row["sample_index"], row["reward"]) for row in greedy] == [(-1, 1.0)]
    assert _advantages(run) == [[0.0, 0.0, 0.0], [-1.0, -1.0, -1.0]]


def test_groups_that_teach_nothing_are_replaced_until_one_does(tmp_path: Path, tiny_model: Path) -> None:
    # RIGHT answers problem 0 alone; every other group is wrong throughout.
    problems = write_problems(tmp_path / "problems.jsonl", 5)
    options = {N: 2, "algorithm.filter_groups.enable": True, "trainer.seed": 3}
    config = one_step_config(tiny_model, problems, **options)
    with prepared(tmp_path, config, RIGHT, WRONG) as session:
        loop.run_step(session, 1)
        run = session.store_run
    rollout = run.require("rollout", 1)
    rows = table_rows(run, "reward", "rewards", schemas.REWARDS)
    assert [(row["group_id"], row["reward"]) for row in rows] == [("000001/train-0000000", r) for r in (1.0, 0.0)]
    metrics = rollout.provenance.metrics
    assert metrics["filter_groups/kept_groups"] == 1
    assert metrics["filter_groups/sampled_groups"] > 1
    assert run.require("reward", 1).content.inputs["graded"] == rollout.content.outputs["graded"]


def test_a_step_without_a_group_that_teaches_keeps_its_first_round(tmp_path: Path, tiny_model: Path) -> None:
    problems = write_problems(tmp_path / "problems.jsonl", 5)
    options = {N: 2, "algorithm.filter_groups.enable": True, "data.train_batch_size": 2}
    config = one_step_config(tiny_model, problems, **options)
    with prepared(tmp_path, config, WRONG) as session:
        loop.run_step(session, 1)
        metrics = session.store_run.require("rollout", 1).provenance.metrics
        rows = table_rows(session.store_run, "rollout", "rollouts", schemas.ROLLOUTS)
    # All five prompts were drawn: 2, then the 3 that were left of the 4 asked for.
    assert (metrics["filter_groups/rounds"], metrics["filter_groups/sampled_groups"]) == (2, 5)
    assert metrics["filter_groups/kept_groups"] == 0
    assert len(rows) == 4


def test_sampling_rounds_end_where_the_config_says(tmp_path: Path, tiny_model: Path) -> None:
    problems = write_problems(tmp_path / "problems.jsonl", 5)
    options = {N: 2, "algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 1}
    with prepared(tmp_path, one_step_config(tiny_model, problems, **options), WRONG) as session:
        loop.run_step(session, 1)
        assert session.store_run.require("rollout", 1).provenance.metrics["filter_groups/rounds"] == 1


def test_an_adaptive_kl_coefficient_goes_on_from_step_to_step(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    options = {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.kl_ctrl.kl_coef": 0.05,
        "algorithm.kl_ctrl.horizon": 10,
        "algorithm.kl_ctrl.target_kl": 0.001,
        "trainer.total_training_steps": 2,
    }
    with prepared(tmp_path, one_step_config(tiny_model, problems, **options), RIGHT, WRONG) as session:
        for step in (1, 2):
            loop.run_step(session, step)
            # Nothing in memory goes from one step to the next.
            session.residents.drop()
            use_sampler(session, ScriptedSampler([RIGHT, WRONG]))
        run = session.store_run
    first, second = (run.require("advantage", step).provenance.metrics for step in (1, 2))
    assert first["actor/reward_kl_penalty_coeff"] == 0.05
    # arXiv:1909.08593, section 2.2: the error is clipped to 0.2, and there are 2 rollouts to a horizon of 10.
    error = max(-0.2, min(0.2, first["actor/reward_kl_penalty"] / 0.001 - 1))
    assert second["actor/reward_kl_penalty_coeff"] == pytest.approx(0.05 * (1 + error * 2 / 10))
    (state,) = read_bytes(run.store, run.require("advantage", 1).output("kl_controller"))
    assert second["actor/reward_kl_penalty_coeff"] in json.loads(state).values()


def test_rollout_correction_weighs_tokens_by_policy_over_sampler(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    options = {
        "algorithm.rollout_correction.bypass_mode": False,
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": 1.5,
    }
    with prepared(tmp_path, one_step_config(tiny_model, problems, **options), RIGHT, WRONG) as session:
        loop.run_step(session, 1)
        run = session.store_run
    sampled = table_rows(run, "rollout", "rollouts", schemas.ROLLOUTS)
    scored = table_rows(run, "policy_scores", "policy_scores", schemas.scores("policy"))
    weighed = table_rows(run, "advantage", "importance_weights", schemas.IMPORTANCE_WEIGHTS)
    for sample, score, row in zip(sampled, scored, weighed, strict=True):
        pairs = zip(score["policy_log_probs"], sample["sampler_log_probs"], strict=True)
        expected = [min(math.exp(policy - sampler), 1.5) for policy, sampler in pairs]
        assert row["importance_weights"] == pytest.approx(expected, rel=1e-4)
    metrics = run.require("advantage", 1).provenance.metrics
    assert any(name.startswith("rollout_corr/rollout_is_") for name in metrics)


def test_a_rejected_completion_is_left_out_of_the_loss(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    # The sampler claims to have been certain of tokens that the policy finds unlikely.
    certain = Completion(RIGHT.token_ids, [0.0, 0.0, 0.0], RIGHT.text, "stop")
    options = {
        N: 2,
        "algorithm.rollout_correction.bypass_mode": False,
        "algorithm.rollout_correction.rollout_rs": "seq_mean_k1",
        "algorithm.rollout_correction.rollout_rs_threshold": "0.999_1.001",
    }
    with prepared(tmp_path, one_step_config(tiny_model, problems, **options), certain, EMPTY) as session:
        loop.run_step(session, 1)
        rows = table_rows(session.store_run, "advantage", "trajectories", schemas.TRAJECTORIES)
    assert rows[0]["loss_mask"] == [False] * 3


def test_advantages_can_be_normalised_over_the_step(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    options = {N: 2, "algorithm.whiten_advantages": True, "algorithm.norm_adv_by_std_in_grpo": False}
    with prepared(tmp_path, one_step_config(tiny_model, problems, **options), RIGHT, WRONG) as session:
        loop.run_step(session, 1)
        advantages = _advantages(session.store_run)
    # Three tokens of 1/2 and three of -1/2: mean 0, variance (n - 1) 6/4 / 5 = 0.3.
    assert advantages == [pytest.approx([sign * 0.5 / math.sqrt(0.3)] * 3) for sign in (1, -1)]


def test_rewards_of_single_tokens_reach_the_advantages(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def per_token(data):\n"
        "    rows = []\n"
        "    for item in data:\n"
        "        length = int(item.batch['attention_mask'][len(item.batch['prompts']):].sum())\n"
        "        rows.append([float(place + 1) for place in range(length)])\n"
        "    return rows\n"
    )
    options: dict[str, Any] = {
        ESTIMATOR: "reinforce_plus_plus",
        "custom_reward_function.path": str(tmp_path / "mine.py"),
        "custom_reward_function.name": "per_token",
    }
    with prepared(tmp_path, one_step_config(tiny_model, problems, **options), RIGHT, WRONG) as session:
        loop.run_step(session, 1)
        rows = table_rows(session.store_run, "advantage", "trajectories", schemas.TRAJECTORIES)
    assert [row["token_rewards"] for row in rows] == [[1.0, 2.0, 3.0]] * 2
    # Without a discount a token's return is the sum of what comes from it on.
    assert [row["returns"] for row in rows] == [[6.0, 5.0, 3.0]] * 2


def _own(catalog: Catalog) -> list[str]:
    """Names that Ratchet brings; a function in place of a module's name is one that another test registered."""
    return [name for name in catalog.names() if isinstance(catalog.get(name).home, str)]


@pytest.mark.parametrize("estimator", _own(ADVANTAGES))
def test_every_estimator_trains_a_step(estimator: str, tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    options: dict[str, Any] = {"gdpo": {"algorithm.gdpo_reward_keys": ["rule"]}}.get(estimator, {})
    config = one_step_config(tiny_model, problems, **{ESTIMATOR: estimator, N: 4, **options})
    with prepared(tmp_path, config, RIGHT, WRONG, EMPTY, WRONG) as session:
        loop.run_step(session, 1)
        advantages = _advantages(session.store_run)
    assert [len(row) for row in advantages] == [3, 3, 0, 3]
    assert sum(advantages[0]) > sum(advantages[1])


@pytest.mark.parametrize("mode", _own(POLICY_LOSSES))
def test_every_policy_loss_trains_a_step(mode: str, tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    actor = "actor_rollout_ref.actor"
    options: dict[str, Any] = {
        N: 2,
        # What moves the weights is the policy loss alone.
        f"{actor}.entropy_coeff": 0.0,
        f"{actor}.policy_loss.loss_mode": mode,
        f"{actor}.ppo_epochs": 2,
        # What the scripted sampler says of its tokens is not what the policy thinks of them.
        "algorithm.rollout_correction.bypass_mode": False,
        **({f"{actor}.policy_loss.dro_beta": 0.1} if mode == "dro" else {}),
    }
    with prepared(tmp_path, one_step_config(tiny_model, problems, **options), RIGHT, WRONG) as session:
        loop.run_step(session, 1)
        metrics = session.store_run.require("policy_update", 1).provenance.metrics
    assert math.isfinite(metrics["actor/pg_loss"])
    assert metrics["actor/grad_norm"] > 1e-3
