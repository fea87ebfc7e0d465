"""The stages of one step, derived backwards from what the policy update needs."""

from ratchet.config import RunConfig
from ratchet.stages.advantage import Advantage
from ratchet.stages.base import Stage
from ratchet.stages.critic_update import CriticUpdate
from ratchet.stages.policy_update import PolicyUpdate
from ratchet.stages.reward import Reward
from ratchet.stages.rollout import Rollout
from ratchet.stages.scores import Scores
from ratchet.stages.values import Values

_STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Rollout(),
        Reward(),
        Scores("policy"),
        Scores("reference"),
        Values(),
        Advantage(),
        CriticUpdate(),
        PolicyUpdate(),
    )
}


def step_stages(config: RunConfig) -> list[Stage]:
    """Return the stages of a step, each after those it needs; a stage that nothing needs is not among them."""
    ordered: list[Stage] = []

    def visit(stage: Stage) -> None:
        for name in stage.needs(config):
            visit(_STAGES[name])
        if stage not in ordered:
            ordered.append(stage)

    visit(_STAGES[PolicyUpdate.name])
    return ordered


def step_stage(name: str, config: RunConfig) -> Stage | None:
    """Return the stage of that name, or None if this config's step does without it."""
    return next((stage for stage in step_stages(config) if stage.name == name), None)
