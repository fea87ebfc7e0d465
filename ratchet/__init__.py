"""RL post-training of language models as Kubeflow Pipelines.

Public names load on first use, so that `import ratchet` costs nothing.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "AdaptiveKLController": "ratchet.algorithms.kl_controller",
    "CustomAdvantage": "ratchet.flow",
    "CustomReward": "ratchet.flow",
    "DPOAdvantage": "ratchet.flow",
    "DPOPolicyUpdate": "ratchet.flow",
    "DataProto": "ratchet.rewards.data_proto",
    "DrGRPOAdvantage": "ratchet.flow",
    "FSDPPolicyUpdate": "ratchet.flow",
    "FSPPolicyUpdate": "ratchet.flow",
    "FixedKLController": "ratchet.algorithms.kl_controller",
    "GAEAdvantage": "ratchet.flow",
    "GDPOAdvantage": "ratchet.flow",
    "GPGAdvantage": "ratchet.flow",
    "GRPOAdvantage": "ratchet.flow",
    "GSM8KReward": "ratchet.flow",
    "HFRollout": "ratchet.flow",
    "HybridDataFlow": "ratchet.flow",
    "JudgeReward": "ratchet.flow",
    "NaiveRewardManager": "ratchet.rewards.naive_manager",
    "OPOAdvantage": "ratchet.flow",
    "OptimalTokenBaselineAdvantage": "ratchet.flow",
    "PPOTrainer": "ratchet.flow",
    "PassKAdvantage": "ratchet.flow",
    "RLDataFlow": "ratchet.flow",
    "RLOOAdvantage": "ratchet.flow",
    "RLTask": "ratchet.flow",
    "RatchetError": "ratchet.errors",
    "ReMaxAdvantage": "ratchet.flow",
    "ReinforcePlusPlusAdvantage": "ratchet.flow",
    "ReinforcePlusPlusBaselineAdvantage": "ratchet.flow",
    "RewardAPI": "ratchet.flow",
    "RewardModel": "ratchet.flow",
    "RewardModelUpdate": "ratchet.flow",
    "RuleReward": "ratchet.flow",
    "RunConfig": "ratchet.config",
    "SFTPolicyUpdate": "ratchet.flow",
    "SFTTask": "ratchet.flow",
    "TIROptimalTokenBaselineAdvantage": "ratchet.flow",
    "VLLMRollout": "ratchet.flow",
    "WeightedReward": "ratchet.flow",
    "load_config": "ratchet.config",
    "register_advantage": "ratchet.algorithms.catalog",
    "register_policy_loss": "ratchet.algorithms.catalog",
    "register_reward": "ratchet.rewards.registry",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ratchet' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
