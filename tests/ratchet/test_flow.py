import warnings
from pathlib import Path
from typing import Any

import pytest

from ratchet import (
    AdaptiveKLController,
    CustomReward,
    DrGRPOAdvantage,
    FixedKLController,
    FSDPPolicyUpdate,
    FSPPolicyUpdate,
    GAEAdvantage,
    GRPOAdvantage,
    GSM8KReward,
    HFRollout,
    JudgeReward,
    PPOTrainer,
    RewardAPI,
    RewardModel,
    RLDataFlow,
    RLOOAdvantage,
    VLLMRollout,
    WeightedReward,
    flow,
    load_config,
)
from ratchet.config.load import known_keys
from ratchet.errors import ConfigError
from ratchet.flow.part import plain
from ratchet.flow.runners import find_runner

KL = AdaptiveKLController(init_kl_coef=0.1, target=0.2, horizon=1000)
PARTS = [
    HFRollout("m"),
    VLLMRollout("m"),
    GSM8KReward(overlong_buffer_len=8),
    RewardModel("rm"),
    RewardAPI("http://host/score"),
    JudgeReward("http://host/v1", "judge"),
    CustomReward("reward.py"),
    WeightedReward([(GSM8KReward(), 1.0), (RewardModel("rm"), 0.5)]),
    *(getattr(flow, name)() for name in flow.__all__ if name.endswith("Advantage") and name != "CustomAdvantage"),
    GRPOAdvantage(kl_coef=0.1),
    GRPOAdvantage(kl_ctrl=KL),
    FSDPPolicyUpdate(),
]
ACTOR = "actor_rollout_ref.actor"


def _flow(**parts: Any) -> RLDataFlow:
    return RLDataFlow(**{"rollout": HFRollout("m"), **parts})


@pytest.mark.parametrize("part", PARTS, ids=repr)
def test_a_part_sets_keys_that_exist(part: Any) -> None:
    assert not set(part.keys()) - set(known_keys())


@pytest.mark.parametrize("part", [one for one in PARTS if not isinstance(one, CustomReward)], ids=repr)
def test_what_a_part_leaves_out_is_the_default_of_its_key(part: Any) -> None:
    """But for the group size: groups of one have no advantage under most estimators."""
    default, given = load_config(), part.keys(given_only=True)
    left_out = {key: value for key, value in part.keys().items() if key not in given}
    differing = {key: value for key, value in left_out.items() if plain(default.value(key)) != value}
    assert differing in ({}, {"actor_rollout_ref.rollout.n": 8})


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
            "actor_rollout_ref.actor.clip_ratio_high=0.28",
            "data.train_files=train.jsonl",
            "data.train_batch_size=8",
        ]
    )


def test_every_argument_of_vllm_reaches_its_key_in_the_order_of_the_signature() -> None:
    rollout = VLLMRollout("m", 0.7, 1.0, 5, 64, 4, 2, 0.4, 4096, 32, False, True, "float32", True)
    config = _flow(rollout=rollout, policy_update=FSDPPolicyUpdate(bypass_mode=False)).config()
    found = config.actor_rollout_ref.rollout
    assert (config.actor_rollout_ref.model.path, config.data.max_response_length, found.name) == ("m", 64, "vllm")
    assert (found.temperature, found.top_p, found.top_k, found.n) == (0.7, 1.0, 5, 4)
    assert (found.tensor_model_parallel_size, found.gpu_memory_utilization) == (2, 0.4)
    assert (found.max_num_batched_tokens, found.max_num_seqs, found.enable_chunked_prefill) == (4096, 32, False)
    assert (found.enforce_eager, found.dtype, found.ignore_eos) == (True, "float32", True)


def test_an_unknown_argument_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="VLLMRollout has no argument 'temprature'; the nearest is temperature"):
        VLLMRollout("m", temprature=0.7)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="FSDPPolicyUpdate has no argument 'learning_rate'; the nearest is"):
        FSPPolicyUpdate(learning_rate=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="HFRollout: missing a required argument: 'model'"):
        HFRollout()  # type: ignore[call-arg]


