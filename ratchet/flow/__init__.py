"""The declarative API: a run is a flow of a few parts, and a part is what its arguments say."""

from ratchet.flow.advantage import (
    CustomAdvantage,
    DrGRPOAdvantage,
    GAEAdvantage,
    GDPOAdvantage,
    GPGAdvantage,
    GRPOAdvantage,
    OPOAdvantage,
    OptimalTokenBaselineAdvantage,
    PassKAdvantage,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    ReMaxAdvantage,
    RLOOAdvantage,
    TIROptimalTokenBaselineAdvantage,
)
from ratchet.flow.data_flow import RLDataFlow
from ratchet.flow.hybrid import HybridDataFlow, RLTask, SFTTask
from ratchet.flow.offline import DPOAdvantage, DPOPolicyUpdate, RewardModelUpdate, SFTPolicyUpdate
from ratchet.flow.policy_update import FSDPPolicyUpdate, FSPPolicyUpdate
from ratchet.flow.reward import (
    CustomReward,
    GSM8KReward,
    JudgeReward,
    RewardAPI,
    RewardModel,
    RuleReward,
    WeightedReward,
)
from ratchet.flow.rollout import HFRollout, VLLMRollout
from ratchet.flow.trainer import PPOTrainer

__all__ = [
    "CustomAdvantage",
    "CustomReward",
    "DPOAdvantage",
    "DPOPolicyUpdate",
    "DrGRPOAdvantage",
    "FSDPPolicyUpdate",
    "FSPPolicyUpdate",
    "GAEAdvantage",
    "GDPOAdvantage",
    "GPGAdvantage",
    "GRPOAdvantage",
    "GSM8KReward",
    "HFRollout",
    "HybridDataFlow",
    "JudgeReward",
    "OPOAdvantage",
    "OptimalTokenBaselineAdvantage",
    "PPOTrainer",
    "PassKAdvantage",
    "RLDataFlow",
    "RLOOAdvantage",
    "RLTask",
    "ReMaxAdvantage",
    "ReinforcePlusPlusAdvantage",
    "ReinforcePlusPlusBaselineAdvantage",
    "RewardAPI",
    "RewardModel",
    "RewardModelUpdate",
    "RuleReward",
    "SFTPolicyUpdate",
    "SFTTask",
    "TIROptimalTokenBaselineAdvantage",
    "VLLMRollout",
    "WeightedReward",
]
