"""Flows of the objectives that learn from examples, and of the hybrid: what they declare and what they refuse."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet import (
    DPOAdvantage,
    DPOPolicyUpdate,
    FSDPPolicyUpdate,
    GAEAdvantage,
    GRPOAdvantage,
    GSM8KReward,
    HFRollout,
    HybridDataFlow,
    RewardModelUpdate,
    RLDataFlow,
    RLTask,
    SFTPolicyUpdate,
    SFTTask,
    load_config,
)
from ratchet.config.load import known_keys
from ratchet.errors import ConfigError
from ratchet.flow.part import plain
from ratchet.flow.runners import find_runner

ROLLOUT = HFRollout("m", n=2)
UPDATES = [SFTPolicyUpdate(model="m"), DPOPolicyUpdate(model="m"), RewardModelUpdate(model="m")]
NAMES = ("DPOAdvantage", "DPOPolicyUpdate", "HybridDataFlow", "JudgeReward", "RLTask", "RewardModelUpdate",
         "SFTPolicyUpdate", "SFTTask")  # fmt: skip


def _graph(flow: Any, config: Any = None) -> dict[str, tuple[str, ...]]:
    return dict(find_runner("local").graph(flow.config(config)))


def _hybrid(**rl: Any) -> HybridDataFlow:
    return HybridDataFlow(sft_task=SFTTask("demos.jsonl"), rl_task=RLTask("p.jsonl", **{"rollout": ROLLOUT, **rl}))


def test_they_are_imported_from_the_package_when_they_are_asked_for() -> None:
    code = f"import sys, ratchet; [getattr(ratchet, name) for name in {NAMES!r}]; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


@pytest.mark.parametrize("part", [*UPDATES, SFTTask("d"), RLTask("d")], ids=repr)
def test_a_part_sets_keys_that_exist_and_leaves_their_defaults(part: Any) -> None:
    assert not set(part.keys()) - set(known_keys())
    default, given = load_config(), part.keys(given_only=True)
    assert {key: value for key, value in part.keys().items() if plain(default.value(key)) != value} == given


@pytest.mark.parametrize(
    ("flow", "overrides"),
    [
        (RLDataFlow(policy_update=SFTPolicyUpdate(model="m", lr=1e-5, max_tokens=64)),
         ["algorithm.objective=sft", "actor_rollout_ref.actor.optim.lr=1e-5", "data.max_response_length=64"]),
        (RLDataFlow(policy_update=DPOPolicyUpdate(0.2, model="m", loss_type="ipo", length_normalized=True)),
         ["algorithm.objective=dpo", "algorithm.dpo.beta=0.2", "algorithm.dpo.loss_type=ipo",
          "algorithm.dpo.length_normalized=true"]),
        (RLDataFlow(policy_update=DPOPolicyUpdate(model="m", label_smoothing=0.1, reference_free=True, lora_rank=8)),
         ["trainer.algorithm=dpo", "algorithm.dpo.label_smoothing=0.1", "algorithm.dpo.reference_free=true",
          "actor_rollout_ref.model.lora_rank=8"]),
        (RLDataFlow(policy_update=RewardModelUpdate(model="m", max_prompt_length=99)),
         ["algorithm.objective=reward_model", "data.max_prompt_length=99"]),
        (HybridDataFlow(sft_task=SFTTask("d", 1e-5), rl_task=RLTask("p", rollout=ROLLOUT), mix_ratio=0.4),
         ["algorithm.objective=hybrid", "algorithm.hybrid.sft_files=d", "algorithm.hybrid.sft_lr=1e-5",
          "algorithm.hybrid.mix_ratio=0.4", "data.train_files=p", "actor_rollout_ref.rollout.name=hf",
          "actor_rollout_ref.rollout.n=2"]),
    ],
    ids=["sft", "dpo-ipo", "dpo-free", "reward-model", "hybrid"],
)  # fmt: skip
def test_a_flow_makes_the_config_that_the_same_keys_make_in_yaml(flow: Any, overrides: list[str]) -> None:
    assert flow.config() == load_config(overrides=["actor_rollout_ref.model.path=m", *overrides])


def test_swapping_the_advantage_and_the_update_turns_rl_into_dpo() -> None:
    rl = RLDataFlow(rollout=ROLLOUT, advantage=GRPOAdvantage(), policy_update=FSDPPolicyUpdate(lr=1e-5))
    dpo = RLDataFlow(rollout=None, advantage=DPOAdvantage(), policy_update=DPOPolicyUpdate(model="m", lr=1e-5))
    assert list(_graph(rl)) == ["rollout", "reward", "advantage", "policy_update"]
    assert _graph(dpo) == {"reference_scores": (), "policy_update": ("reference_scores",)}
    assert dpo == RLDataFlow(policy_update=DPOPolicyUpdate(model="m", lr=1e-5)) != rl
    assert dpo.reward is None
    assert dpo.advantage.name == "dpo"


def test_the_graph_follows_from_the_objective() -> None:
    for update in (UPDATES[0], UPDATES[2], DPOPolicyUpdate(reference_free=True)):
        assert _graph(RLDataFlow(policy_update=update)) == {"policy_update": ()}
    assert list(_graph(_hybrid())) == ["rollout", "reward", "advantage", "policy_update"]
    assert {"values", "critic_update"} <= set(_graph(_hybrid(advantage=GAEAdvantage())))


def test_printing_a_flow_shows_the_parts_that_it_has() -> None:
    lines = str(RLDataFlow(policy_update=DPOPolicyUpdate(0.2, model="m"))).splitlines()
    assert lines[:5] == ["RLDataFlow", "  rollout        None", "  reward         None",
                         "  advantage      DPOAdvantage()",
                         "  policy_update  DPOPolicyUpdate(model='m', beta=0.2)"]  # fmt: skip
    assert "  algorithm.objective: dpo" in lines
    assert lines[-2:] == ["  reference_scores", "  policy_update    <- reference_scores"]
    lines = str(_hybrid(reward=GSM8KReward())).splitlines()
    assert lines[0] == "HybridDataFlow"
    assert "  sft_task       SFTTask(dataset='demos.jsonl')" in lines
    assert "  rollout        HFRollout(model='m', n=2)" in lines
    assert "  algorithm.hybrid.sft_files: demos.jsonl" in lines


@pytest.mark.parametrize("update", UPDATES, ids=repr)
def test_what_learns_from_examples_refuses_the_parts_of_rl(update: Any) -> None:
    name = type(update).__name__
    with pytest.raises(ConfigError, match=rf"{name} learns from the examples .*rollout=None.*{name}\(model=\.\.\.\)"):
        RLDataFlow(rollout=ROLLOUT, policy_update=update)
    with pytest.raises(ConfigError, match=rf"reward is GSM8KReward\(\), and {name} grades nothing"):
        RLDataFlow(reward=GSM8KReward(), policy_update=update)
    with pytest.raises(ConfigError, match=rf"advantage is GRPOAdvantage\(\), and {name} takes"):
        RLDataFlow(advantage=GRPOAdvantage(), policy_update=update)


def test_online_dpo_is_refused_until_it_is_there() -> None:
    with pytest.raises(ConfigError, match=r"online DPO, whose pairs are sampled, is not there yet"):
        RLDataFlow(rollout=ROLLOUT, policy_update=DPOPolicyUpdate())


def test_the_marker_of_dpo_goes_with_dpo_alone() -> None:
    with pytest.raises(ConfigError, match=r"DPOAdvantage\(\): it goes with policy_update=DPOPolicyUpdate"):
        RLDataFlow(rollout=ROLLOUT, advantage=DPOAdvantage())
    with pytest.raises(ConfigError, match="SFTPolicyUpdate takes none"):
        RLDataFlow(advantage=DPOAdvantage(), policy_update=UPDATES[0])
    with pytest.raises(ConfigError, match=r"rollout is None: expected VLLMRollout.*SFTPolicyUpdate"):
        RLDataFlow(policy_update=FSDPPolicyUpdate())


def test_a_config_of_another_objective_is_refused_naming_both() -> None:
    sft = RLDataFlow(policy_update=UPDATES[0])
    with pytest.raises(ConfigError, match=r"algorithm\.objective is 'dpo' in the config and 'sft' in SFTPolicyUpdate"):
        sft.config({"algorithm": {"objective": "dpo"}})
    with pytest.raises(ConfigError, match=r"objective is 'sft' in the config, and RLDataFlow with FSDPPolicyUpdate"):
        RLDataFlow(rollout=ROLLOUT).config({"algorithm": {"objective": "sft"}})
    with pytest.raises(ConfigError, match=r"algorithm\.dpo\.beta is 0\.5 in the config and 0\.1 in DPOPolicyUpdate"):
        RLDataFlow(policy_update=DPOPolicyUpdate(0.1)).config({"algorithm": {"dpo": {"beta": 0.5}}})
    left_out = RLDataFlow(policy_update=DPOPolicyUpdate()).config({"algorithm": {"dpo": {"beta": 0.5}}})
    assert left_out.algorithm.dpo.beta == 0.5
    with pytest.raises(ConfigError, match=r"label_smoothing is 0\.1, and only loss_type=sigmoid has it"):
        RLDataFlow(policy_update=DPOPolicyUpdate(loss_type="ipo", label_smoothing=0.1)).config()


def test_the_tasks_of_a_hybrid_are_of_their_kind_and_of_one_model() -> None:
    sft, rl = SFTTask("d"), RLTask("p", rollout=ROLLOUT)
    with pytest.raises(ConfigError, match=r"sft_task is RLTask\(.*expected SFTTask\(dataset, \.\.\.\)"):
        HybridDataFlow(sft_task=rl, rl_task=rl)
    with pytest.raises(ConfigError, match="an RLTask learns from rewards"):
        _hybrid(policy_update=DPOPolicyUpdate())
    with pytest.raises(ConfigError, match="SFTTask says 'a', the rollout says 'm': name one model, once"):
        HybridDataFlow(sft_task=SFTTask("d", model="a"), rl_task=rl)
    for dataset in ("", None, [1]):
        with pytest.raises(ConfigError, match=r"SFTTask: dataset is .*expected a file, a folder or a dataset id"):
            SFTTask(dataset)
    with pytest.raises(ConfigError, match="mix_ratio"):
        HybridDataFlow(sft_task=sft, rl_task=rl, mix_ratio=1.0).config()


def test_the_model_of_a_hybrid_may_be_named_by_any_of_its_parts(tmp_path: Path) -> None:
    wanted = HybridDataFlow(sft_task=SFTTask("d"), rl_task=RLTask("p", rollout=HFRollout("m"))).config()
    config = {"actor_rollout_ref": {"rollout": {"name": "hf", "n": 8}}}
    for sft, rl in ((SFTTask("d", model="m"), RLTask("p")), (SFTTask("d"), RLTask("p", model="m"))):
        assert HybridDataFlow(sft_task=sft, rl_task=rl).config(config) == wanted
    path = tmp_path / "demos.jsonl"
    assert SFTTask(path) == SFTTask(str(path))


def test_promised_arguments_keep_their_places() -> None:
    update = FSDPPolicyUpdate(1e-5, 0.5, 2, 0.1, 0.3, "token-sum")
    assert (update.lr, update.grad_clip, update.ppo_epochs) == (1e-5, 0.5, 2)
    assert (update.clip_ratio_low, update.clip_ratio_high, update.loss_agg_mode) == (0.1, 0.3, "token-sum")
    assert DPOPolicyUpdate(0.3).beta == 0.3
    with pytest.raises(TypeError, match="SFTPolicyUpdate"):
        SFTPolicyUpdate(1e-5)


def test_a_config_with_a_critic_for_another_objective_still_makes_this_one() -> None:
    config = RLDataFlow(policy_update=UPDATES[0]).config({"critic": {"optim": {"lr": 1e-4}}})
    assert config.algorithm.adv_estimator == "grpo"
    assert not config.critic_is_needed
