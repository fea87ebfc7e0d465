"""How rewards become advantages: one class for each estimator, and what KL penalty goes with it.

Trap: a KL coefficient alone penalises in the loss; with a controller the penalty is in the reward, where an adaptive
coefficient makes sense, since it is taken before the advantages are.
"""

from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar

from ratchet.errors import ConfigError
from ratchet.flow.kl import COEFFICIENT, controller_keys, controller_of
from ratchet.flow.part import Part, part, sets
from ratchet.flow.registered import Registered

_ALGORITHM = "algorithm"
_ACTOR = "actor_rollout_ref.actor"
_FILTER = f"{_ALGORITHM}.filter_groups"


@part
class Advantage(Part):
    """What all estimators take."""

    name_key: ClassVar[str | None] = f"{_ALGORITHM}.adv_estimator"
    kl_coef: float = field(default=0.0, kw_only=True)
    """Weight of the KL to the reference in the loss; with `kl_ctrl` the penalty is in the reward instead."""
    kl_type: str = field(default="low_var_kl", kw_only=True)
    """How that KL is estimated: kl, abs, mse, low_var_kl (k1, k2, k3), each with + for the straight-through form."""
    kl_ctrl: Any = field(default=None, kw_only=True)
    """AdaptiveKLController or FixedKLController: penalises the KL in the reward with its coefficient."""
    whiten_advantages: bool = sets(f"{_ALGORITHM}.whiten_advantages", default=False, kw_only=True)
    """Normalise the advantages over all tokens of the step, as PPO is often run."""
    filter_groups: bool = sets(f"{_FILTER}.enable", default=False, kw_only=True)
    """DAPO's dynamic sampling: groups whose rewards are all equal are replaced by new ones."""
    filter_metric: str | None = sets(f"{_FILTER}.metric", default=None, kw_only=True)
    max_num_gen_batches: int = sets(f"{_FILTER}.max_num_gen_batches", default=0, kw_only=True)
    """Sampling rounds of one step at most; 0 goes on while prompts are left."""

    _controller: ClassVar[dict[str, Any]] = {}

    def __post_init__(self) -> None:
        if self.kl_ctrl is None:
            return
        found = controller_keys(self.kl_ctrl)
        # A controller moves as it is used; the flow says where it began.
        object.__setattr__(self, "_controller", found)
        initial = found[COEFFICIENT]
        if "kl_coef" in self.given and self.kl_coef != initial:
            raise ConfigError(
                f"{type(self).__name__}: kl_coef is {self.kl_coef} and the kl_ctrl begins with {initial}; leave "
                "kl_coef out, since a controller has its own"
            )

    def keys(self, *, given_only: bool = False) -> dict[str, Any]:
        found = super().keys(given_only=given_only)
        if self.kl_ctrl is not None:
            in_reward = {f"{_ALGORITHM}.use_kl_in_reward": True, f"{_ALGORITHM}.kl_penalty": self.kl_type}
            return found | in_reward | self._controller
        if "kl_coef" in self.given or not given_only:
            found[f"{_ACTOR}.use_kl_loss"] = self.kl_coef > 0
        if self.kl_coef > 0:
            found[f"{_ACTOR}.kl_loss_coef"] = self.kl_coef
        if "kl_type" in self.given or not given_only:
            found[f"{_ACTOR}.kl_loss_type"] = self.kl_type
        return found

    @classmethod
    def arguments(cls, value: Callable[[str], Any]) -> dict[str, Any]:
        found = super().arguments(value)
        if value(f"{_ALGORITHM}.use_kl_in_reward"):
            return found | {"kl_type": value(f"{_ALGORITHM}.kl_penalty"), "kl_ctrl": controller_of(value)}
        in_loss = {"kl_coef": value(f"{_ACTOR}.kl_loss_coef")} if value(f"{_ACTOR}.use_kl_loss") else {}
        return found | in_loss | {"kl_type": value(f"{_ACTOR}.kl_loss_type")}


