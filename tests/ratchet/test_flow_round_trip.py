"""A flow written down as a run config and rebuilt from it is the same flow."""

import json
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet import (
    AdaptiveKLController,
    CustomReward,
    FixedKLController,
    FSDPPolicyUpdate,
    GSM8KReward,
    HFRollout,
    RewardAPI,
    RewardModel,
    RLDataFlow,
    VLLMRollout,
    WeightedReward,
    flow,
    load_config,
)
from ratchet.config import parse_config
from ratchet.errors import ConfigError

UNIT = st.floats(0.01, 1.0)
COUNT = st.integers(1, 64)
NAME = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=8).filter(
    lambda text: "${" not in text
)


def _some(kind: Any, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """The part with any subset of these arguments."""
    return st.fixed_dictionaries({}, optional=arguments).map(lambda chosen: kind(**chosen))


VLLM = {
    "temperature": UNIT,
    "n": st.integers(2, 9),
    "max_tokens": st.integers(512, 999),
    "gpu_memory_utilization": st.none() | UNIT,
    "max_num_seqs": COUNT,
    "enable_chunked_prefill": st.booleans(),
    "enforce_eager": st.none() | st.booleans(),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
    "log_probs_share": UNIT,
    "max_log_prob_drift": UNIT,
    "free_cache_engine": st.booleans(),
    "sleep_level": st.sampled_from([1, 2]),
}
ROLLOUTS = st.one_of(
    _some(lambda **more: VLLMRollout("m", **more), **VLLM),
    _some(lambda **more: HFRollout("m", **more), temperature=UNIT, n=st.integers(2, 9), ignore_eos=st.booleans()),
)
SHARED = {"num_examine": st.integers(0, 3), "overlong_buffer_len": st.none() | COUNT, "overlong_penalty_factor": UNIT}
RULES = _some(GSM8KReward, mode=st.sampled_from(["default", "strict", "flexible"]))
MODELS = _some(lambda **more: RewardModel("rm", **more), max_token_len_per_gpu=COUNT)
APIS = _some(lambda **more: RewardAPI("http://h", **more), batch_size=COUNT, timeout=UNIT, auth_env=NAME)
REWARDS = st.one_of(
    _some(GSM8KReward, mode=st.sampled_from(["default", "strict", "flexible"]), **SHARED),
    _some(lambda **more: RewardModel("rm", **more), max_token_len_per_gpu=COUNT, **SHARED),
    _some(lambda **more: RewardAPI("http://h", **more), retries=st.integers(0, 5), **SHARED),
    st.builds(
        lambda parts, more: WeightedReward(parts, **more),
        st.tuples(st.tuples(RULES, UNIT), st.tuples(MODELS, UNIT), st.tuples(APIS, UNIT)),
        st.fixed_dictionaries({}, optional=SHARED),
    ),
)
KL = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"kl_coef": UNIT, "kl_type": st.sampled_from(["k1", "k3", "low_var_kl", "abs"])}),
    st.fixed_dictionaries({"kl_type": st.sampled_from(["k1", "mse"]), "kl_coef": st.just(0.0)}),
    st.fixed_dictionaries({"kl_ctrl": st.builds(AdaptiveKLController, UNIT, UNIT, COUNT)}),
    st.fixed_dictionaries({"kl_ctrl": st.builds(FixedKLController, UNIT), "kl_type": st.sampled_from(["k1", "mse"])}),
)
FILTER = {"filter_groups": st.booleans(), "max_num_gen_batches": st.integers(0, 5)}
OWN: dict[str, dict[str, Any]] = {
    "GRPOAdvantage": {"gamma": UNIT, "lam": UNIT, "norm_adv_by_std": st.booleans()},
    "GAEAdvantage": {"gamma": UNIT, "lam": UNIT, "critic_model": NAME, "critic_lr": UNIT, "critic_warmup": COUNT,
                     "critic_epochs": st.none() | st.integers(1, 3), "cliprange_value": UNIT,
                     "critic_mini_batch_size": st.none() | st.integers(1, 9)},
    "GDPOAdvantage": {"reward_keys": st.lists(NAME, max_size=3).map(tuple)},
    "PassKAdvantage": {"norm_adv_by_std": st.booleans()},
    "ReinforcePlusPlusAdvantage": {"gamma": UNIT},
}  # fmt: skip
KINDS = [name for name in flow.__all__ if name.endswith("Advantage") and name != "CustomAdvantage"]


