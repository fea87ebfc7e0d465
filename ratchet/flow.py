"""The declarative form of a run: which parts it is made of, and nothing about order or placement.

A flow is data. It names the same config keys as a YAML file, so a run can be declared either way.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar


def _sets(key: str, default: Any = MISSING) -> Any:
    """Return a field that sets the config key `key`; without a default it must be given."""
    return field(default=default, metadata={"key": key})


class Part:
    """One part of a flow: its fields set config keys."""

    name: ClassVar[str]
    name_key: ClassVar[str | None] = None
    """Config key that the part's name sets."""

    def keys(self) -> dict[str, Any]:
        """Return config key -> value for everything that this part sets."""
        named = {self.name_key: self.name} if self.name_key else {}
        declared: Any = self
        return named | {one.metadata["key"]: getattr(self, one.name) for one in fields(declared)}


_MODEL = "actor_rollout_ref.model.path"
_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True, kw_only=True)
class HFRollout(Part):
    """Sample with Hugging Face transformers."""

    name: ClassVar[str] = "hf"
    name_key: ClassVar[str | None] = f"{_ROLLOUT}.name"
    model: str = _sets(_MODEL)
    temperature: float = _sets(f"{_ROLLOUT}.temperature", 1.0)
    n: int = _sets(f"{_ROLLOUT}.n", 8)
    max_tokens: int = _sets("data.max_response_length", 512)


@dataclass(frozen=True, kw_only=True)
class VLLMRollout(HFRollout):
    """Sample with vLLM."""

    name: ClassVar[str] = "vllm"
    gpu_memory_utilization: float | None = _sets(f"{_ROLLOUT}.gpu_memory_utilization", None)
    tensor_parallel_size: int = _sets(f"{_ROLLOUT}.tensor_model_parallel_size", 1)
    max_num_seqs: int = _sets(f"{_ROLLOUT}.max_num_seqs", 256)
    max_num_batched_tokens: int = _sets(f"{_ROLLOUT}.max_num_batched_tokens", 8192)
    enforce_eager: bool | None = _sets(f"{_ROLLOUT}.enforce_eager", None)


@dataclass(frozen=True, kw_only=True)
class GSM8KReward(Part):
    """Grade GSM8K answers; `mode` says how an answer is read."""

    name: ClassVar[str] = "gsm8k"
    mode: str = _sets("reward_model.gsm8k_mode", "default")


@dataclass(frozen=True, kw_only=True)
class GRPOAdvantage(Part):
    """Group-relative advantages (arXiv:2402.03300)."""

    name: ClassVar[str] = "grpo"
    name_key: ClassVar[str | None] = "algorithm.adv_estimator"
    norm_adv_by_std: bool = _sets("algorithm.norm_adv_by_std_in_grpo", True)


@dataclass(frozen=True, kw_only=True)
class FSDPPolicyUpdate(Part):
    """Update the policy with FSDP2 and the clipped PPO loss."""

    name: ClassVar[str] = "fsdp"
    lr: float = _sets(f"{_ACTOR}.optim.lr", 1e-6)
    grad_clip: float = _sets(f"{_ACTOR}.grad_clip", 1.0)
    ppo_epochs: int = _sets(f"{_ACTOR}.ppo_epochs", 1)
    clip_ratio_low: float = _sets(f"{_ACTOR}.clip_ratio_low", 0.2)
    clip_ratio_high: float = _sets(f"{_ACTOR}.clip_ratio_high", 0.2)
    loss_agg_mode: str = _sets(f"{_ACTOR}.loss_agg_mode", "token-mean")


@dataclass(frozen=True, kw_only=True)
class RLDataFlow:
    """The parts of a run. `config()` turns them into the run's config.

    Example: RLDataFlow(rollout=HFRollout(model="./model"), reward=GSM8KReward(), advantage=GRPOAdvantage(),
    policy_update=FSDPPolicyUpdate(lr=1e-5)).
    """

    rollout: HFRollout
    """Or VLLMRollout."""
    reward: GSM8KReward = field(default_factory=GSM8KReward)
    advantage: GRPOAdvantage = field(default_factory=GRPOAdvantage)
    policy_update: FSDPPolicyUpdate = field(default_factory=FSDPPolicyUpdate)

    def config(self, config: Mapping[str, Any] | None = None) -> Any:
        """Return the RunConfig of these parts plus `config`, a nested mapping of the remaining keys.

        A key that `config` sets to another value than the parts do is a ConfigError.
        """
        from ratchet.config.load import copy_tree, parse_config, section_of
        from ratchet.errors import ConfigError

        tree = copy_tree(config or {})
        for part in (self.rollout, self.reward, self.advantage, self.policy_update):
            for key, value in part.keys().items():
                section, name = section_of(tree, key, what=key, place=" in the config")
                present = section.setdefault(name, value)
                if present != value:
                    raise ConfigError(f"{key} is {present!r} in the config and {value!r} in {type(part).__name__}")
        return parse_config(tree, source="the flow")
