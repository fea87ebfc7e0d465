from typing import Any

import pytest

from ratchet import FSDPPolicyUpdate, GRPOAdvantage, GSM8KReward, HFRollout, RLDataFlow, VLLMRollout
from ratchet.config import load_config
from ratchet.config.load import known_keys
from ratchet.errors import ConfigError

PARTS = [HFRollout(model="m"), VLLMRollout(model="m"), GSM8KReward(), GRPOAdvantage(), FSDPPolicyUpdate()]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_a_part_sets_keys_that_exist(part: Any) -> None:
    assert not set(part.keys()) - set(known_keys())


def test_a_flow_makes_the_config_that_the_same_keys_make_in_yaml() -> None:
    flow = RLDataFlow(
        rollout=HFRollout(model="./model", temperature=0.7, n=4, max_tokens=64),
        reward=GSM8KReward(mode="strict"),
        advantage=GRPOAdvantage(norm_adv_by_std=False),
        policy_update=FSDPPolicyUpdate(lr=1e-5, grad_clip=0.5, clip_ratio_high=0.28),
    )
    assert flow.config({"data": {"train_files": "train.jsonl", "train_batch_size": 8}}) == load_config(
        overrides=[
            "actor_rollout_ref.model.path=./model",
            "actor_rollout_ref.rollout.name=hf",
            "actor_rollout_ref.rollout.temperature=0.7",
            "actor_rollout_ref.rollout.n=4",
            "data.max_response_length=64",
            "reward_model.gsm8k_mode=strict",
            "algorithm.norm_adv_by_std_in_grpo=false",
            "actor_rollout_ref.actor.optim.lr=0.00001",
            "actor_rollout_ref.actor.grad_clip=0.5",
            "actor_rollout_ref.actor.clip_ratio_low=0.2",
            "actor_rollout_ref.actor.clip_ratio_high=0.28",
            "data.train_files=train.jsonl",
            "data.train_batch_size=8",
        ]
    )


def test_a_config_that_disagrees_with_a_part_is_refused_naming_both() -> None:
    flow = RLDataFlow(rollout=HFRollout(model="m", n=4))
    config = {"actor_rollout_ref": {"rollout": {"n": 8}}}
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.n is 8 in the config and 4 in HFRollout"):
        flow.config(config)
    assert config == {"actor_rollout_ref": {"rollout": {"n": 8}}}
    assert flow.config({"actor_rollout_ref": {"rollout": {"n": 4}}}).actor_rollout_ref.rollout.n == 4


def test_sections_without_content_and_sections_that_are_none() -> None:
    flow = RLDataFlow(rollout=HFRollout(model="m"))
    assert flow.config({"actor_rollout_ref": None, "data": {}}) == flow.config()
    with pytest.raises(ConfigError, match="actor_rollout_ref is 3 in the config, not a section"):
        flow.config({"actor_rollout_ref": 3})


def test_values_that_a_config_would_refuse_are_refused_in_a_flow_too() -> None:
    with pytest.raises(ConfigError, match=r"the flow does not make a run:\n.*rollout\.n: "):
        RLDataFlow(rollout=HFRollout(model="m", n=0)).config()