def test_parts_say_their_names() -> None:
    flow = RLDataFlow(rollout=VLLMRollout("m"), advantage=GRPOAdvantage())
    assert (flow.rollout.name, flow.advantage.name) == ("vllm", "grpo")
    assert FSPPolicyUpdate is FSDPPolicyUpdate


def test_the_class_name_is_all_that_changes_to_leave_vllm() -> None:
    arguments: dict[str, Any] = {"model": "m", "n": 4, "temperature": 0.7, "max_num_seqs": 32, "enforce_eager": True}
    vllm = _flow(rollout=VLLMRollout(**arguments)).to_dict()
    with pytest.warns(UserWarning, match="HFRollout has no use for max_num_seqs, enforce_eager"):
        hf = _flow(rollout=HFRollout(**arguments)).to_dict()
    assert (vllm["actor_rollout_ref"]["rollout"].pop("name"), hf["actor_rollout_ref"]["rollout"].pop("name")) == (
        "vllm",
        "hf",
    )
    assert vllm == hf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HFRollout("m", n=4, max_num_seqs=256)


def test_a_config_that_disagrees_with_an_argument_is_refused_naming_both() -> None:
    flow = _flow(rollout=HFRollout("m", n=4))
    config = {"actor_rollout_ref": {"rollout": {"n": 8}}}
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.n is 8 in the config and 4 in HFRollout"):
        flow.config(config)
    assert config == {"actor_rollout_ref": {"rollout": {"n": 8}}}
    assert flow.config({"actor_rollout_ref": {"rollout": {"n": 4}}}).actor_rollout_ref.rollout.n == 4
    with pytest.raises(ConfigError, match=r"adv_estimator is '?gae'? in the config and 'grpo' in GRPOAdvantage"):
        flow.config({"algorithm": {"adv_estimator": "gae"}})


def test_a_config_in_the_short_spelling_disagrees_and_agrees_as_well() -> None:
    flow = _flow(rollout=VLLMRollout("m"))
    with pytest.raises(ConfigError, match=r"rollout\.type.* is 'hf' in the config and 'vllm' in VLLMRollout"):
        flow.config({"actor_rollout_ref": {"rollout": {"type": "hf"}}})
    assert flow.config({"trainer": {"algorithm": "grpo", "num_epochs": 3}}).trainer.total_epochs == 3
    assert flow.config({"rollout": {"n": 2}}).actor_rollout_ref.rollout.n == 2


def test_an_argument_that_was_left_out_yields_to_the_config() -> None:
    config = _flow().config({"actor_rollout_ref": {"rollout": {"n": 3}, "actor": {"optim": {"lr": 0.5}}}})
    assert (config.actor_rollout_ref.rollout.n, config.actor_rollout_ref.actor.optim.lr) == (3, 0.5)
    assert _flow().config().actor_rollout_ref.rollout.n == 8


def test_the_rest_of_a_config_may_be_a_yaml_file_or_a_run_config(tmp_path: Path) -> None:
    path = tmp_path / "rest.yaml"
    path.write_text("data: {train_batch_size: 4}\nactor_rollout_ref: {actor: {optim: {lr: 1e-5}}}\n")
    flow = _flow(policy_update=FSDPPolicyUpdate(lr=1e-5))
    expected = flow.config({"data": {"train_batch_size": 4}})
    assert flow.config(path) == flow.config(str(path)) == flow.config(load_config(path)) == expected
    with pytest.raises(ConfigError, match=r"optim\.lr is 1e-05 in the config and 0\.5 in FSDPPolicyUpdate"):
        _flow(policy_update=FSDPPolicyUpdate(lr=0.5)).config(path)
    with pytest.raises(ConfigError, match="cannot read the config file"):
        flow.config(tmp_path / "missing.yaml")


def test_sections_without_content_and_sections_that_are_none() -> None:
    assert _flow().config({"actor_rollout_ref": None, "data": {}}) == _flow().config()
    with pytest.raises(ConfigError, match="actor_rollout_ref"):
        _flow().config({"actor_rollout_ref": 3})


def test_values_that_a_config_would_refuse_are_refused_in_a_flow_too() -> None:
    with pytest.raises(ConfigError, match=r"the flow does not make a run:\n.*rollout\.n: "):
        _flow(rollout=HFRollout("m", n=0)).config()