@st.composite
def _advantages(draw: st.DrawFn) -> Any:
    name = draw(st.sampled_from(KINDS))
    own = draw(st.fixed_dictionaries({}, optional=OWN.get(name, {}) | FILTER))
    return getattr(flow, name)(**own, **draw(KL))


UPDATES = _some(
    FSDPPolicyUpdate, lr=UNIT, grad_clip=UNIT, ppo_epochs=st.integers(1, 3), clip_ratio_low=st.none() | UNIT,
    clip_ratio_high=st.none() | UNIT, loss_agg_mode=st.sampled_from(["token-mean", "token-sum"]),
    policy_loss=st.sampled_from(["vanilla", "gspo", "gmpo", "clip_cov", "sapo"]), entropy_coeff=UNIT,
    mini_batch_size=st.none() | st.integers(1, 9), betas=st.tuples(st.just(0.5), st.just(0.75)), tau_neg=UNIT,
    lr_scheduler_type=st.sampled_from(["constant", "cosine"]), bypass_mode=st.booleans(), clip_cov_lb=UNIT,
    use_liger=st.booleans(), use_torch_compile=st.booleans(), lora_rank=st.integers(0, 9), lora_alpha=COUNT,
    target_modules=st.just("all-linear") | st.lists(NAME, min_size=1, max_size=2).map(tuple),
)  # fmt: skip
FLOWS = st.builds(
    lambda rollout, reward, advantage, policy_update: RLDataFlow(
        rollout=rollout, reward=reward, advantage=advantage, policy_update=policy_update
    ),
    ROLLOUTS, REWARDS, _advantages(), UPDATES,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(FLOWS)
def test_a_flow_comes_back_from_its_config_from_json_and_from_yaml(flow: RLDataFlow) -> None:
    written = flow.to_dict()
    rebuilt = RLDataFlow.from_dict(json.loads(json.dumps(written)))
    assert rebuilt == flow
    for mine, theirs in zip(rebuilt.parts, flow.parts, strict=True):
        assert type(mine) is type(theirs) or mine == theirs
    assert RLDataFlow.from_config(flow.config()) == flow
    assert RLDataFlow.from_dict(yaml.safe_load(yaml.safe_dump(written))).config() == flow.config()


@settings(max_examples=50, deadline=None)
@given(FLOWS)
def test_a_flow_that_was_read_from_a_config_agrees_with_it(flow: RLDataFlow) -> None:
    config = flow.config({"data": {"train_batch_size": 16, "train_files": "t"}, "trainer": {"total_epochs": 3}})
    assert RLDataFlow.from_config(config).config(config) == config


@settings(max_examples=50, deadline=None)
@given(FLOWS, FLOWS)
def test_flows_are_equal_when_they_make_the_same_config(one: RLDataFlow, other: RLDataFlow) -> None:
    assert (one == other) == (one.config() == other.config())


def test_a_config_that_says_nothing_makes_the_flow_of_the_defaults() -> None:
    config = load_config()
    assert RLDataFlow.from_config(config).config() == config
    assert RLDataFlow.from_config({}).rollout.n == 1
    with pytest.raises(ConfigError, match="no such key"):
        RLDataFlow.from_dict({"data": {"no_such": 1}})


def test_a_reward_by_path_keeps_the_text_that_it_was_written_with(tmp_path: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(data_source, solution_str, ground_truth, extra_info, bonus):\n    return bonus\n")
    flow = RLDataFlow(rollout=HFRollout("m"), reward=CustomReward(str(file), "score", bonus=2))
    written = flow.to_dict()
    file.unlink()
    rebuilt = RLDataFlow.from_dict(written)
    assert rebuilt == flow
    assert rebuilt.config() == parse_config(written)
    assert written["custom_reward_function"] == {"path": str(file), "name": "score", "reward_kwargs": {"bonus": 2}}
    assert written["code"][0]["source"].startswith("def score(")
