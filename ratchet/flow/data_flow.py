"""RLDataFlow: the declarative form of a run that learns from rewards, or from examples alone."""

from collections.abc import Sequence
from typing import Any, Self

from ratchet.errors import ConfigError
from ratchet.flow.advantage import Advantage, GRPOAdvantage, advantage_from_config, as_advantage
from ratchet.flow.base import DataFlow
from ratchet.flow.offline import DPOAdvantage, OfflineUpdate, check_offline, offline_update
from ratchet.flow.part import Part
from ratchet.flow.policy_update import FSDPPolicyUpdate, PolicyUpdate, as_policy_update
from ratchet.flow.reward import GSM8KReward, as_reward, reward_from_config
from ratchet.flow.rollout import ROLLOUTS, Rollout


class RLDataFlow(DataFlow):
    """The parts of a run.

    Example: RLDataFlow(rollout=HFRollout("./model"), reward=GSM8KReward(), advantage=GRPOAdvantage(),
    policy_update=FSDPPolicyUpdate(lr=1e-5)).

    `reward` is a reward part, or a user's object or function; `advantage` an advantage part, or a function that
    @register_advantage decorates. With SFTPolicyUpdate, DPOPolicyUpdate or RewardModelUpdate `rollout` is None, and
    there is no reward and no advantage. `code` names further Python files that register something: they travel with
    the run.
    """

    def __init__(
        self,
        *,
        rollout: Rollout | None = None,
        reward: Any = None,
        advantage: Any = None,
        policy_update: PolicyUpdate | None = None,
        code: Sequence[Any] = (),
    ) -> None:
        self.rollout = rollout
        self.reward = reward
        self.policy_update = as_policy_update(policy_update)
        self.advantage: Advantage | DPOAdvantage | None
        if isinstance(self.policy_update, OfflineUpdate):
            self.advantage = check_offline(self.policy_update, rollout=rollout, reward=reward, advantage=advantage)
            graded, objective = None, self.policy_update.name
        else:
            if not isinstance(rollout, Rollout):
                raise ConfigError(
                    f"rollout is {rollout!r}: expected VLLMRollout(...) or HFRollout(...); SFTPolicyUpdate, "
                    "DPOPolicyUpdate and RewardModelUpdate need none"
                )
            self.reward = GSM8KReward() if reward is None else reward
            self.advantage = rl_advantage(advantage)
            graded, objective = rl_reward(self.reward), "rl"
            self.live_reward = graded.live
        parts = {"rollout": rollout, "reward": graded, "advantage": self.advantage, "policy_update": self.policy_update}
        self._hold(objective, parts, code)

    @classmethod
    def _declared(cls, config: Any, stated: frozenset[str]) -> Self:
        code = [entry.model_dump() for entry in config.code]
        if config.algorithm.objective == "hybrid":
            raise ConfigError("algorithm.objective is hybrid: HybridDataFlow.from_config reads it")
        if config.is_offline:
            return cls(policy_update=offline_update(config, stated), code=code)
        return cls(**rl_parts(config, stated), code=code)


def rl_parts(config: Any, stated: frozenset[str]) -> dict[str, Any]:
    """Return role -> part of the four parts that a config with rollouts declares."""
    return {
        "rollout": ROLLOUTS[config.actor_rollout_ref.rollout.name].from_config(config, stated),
        "reward": reward_from_config(config, stated),
        "advantage": advantage_from_config(config, stated),
        "policy_update": FSDPPolicyUpdate.from_config(config, stated),
    }


def rl_advantage(thing: Any) -> Advantage:
    """Return the advantage that was passed to a flow with rollouts; None is GRPO's."""
    if isinstance(thing, DPOAdvantage):
        raise ConfigError("advantage is DPOAdvantage(): it goes with policy_update=DPOPolicyUpdate(...), rollout=None")
    return GRPOAdvantage() if thing is None else as_advantage(thing)


def rl_reward(thing: Any) -> Part:
    """Return the reward that stands for what was passed to a flow with rollouts."""
    found = as_reward(thing)
    if isinstance(found, (Rollout, Advantage, DPOAdvantage, PolicyUpdate)):
        raise ConfigError(f"reward is {found!r}: expected a reward")
    return found
