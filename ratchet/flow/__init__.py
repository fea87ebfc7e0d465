"""The declarative API: a run is a flow of four parts, and a part is what its arguments say."""

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
from ratchet.flow.policy_update import FSDPPolicyUpdate, FSPPolicyUpdate
from ratchet.flow.reward import CustomReward, GSM8KReward, RewardAPI, RewardModel, RuleReward, WeightedReward
from ratchet.flow.rollout import HFRollout, VLLMRollout
from ratchet.flow.trainer import PPOTrainer

__all__ = [
    "CustomAdvantage",
    "CustomReward",
    "DrGRPOAdvantage",
    "FSDPPolicyUpdate",
    "FSPPolicyUpdate",
    "GAEAdvantage",
    "GDPOAdvantage",
    "GPGAdvantage",
    "GRPOAdvantage",
    "GSM8KReward",
    "HFRollout",
    "OPOAdvantage",
    "OptimalTokenBaselineAdvantage",
    "PPOTrainer",
    "PassKAdvantage",
    "RLDataFlow",
    "RLOOAdvantage",
    "ReMaxAdvantage",
    "ReinforcePlusPlusAdvantage",
    "ReinforcePlusPlusBaselineAdvantage",
    "RewardAPI",
    "RewardModel",
    "RuleReward",
    "TIROptimalTokenBaselineAdvantage",
    "VLLMRollout",
    "WeightedReward",
]