def test_a_kl_coefficient_is_in_the_loss_and_a_controller_in_the_reward() -> None:
    off = _flow().config()
    assert not off.actor_rollout_ref.actor.use_kl_loss
    assert not off.algorithm.use_kl_in_reward
    loss = _flow(advantage=GRPOAdvantage(0.01, "k1")).config()
    assert loss.actor_rollout_ref.actor.use_kl_loss
    assert (loss.actor_rollout_ref.actor.kl_loss_coef, loss.actor_rollout_ref.actor.kl_loss_type) == (0.01, "k1")
    assert not loss.algorithm.use_kl_in_reward
    reward = _flow(advantage=GRPOAdvantage(kl_type="low_var_kl", kl_ctrl=KL)).config()
    assert not reward.actor_rollout_ref.actor.use_kl_loss
    assert (reward.algorithm.use_kl_in_reward, reward.algorithm.kl_penalty) == (True, "low_var_kl")
    control = reward.algorithm.kl_ctrl
    assert (control.type, control.kl_coef, control.target_kl, control.horizon) == ("adaptive", 0.1, 0.2, 1000)
    fixed = _flow(advantage=GAEAdvantage(kl_ctrl=FixedKLController(0.05))).config().algorithm
    assert (fixed.use_kl_in_reward, fixed.kl_ctrl.type, fixed.kl_ctrl.kl_coef) == (True, "fixed", 0.05)


def test_a_controller_that_has_moved_leaves_the_flow_as_it_was() -> None:
    controller = AdaptiveKLController(0.1, 0.2, 10)
    flow = _flow(advantage=GRPOAdvantage(kl_ctrl=controller))
    controller.update(5.0, 10)
    assert flow.config().algorithm.kl_ctrl.kl_coef == 0.1


@pytest.mark.parametrize("coefficient", [0.2, 0.0])
def test_a_coefficient_beside_a_controller_must_be_the_one_it_begins_with(coefficient: float) -> None:
    assert GRPOAdvantage(kl_coef=0.1, kl_ctrl=KL) == GRPOAdvantage(kl_ctrl=KL)
    with pytest.raises(ConfigError, match=f"kl_coef is {coefficient} and the kl_ctrl begins with 0.1"):
        GRPOAdvantage(kl_coef=coefficient, kl_ctrl=KL)
    with pytest.raises(ConfigError, match="expected AdaptiveKLController or FixedKLController"):
        GRPOAdvantage(kl_ctrl=0.1)


def test_what_swapping_the_advantage_does_to_the_graph() -> None:
    def graph(advantage: Any) -> dict[str, tuple[str, ...]]:
        return dict(find_runner("local").graph(_flow(advantage=advantage).config()))

    assert list(graph(GRPOAdvantage())) == ["rollout", "reward", "advantage", "policy_update"]
    assert list(graph(GRPOAdvantage(kl_coef=0.01))) != list(graph(GRPOAdvantage()))
    assert "reference_scores" in graph(GRPOAdvantage(kl_coef=0.01))
    ppo = graph(GAEAdvantage())
    assert {"values", "critic_update"} <= set(ppo)
    assert "values" in ppo["advantage"]
    assert "policy_scores" in graph(flow.OptimalTokenBaselineAdvantage())


def test_printing_a_flow_shows_its_parts_its_config_and_its_graph() -> None:
    text = str(_flow(rollout=VLLMRollout("Qwen/Qwen3-0.6B", temperature=0.7), advantage=GAEAdvantage(lam=0.95)))
    lines = text.splitlines()
    assert lines[0] == "RLDataFlow"
    assert "  rollout        VLLMRollout(model='Qwen/Qwen3-0.6B', temperature=0.7)" in lines
    assert "  algorithm.lam: 0.95" in lines
    assert "  actor_rollout_ref.rollout.temperature: 0.7" in lines
    assert "  reward        <- rollout" in lines
    assert any(line.startswith("  critic_update ") for line in lines)
    assert "no config yet: " in str(_flow(rollout=HFRollout("m", n=0)))