@part
class GRPOAdvantage(Advantage):
    """Group-relative advantages (arXiv:2402.03300); without the standard deviation they are Dr. GRPO's."""

    name: ClassVar[str] = "grpo"
    kl_coef: float = 0.0
    kl_type: str = "low_var_kl"
    kl_ctrl: Any = None
    gamma: float = sets(f"{_ALGORITHM}.gamma", default=1.0)
    """Without effect on an outcome reward; kept so that a config says the same for every estimator."""
    lam: float = sets(f"{_ALGORITHM}.lam", default=1.0)
    norm_adv_by_std: bool = sets(f"{_ALGORITHM}.norm_adv_by_std_in_grpo", default=True)


@part
class DrGRPOAdvantage(GRPOAdvantage):
    """GRPO without the division by the group's standard deviation (arXiv:2503.20783).

    Its loss is summed over tokens: FSDPPolicyUpdate(loss_agg_mode="seq-mean-token-sum-norm").
    """

    norm_adv_by_std: bool = sets(f"{_ALGORITHM}.norm_adv_by_std_in_grpo", default=False)

    def keys(self, *, given_only: bool = False) -> dict[str, Any]:
        return super().keys(given_only=given_only) | {f"{_ALGORITHM}.norm_adv_by_std_in_grpo": self.norm_adv_by_std}


@part
class GAEAdvantage(Advantage):
    """Generalised advantage estimation (arXiv:1506.02438): PPO. A critic is trained beside the policy."""

    name: ClassVar[str] = "gae"
    gamma: float = sets(f"{_ALGORITHM}.gamma", default=1.0)
    lam: float = sets(f"{_ALGORITHM}.lam", default=1.0)
    critic_model: str = sets("critic.model.path", default="")
    """Hub id or folder of the critic's backbone; the policy's where it is not given."""
    critic_lr: float = sets("critic.optim.lr", default=1e-5)
    critic_warmup: int = sets("trainer.critic_warmup", default=0)
    """Steps at the start in which only the critic learns."""
    critic_epochs: int | None = None
    """The policy's where it is not given, as is critic_mini_batch_size."""
    critic_mini_batch_size: int | None = None
    critic_micro_batch_size: int | None = sets("critic.ppo_micro_batch_size_per_gpu", default=None)
    critic_grad_clip: float = sets("critic.grad_clip", default=1.0)
    cliprange_value: float = sets("critic.cliprange_value", default=0.5)
    """How far a value may move before its loss is clipped."""

    def keys(self, *, given_only: bool = False) -> dict[str, Any]:
        found = super().keys(given_only=given_only)
        like = {key: getattr(self, name) for name, key in _LIKE_THE_POLICY.items()}
        return found | {f"critic.{key}": value for key, value in like.items() if value is not None}

    @classmethod
    def arguments(cls, value: Callable[[str], Any]) -> dict[str, Any]:
        found = super().arguments(value)
        for name, key in _LIKE_THE_POLICY.items():
            own = value(f"critic.{key}")
            found[name] = None if own == value(f"{_ACTOR}.{key}") else own
        return found


_LIKE_THE_POLICY = {"critic_epochs": "ppo_epochs", "critic_mini_batch_size": "ppo_mini_batch_size"}


@part
class RLOOAdvantage(Advantage):
    """Leave-one-out baseline (arXiv:2402.14740)."""

    name: ClassVar[str] = "rloo"


@part
class ReinforcePlusPlusAdvantage(Advantage):
    """REINFORCE++ (arXiv:2501.03262)."""

    name: ClassVar[str] = "reinforce_plus_plus"
    gamma: float = sets(f"{_ALGORITHM}.gamma", default=1.0)


@part
class ReinforcePlusPlusBaselineAdvantage(Advantage):
    """REINFORCE++ with the group's mean as baseline (arXiv:2501.03262)."""

    name: ClassVar[str] = "reinforce_plus_plus_baseline"


