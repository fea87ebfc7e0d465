"""The stages of a step follow from what the update needs."""

import pytest

from ratchet.config import load_config
from ratchet.stages.graph import step_stages

GROUPED = ["rollout", "reward", "advantage", "policy_update"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.adv_estimator=grpo"], GROUPED),
        (["algorithm.adv_estimator=rloo"], GROUPED),
        (
            ["actor_rollout_ref.actor.use_kl_loss=true"],
            ["rollout", "reward", "advantage", "reference_scores", "policy_update"],
        ),
        (
            ["algorithm.use_kl_in_reward=true"],
            ["rollout", "reward", "reference_scores", "advantage", "policy_update"],
        ),
        (
            ["algorithm.adv_estimator=gae"],
            ["rollout", "reward", "values", "advantage", "critic_update", "policy_update"],
        ),
        (
            ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"],
            ["rollout", "reward", "reference_scores", "values", "advantage", "critic_update", "policy_update"],
        ),
        (
            ["algorithm.adv_estimator=optimal_token_baseline"],
            ["rollout", "reward", "policy_scores", "advantage", "policy_update"],
        ),
        (
            ["algorithm.rollout_correction.bypass_mode=false"],
            ["rollout", "reward", "policy_scores", "advantage", "policy_update"],
        ),
    ],
    ids=lambda value: " ".join(value) if value and "=" in value[0] else "",
)
def test_a_step_has_the_stages_that_its_update_needs(overrides: list[str], expected: list[str]) -> None:
    config = load_config(overrides=["actor_rollout_ref.rollout.n=4", *overrides])
    assert [stage.name for stage in step_stages(config)] == expected
