"""`from ratchet.workers.reward_manager import NaiveRewardManager`."""

from ratchet.rewards.naive_manager import NaiveRewardManager

__all__ = ["NaiveRewardManager"]