@part
class ReMaxAdvantage(Advantage):
    """The reward of the greedy completion as baseline (arXiv:2310.10505)."""

    name: ClassVar[str] = "remax"


@part
class OPOAdvantage(Advantage):
    """Length-weighted baseline (arXiv:2505.23585)."""

    name: ClassVar[str] = "opo"


@part
class GPGAdvantage(Advantage):
    """Group policy gradient (arXiv:2504.02546); it goes with FSDPPolicyUpdate(policy_loss="gpg")."""

    name: ClassVar[str] = "gpg"


@part
class PassKAdvantage(Advantage):
    """Only the best of a group is rewarded, by its lead over the second (pass@k)."""

    name: ClassVar[str] = "grpo_passk"
    norm_adv_by_std: bool = sets(f"{_ALGORITHM}.norm_adv_by_std_in_grpo", default=True)


@part
class GDPOAdvantage(Advantage):
    """Parts of the reward are normalised each on its own, then added with weights (arXiv:2601.05242)."""

    name: ClassVar[str] = "gdpo"
    reward_keys: tuple[str, ...] = sets(f"{_ALGORITHM}.gdpo_reward_keys", default=())
    reward_weights: tuple[float, ...] = sets(f"{_ALGORITHM}.gdpo_reward_weights", default=())


@part
class OptimalTokenBaselineAdvantage(Advantage):
    """The baseline of least variance at each token; the policy scores the rollouts for it."""

    name: ClassVar[str] = "optimal_token_baseline"


@part
class TIROptimalTokenBaselineAdvantage(Advantage):
    """The optimal token baseline where completions hold several turns."""

    name: ClassVar[str] = "tir_optimal_token_baseline"


@part
class CustomAdvantage(Advantage):
    """An estimator that was registered with @register_advantage, by its name or by the function itself."""

    name: Any  # type: ignore[misc]
    gamma: float = sets(f"{_ALGORITHM}.gamma", default=1.0)
    lam: float = sets(f"{_ALGORITHM}.lam", default=1.0)
    _registered: ClassVar[Registered]

    def __post_init__(self) -> None:
        Advantage.__post_init__(self)
        found = Registered.advantage(self.name)
        object.__setattr__(self, "_registered", found)
        object.__setattr__(self, "name", found.name)

    @classmethod
    def arguments(cls, value: Callable[[str], Any]) -> dict[str, Any]:
        return super().arguments(value) | {"name": value(f"{_ALGORITHM}.adv_estimator")}

    def code(self) -> list[dict[str, str]]:
        return self._registered.code()

    def stays_here(self) -> str | None:
        return self._registered.stays_here()


_KINDS: dict[str, type[Advantage]] = {
    one.name: one
    for one in (
        GRPOAdvantage,
        GAEAdvantage,
        RLOOAdvantage,
        ReinforcePlusPlusAdvantage,
        ReinforcePlusPlusBaselineAdvantage,
        ReMaxAdvantage,
        OPOAdvantage,
        GPGAdvantage,
        PassKAdvantage,
        GDPOAdvantage,
        OptimalTokenBaselineAdvantage,
        TIROptimalTokenBaselineAdvantage,
    )
}


def as_advantage(thing: Any) -> Advantage:
    """Return the advantage that stands for what was passed to a flow."""
    if isinstance(thing, Advantage):
        return thing
    if isinstance(thing, (type, str, Part)) or not callable(thing):
        raise ConfigError(f"advantage is {thing!r}: expected an advantage such as GRPOAdvantage(), or a function")
    return CustomAdvantage(thing)


def advantage_from_config(config: Any, stated: frozenset[str] = frozenset()) -> Advantage:
    """Return the advantage that a config declares."""
    return _KINDS.get(config.algorithm.adv_estimator, CustomAdvantage).from_config(config, stated)
