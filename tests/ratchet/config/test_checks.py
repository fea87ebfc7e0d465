import logging
from typing import Any

import pytest

from ratchet.algorithms.catalog import ADVANTAGES
from ratchet.config import RunConfig, config_warnings, load_config
from ratchet.errors import ConfigError

RESCORED = "algorithm.rollout_correction.bypass_mode=false"
BYPASSED = "algorithm.rollout_correction.bypass_mode=true"
CORRECTION = "algorithm.rollout_correction"
RS = f"{CORRECTION}.rollout_rs=seq_mean_k3"
ACTOR = "actor_rollout_ref.actor"
ASKED = "actor_rollout_ref.rollout.calculate_log_probs"
UNASKED = f"{ASKED}=false"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=8"], "ppo_mini_batch_size is 8"),
        (["critic.model.path=m", "critic.ppo_mini_batch_size=2048"], "critic.ppo_mini_batch_size is 2048"),
        (["actor_rollout_ref.actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true"], "would count twice"),
        (["actor_rollout_ref.rollout.top_p=0.9", BYPASSED], "bypass_mode=false"),
        (["actor_rollout_ref.rollout.top_k=20", BYPASSED], "bypass_mode=false"),
        (["actor_rollout_ref.rollout.val_kwargs.do_sample=true"], "val_kwargs.temperature above 0"),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=dro"], "policy_loss.dro_beta"),
        # Without another forward pass, the update can weigh tokens by one number only, and in one optimizer step.
        ([f"{CORRECTION}.rollout_is=sequence"], "takes rollout_is=token"),
        ([f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_5.0"], "one number"),
        ([f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_batch_normalize=true"], "batch_normalize=false"),
        ([f"{CORRECTION}.rollout_is=token", f"{ACTOR}.ppo_epochs=2"], "rollout_is with bypass_mode=true takes"),
        ([f"{CORRECTION}.rollout_is=token", f"{ACTOR}.ppo_mini_batch_size=8"], "ppo_mini_batch_size out"),
        ([f"{CORRECTION}.rollout_is=token", UNASKED], f"rollout_is reads the sampler's log-probs: set {ASKED}=true"),
        ([RESCORED, f"{CORRECTION}.rollout_is=token", UNASKED], f"set {ASKED}=true"),
        ([RESCORED, RS, f"{CORRECTION}.rollout_rs_threshold=0.01", UNASKED], "rollout_rs reads the sampler's"),
        ([UNASKED, f"{ACTOR}.ppo_epochs=2"], f"{ASKED}=false takes the update's own log-probs"),
        ([UNASKED, f"{ACTOR}.ppo_mini_batch_size=512"], "one optimizer step"),
        ([UNASKED, "trainer.async_level=1"], "trainer.async_level=1 samples with an older policy"),
        ([UNASKED, RESCORED, "trainer.async_level=1"], f"have to be known: set {ASKED}=true"),
        ([UNASKED, "algorithm.use_kl_in_reward=true"], "algorithm.use_kl_in_reward reads log-probs"),
        ([UNASKED, "algorithm.adv_estimator=optimal_token_baseline"], "optimal_token_baseline reads log-probs"),
        (["actor_rollout_ref.model.lora_rank=8", "trainer.n_gpus_per_node=2"], "one process, not in 2"),
        (["actor_rollout_ref.model.target_modules=[]"], "target_modules: Value should have at least 1 item"),
        (["trainer.async_level=2"], "trainer.async_level: Input should be 0 or 1"),
        ([RS, f"{CORRECTION}.rollout_rs_threshold=0.01"], RESCORED),
        ([RESCORED, RS], "rollout_rs_threshold"),
        ([RESCORED, f"{CORRECTION}.rollout_rs=seq_mean_k9", f"{CORRECTION}.rollout_rs_threshold=1"], "seq_mean_k9"),
        (
            [
                RESCORED,
                f"{CORRECTION}.rollout_rs='token_k1,token_k2,token_k3'",
                f"{CORRECTION}.rollout_rs_threshold='1,2'",
            ],
            "one rollout_rs_threshold or 3",
        ),
        ([f"{CORRECTION}.rollout_is_threshold=5_0.5"], "rollout_is_threshold"),
        ([f"{CORRECTION}.rollout_is_threshold=-1"], "rollout_is_threshold"),
        (["algorithm.filter_groups.enable=true"], "rollout.n above 1"),
        (["reward_model.overlong_buffer.enable=true", "data.max_response_length=100"], "overlong_buffer.len is 512"),
        (["algorithm.gdpo_reward_keys=[a, b]", "algorithm.gdpo_reward_weights=[1.0]"], "has 1 weights"),
        (["reward_model.type=model"], "reward_model.path is not set"),
        (["reward_model.type=api"], "reward_model.url is not set"),
        (["reward_model.type=custom"], "custom_reward_function.path is not set"),
        (["reward_model.weights={rule: 1.0, api: 0.5}"], "reward_model.weights names api"),
        (["reward_model.weights={rules: 1.0}"], "reward_model.weights.rules"),
        (["trainer.resume_mode=resume_path"], "trainer.resume_from_path names no run"),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=c/global_step_30"], "ROOT/RUN-ID"),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=s3://b/r/step-000030/"], "ROOT/RUN-ID"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        # Who samples from less than the whole distribution has the policy score the rollouts.
        (["actor_rollout_ref.rollout.top_p=0.9"], f"{CORRECTION}.bypass_mode", False),
        (["rollout.top_k=20"], f"{CORRECTION}.bypass_mode", False),
        (["actor_rollout_ref.rollout.top_p=1.0", "rollout.top_k=-1"], f"{CORRECTION}.bypass_mode", True),
        (
            ["actor_rollout_ref.rollout.val_kwargs={do_sample: true, temperature: 0.6}"],
            "actor_rollout_ref.rollout.val_kwargs.do_sample",
            True,
        ),
        # What a sampler that is not asked would say of a truncated distribution is nobody's.
        ([UNASKED, "rollout.top_p=0.9", BYPASSED], f"{CORRECTION}.bypass_mode", True),
        ([UNASKED, f"{ACTOR}.ppo_mini_batch_size=8", "data.train_batch_size=8"], ASKED, False),
        ([UNASKED, RESCORED, f"{ACTOR}.ppo_epochs=2", "algorithm.use_kl_in_reward=true"], ASKED, False),
        ([UNASKED, f"{ACTOR}.use_kl_loss=true"], ASKED, False),
        ([UNASKED, "algorithm.adv_estimator=gae", "critic.ppo_epochs=4"], ASKED, False),
        (["trainer.async_level=1", f"{CORRECTION}.rollout_is=token"], f"{CORRECTION}.rollout_is", "token"),
        (["trainer.async_level=1", "algorithm.adv_estimator=gae"], "trainer.async_level", 1),
        (
            ["trainer.async_level=1", "algorithm.filter_groups.enable=true", "rollout.n=2"],
            "algorithm.filter_groups.enable",
            True,
        ),
        (["actor_rollout_ref.model.target_modules=q_proj"], "actor_rollout_ref.model.target_modules", ("q_proj",)),
        # A critic that nothing trains may have any batch.
        (["trainer.algorithm=grpo", "critic.ppo_mini_batch_size=2048"], "critic.ppo_mini_batch_size", 2048),
        ([RESCORED, f"{CORRECTION}.rollout_is_threshold=0.5_5.0"], f"{CORRECTION}.rollout_is_threshold", "0.5_5.0"),
        (
            [
                RESCORED,
                f"{CORRECTION}.rollout_rs='token_k1,seq_max_k2'",
                f"{CORRECTION}.rollout_rs_threshold='0.5_2,9'",
            ],
            f"{CORRECTION}.rollout_rs_threshold",
            "0.5_2,9",
        ),
        (
            ["reward_model.overlong_buffer={enable: true, len: 100}", "data.max_response_length=100"],
            "reward_model.overlong_buffer.len",
            100,
        ),
        (
            ["trainer.resume_mode=resume_path", "trainer.resume_from_path=runs/step-by-step"],
            "trainer.resume_from_path",
            "runs/step-by-step",
        ),
    ],
)
def test_keys_that_look_alike_but_do_not_contradict_each_other_are_taken(
    overrides: list[str], key: str, value: Any
) -> None:
    assert load_config(overrides=overrides).value(key) == value


def test_every_contradiction_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=["reward_model.type=api", "algorithm.filter_groups.enable=true"])
    assert "reward_model.url" in str(caught.value)
    assert "algorithm.filter_groups" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["critic.model.path=m", "trainer.algorithm=grpo"], "critic is configured"),
        (["trainer.critic_warmup=3"], "trainer.critic_warmup has no effect"),
        (["algorithm.kl_ctrl.kl_coef=0.5"], "algorithm.kl_ctrl is configured without effect"),
        (["algorithm.filter_groups.metric=acc"], "algorithm.filter_groups is configured"),
        (["reward_model.overlong_buffer.len=7"], "reward_model.overlong_buffer is configured"),
        (["reward_model.url=http://host", "reward_model.type=rule"], "reward_model.url is given without effect"),
        (["algorithm.gdpo_reward_keys=[a]"], "algorithm.gdpo_reward_keys has no effect"),
        ([f"{CORRECTION}.rollout_rs_threshold=2"], "rollout_rs_threshold has no effect"),
        (["trainer.resume_from_path=runs/a"], "trainer.resume_from_path has no effect"),
        (["actor_rollout_ref.model.lora_alpha=32"], "no effect with lora_rank=0"),
        (["actor_rollout_ref.model.target_modules=[q_proj]"], "no effect with lora_rank=0"),
        (["actor_rollout_ref.rollout.log_probs_share=0.5"], "log_probs_share has no effect"),
        (["trainer.async_level=1", RESCORED], "does not correct for it"),
        (
            ["trainer.async_level=1", "actor_rollout_ref.rollout.free_cache_engine=true"],
            "free_cache_engine has no effect",
        ),
        (["actor_rollout_ref.rollout.n=1"], "nothing is learnt from a group of one"),
    ],
)
def test_what_has_no_effect_is_warned_of(overrides: list[str], named: str, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(overrides=["actor_rollout_ref.rollout.n=2", *overrides])
    (warning,) = config_warnings(config)
    assert named in warning
    assert [record.getMessage() for record in caplog.records] == [f"the command line: {warning}"]
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["critic.model.path=m", "trainer.critic_warmup=3", "actor_rollout_ref.rollout.n=1"],
        # The critic has these from the actor, and nobody configured it.
        ["actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.actor.loss_agg_mode=token-sum"],
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.5"],
        ["reward_model.url=http://host", "reward_model.weights={rule: 1, api: 1}"],
        ["trainer.algorithm=remax", "actor_rollout_ref.rollout.n=1"],
    ],
)
def test_what_has_an_effect_is_not_warned_of(overrides: list[str]) -> None:
    assert config_warnings(load_config(overrides=["actor_rollout_ref.rollout.n=2", *overrides])) == []


