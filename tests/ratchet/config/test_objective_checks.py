"""algorithm.objective: how it is spelt, what it cannot go with, and what it leaves unread."""

import pytest

from ratchet.config import RunConfig, load_config, semantic
from ratchet.config.checks import config_warnings
from ratchet.errors import ConfigError

OFFLINE = ("sft", "dpo", "reward_model")
HYBRID = ["algorithm.objective=hybrid", "algorithm.hybrid.sft_files=demos.jsonl"]


def _load(*overrides: str) -> RunConfig:
    return load_config(overrides=list(overrides))


@pytest.mark.parametrize("objective", [*OFFLINE, "hybrid"])
def test_the_objective_may_be_said_as_the_trainers_algorithm(objective: str) -> None:
    more = HYBRID[1:] if objective == "hybrid" else []
    short = _load(f"trainer.algorithm={objective.upper()}", *more)
    assert short == _load(f"algorithm.objective={objective}", *more)
    assert short.algorithm.objective == objective
    assert _load("trainer.algorithm=ppo").algorithm.objective == "rl"
    with pytest.raises(ConfigError, match=r"trainer\.algorithm"):
        _load("trainer.algorithm=sft", "algorithm.objective=dpo")


def test_what_each_objective_needs() -> None:
    facts = {}
    for name, more in (*((name, [f"algorithm.objective={name}"]) for name in ("rl", *OFFLINE)), ("hybrid", HYBRID)):
        config = _load(*more)
        facts[name] = (config.is_offline, config.needs_pairs, config.reference_is_needed, config.critic_is_needed)
    assert facts == {
        "rl": (False, False, False, False),
        "sft": (True, False, False, False),
        "dpo": (True, True, True, False),
        "reward_model": (True, True, False, False),
        "hybrid": (False, False, False, False),
    }
    free = _load("algorithm.objective=dpo", "algorithm.dpo.reference_free=true")
    assert not free.reference_is_needed
    unread = _load("algorithm.objective=sft", "actor_rollout_ref.actor.use_kl_loss=true", "critic.optim.lr=0.5")
    assert not unread.reference_is_needed
    assert not unread.critic_is_needed


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.objective=hybrid"], r"algorithm\.hybrid\.sft_files names no examples"),
        ([*HYBRID, "algorithm.hybrid.sft_lr=1e-5", "actor_rollout_ref.actor.optim.lr=0"], r"hybrid\.sft_lr scales"),
        (["algorithm.objective=dpo", "algorithm.dpo.loss_type=hinge", "algorithm.dpo.label_smoothing=0.1"],
         r"label_smoothing is 0\.1, and only loss_type=sigmoid has it, not hinge"),
        (["algorithm.objective=dpo", "algorithm.adv_estimator=gae"], r"objective=dpo learns .*adv_estimator=gae"),
        (["algorithm.objective=sft", "trainer.async_level=1"], r"trainer\.async_level=1 samples ahead"),
        (["algorithm.objective=dpo", "algorithm.dpo.beta=0"], r"algorithm\.dpo\.beta"),
        (["algorithm.objective=dpo", "algorithm.dpo.label_smoothing=0.5"], r"algorithm\.dpo\.label_smoothing"),
        ([*HYBRID, "algorithm.hybrid.mix_ratio=1"], r"algorithm\.hybrid\.mix_ratio"),
        ([*HYBRID, "algorithm.hybrid.mix_ratio=0"], r"algorithm\.hybrid\.mix_ratio"),
        (["algorithm.objective=ppo"], r"algorithm\.objective"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_naming_the_keys(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _load(*overrides)


@pytest.mark.parametrize("objective", OFFLINE)
def test_faults_of_rewards_and_rollouts_do_not_stop_what_reads_neither(objective: str) -> None:
    of_rl = ["reward_model.type=model", "algorithm.filter_groups.enable=true"]
    with pytest.raises(ConfigError, match=r"reward_model\.path"):
        _load(*of_rl)
    assert _load(*of_rl, f"algorithm.objective={objective}").is_offline


def test_what_is_set_without_effect_is_warned_about_by_its_key() -> None:
    more = ["actor_rollout_ref.rollout.temperature=0.5", "reward_model.gsm8k_mode=strict", "algorithm.gamma=0.9"]
    (warning,) = config_warnings(_load("algorithm.objective=dpo", *more, "actor_rollout_ref.actor.entropy_coeff=0.1"))
    for key in ("rollout.temperature", "reward_model.gsm8k_mode", "algorithm.gamma", "actor.entropy_coeff"):
        assert key in warning
    for objective in OFFLINE:
        read = ["actor_rollout_ref.actor.optim.lr=1e-5", "actor_rollout_ref.rollout.dtype=float32"]
        assert config_warnings(_load(f"algorithm.objective={objective}", *read)) == []
    assert config_warnings(_load(*HYBRID, "actor_rollout_ref.rollout.n=2")) == []
    for name, key in (("dpo", "algorithm.dpo.beta=0.5"), ("hybrid", "algorithm.hybrid.mix_ratio=0.5")):
        (warning,) = config_warnings(_load("algorithm.objective=sft", key))
        assert f"algorithm.{name} is configured without effect: algorithm.objective is sft" in warning


def test_the_objective_is_what_a_run_is_and_the_place_of_its_examples_is_not() -> None:
    alone = [semantic(_load(f"algorithm.objective={name}")) for name in ("rl", *OFFLINE)]
    assert all(one != other for one in alone for other in alone if one is not other)
    assert semantic(_load(*HYBRID)) == semantic(_load(HYBRID[0], "algorithm.hybrid.sft_files=moved/demos.jsonl"))
    assert semantic(_load(*HYBRID)) != semantic(_load(*HYBRID, "algorithm.hybrid.mix_ratio=0.5"))
