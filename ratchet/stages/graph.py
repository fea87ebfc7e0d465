"""The stages of one run, as its objective asks for them; those of a step are derived backwards from its update."""

from ratchet.config import RunConfig
from ratchet.stages.advantage import Advantage
from ratchet.stages.base import Stage
from ratchet.stages.critic_update import CriticUpdate
from ratchet.stages.data_stage import DataStage
from ratchet.stages.evaluate import Evaluate
from ratchet.stages.evaluate_offline import EvaluateOffline
from ratchet.stages.examples import Examples
from ratchet.stages.offline_update import OfflineUpdate
from ratchet.stages.policy_update import PolicyUpdate
from ratchet.stages.preprocess import Preprocess
from ratchet.stages.reward import Reward
from ratchet.stages.rollout import Rollout
from ratchet.stages.scores import PairScores, Scores
from ratchet.stages.values import Values
from ratchet.store.run import POLICY_UPDATE

_SAMPLED: tuple[Stage, ...] = (
    Rollout(),
    Reward(),
    Scores("policy"),
    Scores("reference"),
    Values(),
    Advantage(),
    CriticUpdate(),
    PolicyUpdate(),
)
_OFFLINE: tuple[Stage, ...] = (PairScores(), OfflineUpdate())


def data_stages(config: RunConfig) -> list[DataStage]:
    """Return the stages that commit what the run learns from and what is held out, the training data first."""
    kind = Examples if config.is_offline else Preprocess
    stages: list[DataStage] = [kind("train")]
    if config.data.val_files:
        stages.append(kind("val"))
    if config.algorithm.objective == "hybrid":
        stages.append(Examples("sft"))
    return stages


def step_stages(config: RunConfig) -> list[Stage]:
    """Return the stages of a step, each after those it needs; a stage that nothing needs is not among them."""
    known = {stage.name: stage for stage in (_OFFLINE if config.is_offline else _SAMPLED)}
    ordered: list[Stage] = []

    def visit(stage: Stage) -> None:
        for name in stage.needs(config):
            visit(known[name])
        if stage not in ordered:
            ordered.append(stage)

    visit(known[POLICY_UPDATE])
    return ordered


def step_stage(name: str, config: RunConfig) -> Stage | None:
    """Return the stage of that name, or None if this config's step does without it."""
    return next((stage for stage in step_stages(config) if stage.name == name), None)


def evaluation(config: RunConfig) -> Stage:
    """Return the stage that measures a policy version on what is held out."""
    return EvaluateOffline() if config.is_offline else Evaluate()
