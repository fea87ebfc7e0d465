"""The declarative form of a run: which parts it is made of, and nothing about order or placement.

A flow is data. It names the same config keys as a YAML file, so a run can be declared either way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class HFRollout:
    """Sample with Hugging Face transformers."""

    name: ClassVar[str] = "hf"
    model: str
    temperature: float = 1.0
    n: int = 8
    max_tokens: int = 512

    def keys(self) -> dict[str, Any]:
        """Config keys that this part sets."""
        rollout = "actor_rollout_ref.rollout"
        return {
            f"{rollout}.name": self.name,
            f"{rollout}.temperature": self.temperature,
            f"{rollout}.n": self.n,
            "actor_rollout_ref.model.path": self.model,
            "data.max_response_length": self.max_tokens,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMRollout:
    """Sample with vLLM."""

    name: ClassVar[str] = "vllm"
    model: str
    temperature: float = 1.0
    n: int = 8
    max_tokens: int = 512
    gpu_memory_utilization: float = 0.5
    tensor_parallel_size: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enforce_eager: bool = False

    def keys(self) -> dict[str, Any]:
        """Config keys that this part sets."""
        rollout = "actor_rollout_ref.rollout"
        return {
            f"{rollout}.name": self.name,
            f"{rollout}.temperature": self.temperature,
            f"{rollout}.n": self.n,
            f"{rollout}.gpu_memory_utilization": self.gpu_memory_utilization,
            f"{rollout}.tensor_model_parallel_size": self.tensor_parallel_size,
            f"{rollout}.max_num_seqs": self.max_num_seqs,
            f"{rollout}.max_num_batched_tokens": self.max_num_batched_tokens,
            f"{rollout}.enforce_eager": self.enforce_eager,
            "actor_rollout_ref.model.path": self.model,
            "data.max_response_length": self.max_tokens,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class GSM8KReward:
    """Grade GSM8K answers; `mode` says how an answer is read."""

    name: ClassVar[str] = "gsm8k"
    mode: str = "default"

    def keys(self) -> dict[str, Any]:
        """Config keys that this part sets."""
        return {"reward_model.gsm8k_mode": self.mode}


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOAdvantage:
    """Group-relative advantages (arXiv:2402.03300)."""

    name: ClassVar[str] = "grpo"
    norm_adv_by_std: bool = True

    def keys(self) -> dict[str, Any]:
        """Config keys that this part sets."""
        return {"algorithm.adv_estimator": self.name, "algorithm.norm_adv_by_std_in_grpo": self.norm_adv_by_std}


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPPolicyUpdate:
    """Update the policy with FSDP2 and the clipped PPO loss."""

    name: ClassVar[str] = "fsdp"
    lr: float = 1e-6
    grad_clip: float = 1.0
    ppo_epochs: int = 1
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    loss_agg_mode: str = "token-mean"

    def keys(self) -> dict[str, Any]:
        """Config keys that this part sets."""
        actor = "actor_rollout_ref.actor"
        return {
            f"{actor}.optim.lr": self.lr,
            f"{actor}.grad_clip": self.grad_clip,
            f"{actor}.ppo_epochs": self.ppo_epochs,
            f"{actor}.clip_ratio_low": self.clip_ratio_low,
            f"{actor}.clip_ratio_high": self.clip_ratio_high,
            f"{actor}.loss_agg_mode": self.loss_agg_mode,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RLDataFlow:
    """The parts of a run. `config()` turns them into the run's config.

    Example: RLDataFlow(rollout=HFRollout(model="./model"), reward=GSM8KReward(), advantage=GRPOAdvantage(),
    policy_update=FSDPPolicyUpdate(lr=1e-5)).
    """

    rollout: HFRollout | VLLMRollout
    reward: GSM8KReward = field(default_factory=GSM8KReward)
    advantage: GRPOAdvantage = field(default_factory=GRPOAdvantage)
    policy_update: FSDPPolicyUpdate = field(default_factory=FSDPPolicyUpdate)

    def config(self, config: Mapping[str, Any] | None = None) -> Any:
        """Return the RunConfig of these parts plus `config`, a nested mapping of the remaining keys.

        A key that `config` sets to another value than the parts do is a ConfigError.
        """
        from ratchet.config import parse_config
        from ratchet.errors import ConfigError

        tree = _copy(config or {})
        for part in (self.rollout, self.reward, self.advantage, self.policy_update):
            for key, value in part.keys().items():
                present = _set_default(tree, key, value)
                if present != value:
                    raise ConfigError(f"{key} is {present!r} in the config and {value!r} in {type(part).__name__}")
        return parse_config(tree, source="the flow")


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in tree.items()}


def _set_default(tree: dict[str, Any], key: str, value: Any) -> Any:
    from ratchet.errors import ConfigError

    *sections, last = key.split(".")
    for name in sections:
        inner = tree.get(name)
        if inner is None:
            inner = tree[name] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{key}: {name} is {inner!r} in the config, not a section")
        tree = inner
    return tree.setdefault(last, value)