def test_every_estimator_but_three_compares_a_group() -> None:
    # Other tests register estimators of their own.
    ours = [entry for entry in map(ADVANTAGES.get, ADVANTAGES.names()) if isinstance(entry.home, str)]
    alone = {entry.name for entry in ours if "group" not in entry.needs}
    assert alone == {"gae", "reinforce_plus_plus", "remax"}


@pytest.mark.parametrize(
    ("overrides", "source"),
    [
        ([], "sampler"),
        ([RESCORED], "policy"),
        ([UNASKED], "update"),
        ([UNASKED, RESCORED], "policy"),
        ([f"{CORRECTION}.rollout_is=token"], "update"),
        ([RESCORED, f"{CORRECTION}.rollout_is=token"], "policy"),
        (["trainer.async_level=1"], "sampler"),
    ],
)
def test_the_ratio_is_taken_against_what_is_known(overrides: list[str], source: str) -> None:
    assert load_config(overrides=overrides).behaviour_source == source


def test_what_grades_is_the_type_alone_or_the_weights() -> None:
    assert RunConfig().reward_weights == {"rule": 1.0}
    weighted = load_config(overrides=["reward_model.weights={rule: 1, api: 0.5}", "reward_model.url=http://host"])
    assert weighted.reward_weights == {"rule": 1.0, "api": 0.5}
