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
    DPOPolicyUpdate,
    FixedKLController,
    FSDPPolicyUpdate,
    GSM8KReward,
    HFRollout,
    HybridDataFlow,
    JudgeReward,
    RewardAPI,
    RewardModel,
    RewardModelUpdate,
    RLDataFlow,
    RLTask,
    SFTPolicyUpdate,
    SFTTask,
    VLLMRollout,
    WeightedReward,
    flow,
    load_config,
)
from ratchet.config import parse_config
from ratchet.errors import ConfigError
from ratchet.flow.base import DataFlow

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
    "use_torch_compile": st.booleans(),
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
RULES = _some(
    GSM8KReward, mode=st.sampled_from(["default", "strict", "flexible"]), rule=st.sampled_from(["", "gsm8k", "math"])
)
MODELS = _some(lambda **more: RewardModel("rm", **more), max_token_len_per_gpu=COUNT)
JUDGES = _some(
    lambda **more: JudgeReward("http://j", **more), model=NAME, prompt=st.just("Grade {completion}"),
    pattern=st.none() | st.just("([0-9])"), scale=st.just((1.0, 5.0)), max_tokens=COUNT, auth_env=NAME,
)  # fmt: skip
APIS = _some(lambda **more: RewardAPI("http://h", **more), batch_size=COUNT, timeout=UNIT, auth_env=NAME)
REWARDS = st.one_of(
    _some(GSM8KReward, mode=st.sampled_from(["default", "strict", "flexible"]), **SHARED),
    _some(lambda **more: RewardModel("rm", **more), max_token_len_per_gpu=COUNT, **SHARED),
    _some(lambda **more: RewardAPI("http://h", **more), retries=st.integers(0, 5), **SHARED),
    JUDGES,
    st.builds(
        lambda parts, more: WeightedReward(parts, **more),
        st.tuples(st.tuples(RULES, UNIT), st.tuples(MODELS, UNIT), st.tuples(APIS | JUDGES, UNIT)),
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
NOT_BY_NAME = ("CustomAdvantage", "DPOAdvantage")
KINDS = [name for name in flow.__all__ if name.endswith("Advantage") and name not in NOT_BY_NAME]


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
OFFLINE = st.one_of(
    _some(SFTPolicyUpdate, model=NAME, lr=UNIT, max_tokens=COUNT, mini_batch_size=st.none() | st.integers(1, 9)),
    _some(DPOPolicyUpdate, model=NAME, beta=UNIT, loss_type=st.sampled_from(["sigmoid", "ipo", "hinge"]),
          reference_free=st.booleans(), length_normalized=st.booleans(), lora_rank=st.integers(0, 9)),
    _some(RewardModelUpdate, model=NAME, lr=UNIT, max_prompt_length=COUNT, dtype=st.just("float32")),
)  # fmt: skip
RL_FLOWS = st.builds(
    lambda rollout, reward, advantage, policy_update: RLDataFlow(
        rollout=rollout, reward=reward, advantage=advantage, policy_update=policy_update
    ),
    ROLLOUTS, REWARDS, _advantages(), UPDATES,
)  # fmt: skip
HYBRIDS = st.builds(
    lambda rollout, reward, advantage, policy_update, lr, mix_ratio: HybridDataFlow(
        sft_task=SFTTask("demos.jsonl", lr), mix_ratio=mix_ratio,
        rl_task=RLTask("p.jsonl", rollout=rollout, reward=reward, advantage=advantage, policy_update=policy_update),
    ),
    ROLLOUTS, REWARDS, _advantages(), _some(FSDPPolicyUpdate, lr=UNIT), st.none() | UNIT,
    st.floats(0.1, 0.9),
)  # fmt: skip
FLOWS = st.one_of(RL_FLOWS, OFFLINE.map(lambda update: RLDataFlow(policy_update=update)), HYBRIDS)


@settings(max_examples=150)
@given(FLOWS)
def test_a_flow_comes_back_from_its_config_from_json_and_from_yaml(flow: DataFlow) -> None:
    written = flow.to_dict()
    rebuilt = type(flow).from_dict(json.loads(json.dumps(written)))
    assert rebuilt == flow
    for mine, theirs in zip(rebuilt.parts, flow.parts, strict=True):
        assert type(mine) is type(theirs) or mine == theirs
    assert type(flow).from_config(flow.config()) == flow
    assert type(flow).from_dict(yaml.safe_load(yaml.safe_dump(written))).config() == flow.config()


@settings(max_examples=50)
@given(FLOWS)
def test_a_flow_that_was_read_from_a_config_agrees_with_it(flow: DataFlow) -> None:
    config = flow.config({"data": {"train_batch_size": 16, "train_files": "p.jsonl"}, "trainer": {"total_epochs": 3}})
    assert type(flow).from_config(config).config(config) == config


@settings(max_examples=50)
@given(FLOWS, FLOWS)
def test_flows_are_equal_when_they_make_the_same_config(one: DataFlow, other: DataFlow) -> None:
    assert (one == other) == (one.config() == other.config())


def test_a_config_that_says_nothing_makes_the_flow_of_the_defaults() -> None:
    config = load_config()
    assert RLDataFlow.from_config(config).config() == config
    assert RLDataFlow.from_config({}).rollout.n == 1
    with pytest.raises(ConfigError, match="no such key"):
        RLDataFlow.from_dict({"data": {"no_such": 1}})


def test_each_kind_of_flow_reads_its_own_configs() -> None:
    hybrid = {"algorithm": {"objective": "hybrid", "hybrid": {"sft_files": "d"}}, "data": {"train_files": "t"}}
    assert HybridDataFlow.from_dict(hybrid).sft_task.dataset == "d"
    with pytest.raises(ConfigError, match=r"HybridDataFlow\.from_config reads it"):
        RLDataFlow.from_dict(hybrid)
    with pytest.raises(ConfigError, match=r"is dpo, not hybrid: RLDataFlow\.from_config reads it"):
        HybridDataFlow.from_dict({"trainer": {"algorithm": "dpo"}})
    with pytest.raises(ConfigError, match=r"data\.train_files names no prompts"):
        HybridDataFlow.from_dict({"algorithm": hybrid["algorithm"]})


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