def test_parts_are_equal_when_they_set_the_same_keys() -> None:
    assert DrGRPOAdvantage() == GRPOAdvantage(norm_adv_by_std=False)
    assert hash(DrGRPOAdvantage()) == hash(GRPOAdvantage(norm_adv_by_std=False))
    assert GRPOAdvantage() == GRPOAdvantage(norm_adv_by_std=True) != RLOOAdvantage()
    assert VLLMRollout("m") != HFRollout("m")
    assert FSDPPolicyUpdate(policy_loss="gmpo") == FSDPPolicyUpdate(policy_loss="geo_mean")


def test_weighted_rewards_are_laid_side_by_side() -> None:
    reward = WeightedReward([(GSM8KReward(mode="strict"), 1), (RewardModel("rm"), 0.5)], num_examine=2)
    section = _flow(reward=reward).config().reward_model
    assert section.weights == {"rule": 1.0, "model": 0.5}
    assert (section.gsm8k_mode, section.path, section.num_examine) == ("strict", "rm", 2)
    with pytest.raises(ConfigError, match="each of another kind"):
        WeightedReward([(RewardModel("a"), 1.0), (RewardModel("b"), 1.0)])
    with pytest.raises(ConfigError, match="give num_examine to it, not to GSM8KReward"):
        WeightedReward([(GSM8KReward(num_examine=1), 1.0)])


def test_a_judge_and_an_endpoint_share_what_services_have_once() -> None:
    section = _flow(reward=JudgeReward("http://j/v1", "m", prompt="Is {completion} right?", scale=(1, 5))).config()
    judge = section.reward_model.judge
    assert (section.reward_model.type, judge.url, judge.model) == ("judge", "http://j/v1", "m")
    assert (judge.prompt, judge.scale) == ("Is {completion} right?", (1.0, 5.0))
    assert judge.pattern == load_config().reward_model.judge.pattern
    both = WeightedReward([(RewardAPI("http://h", concurrency=8), 1.0), (JudgeReward("http://j", timeout=5.0), 0.5)])
    found = _flow(reward=both).config().reward_model
    assert (found.weights, found.concurrency, found.timeout) == ({"api": 1.0, "judge": 0.5}, 8, 5.0)
    assert RLDataFlow.from_dict(_flow(reward=both).to_dict()) == _flow(reward=both)
    with pytest.raises(ConfigError, match=r"reward_model\.retries is one for all, and its rewards say 1 and 2"):
        WeightedReward([(RewardAPI("http://h", retries=1), 1.0), (JudgeReward("http://j", retries=2), 0.5)])


def test_a_part_in_the_wrong_place_is_refused() -> None:
    for role, thing in {
        "rollout": GSM8KReward(),
        "reward": GRPOAdvantage(),
        "advantage": GSM8KReward(),
        "policy_update": HFRollout("m"),
    }.items():
        with pytest.raises(ConfigError, match=f"{role} is .*: expected "):
            _flow(**{role: thing})
    with pytest.raises(ConfigError, match="the class GSM8KReward: expected"):
        _flow(reward=GSM8KReward)
    with pytest.raises(ConfigError, match="data_flow is 3"):
        PPOTrainer(data_flow=3)  # type: ignore[arg-type]


def test_a_device_mesh_is_for_this_process_only(tmp_path: Path) -> None:
    mesh = object()
    flow = _flow(policy_update=FSDPPolicyUpdate(device_mesh=mesh))
    assert flow.policy_update.device_mesh is mesh
    assert flow.config() == _flow().config()
    for attempt in (flow.to_dict, lambda: flow.compile(tmp_path / "flow.yaml"), lambda: flow.submit(host="http://h")):
        with pytest.raises(ConfigError, match=r"policy_update cannot leave this process\. device_mesh is a live mesh"):
            attempt()


def test_runners_are_known_by_name() -> None:
    with pytest.raises(ConfigError, match="no runner 'slurm'; known are kubeflow, local"):
        find_runner("slurm")


def test_a_runner_that_is_not_on_the_import_path_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from ratchet.flow import runners

    point = EntryPoint("kubeflow", "pipelines_elsewhere.runner:KubeflowRunner", runners.GROUP)
    monkeypatch.setattr(runners, "entry_points", lambda group: [point])
    with pytest.raises(ConfigError, match=r"no module pipelines_elsewhere: .*PYTHONPATH=ROOT"):
        find_runner("kubeflow")
