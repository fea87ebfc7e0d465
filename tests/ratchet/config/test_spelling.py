from pathlib import Path
from typing import Any

import pytest

from ratchet.config import load_config, parse_config
from ratchet.config.keys import key_fields
from ratchet.config.reading import PSEUDO_KEYS
from ratchet.config.spelling import CONVERSIONS, INHERITED, SPELLINGS, long_name, spelled
from ratchet.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def test_every_spelling_means_a_key_and_is_none_itself() -> None:
    keys = set(key_fields())
    assert {item.key for item in SPELLINGS.values()} <= keys | set(PSEUDO_KEYS)
    assert not set(SPELLINGS) & keys
    assert {*CONVERSIONS, *INHERITED, *INHERITED.values()} <= keys
    assert all(long_name(name) == name for name in SPELLINGS)


@pytest.mark.parametrize(
    ("typed", "key", "value"),
    [
        ("actor.model_name_or_path=m", "actor_rollout_ref.model.path", "m"),
        ("actor_rollout_ref.actor.model_name_or_path=m", "actor_rollout_ref.model.path", "m"),
        ("rollout.model_name_or_path=m", "actor_rollout_ref.model.path", "m"),
        ("ref.model_name_or_path=m", "actor_rollout_ref.model.path", "m"),
        ("rollout.type=hf", f"{ROLLOUT}.name", "hf"),
        ("rollout.n=7", f"{ROLLOUT}.n", 7),
        ("rollout.val_kwargs.n=7", f"{ROLLOUT}.val_kwargs.n", 7),
        ("rollout.tensor_parallel_size=2", f"{ROLLOUT}.tensor_model_parallel_size", 2),
        ("rollout.response_length=99", "data.max_response_length", 99),
        ("actor.torch_dtype=float32", f"{ACTOR}.fsdp_config.dtype", "float32"),
        ("actor.fsdp_config.dtype=fp32", f"{ACTOR}.fsdp_config.dtype", "float32"),
        ("actor.optim.warmup_style=cosine", f"{ACTOR}.optim.lr_scheduler_type", "cosine"),
        ("actor.optim.clip_grad=0.5", f"{ACTOR}.grad_clip", 0.5),
        ("ref.log_prob_max_token_len_per_gpu=9", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", 9),
        ("critic.model_name_or_path=m", "critic.model.path", "m"),
        ("critic.fsdp.dtype=float32", "critic.fsdp_config.dtype", "float32"),
        ("critic.model.fsdp_config.dtype=float32", "critic.fsdp_config.dtype", "float32"),
        ("data.train_dataset='json:./a.jsonl'", "data.train_files", "json:./a.jsonl"),
        ("data.train_files=['a.parquet']", "data.train_files", "a.parquet"),
        ("data.batch_size=8", "data.train_batch_size", 8),
        ("data.seed=8", "trainer.seed", 8),
        ("data.seed=null", "trainer.seed", 0),
        ("reward.reward_model.model_path=m", "reward_model.path", "m"),
        ("reward_model.model.path=m", "reward_model.path", "m"),
        ("reward.reward_manager.name=dapo", "reward_model.reward_manager", "dapo"),
        ("reward_model.enable=false", "reward_model.type", "rule"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.len=9", "reward_model.overlong_buffer.len", 9),
        ("reward.custom_reward_function.reward_kwargs.scale=2", "custom_reward_function.reward_kwargs", {"scale": 2}),
        ("trainer.algorithm=ppo", "algorithm.adv_estimator", "gae"),
        ("algorithm.adv_estimator=ppo", "algorithm.adv_estimator", "gae"),
        ("trainer.algorithm=rloo", "algorithm.adv_estimator", "rloo"),
        ("trainer.num_epochs=3", "trainer.total_epochs", 3),
        ("trainer.save_dir=out", "trainer.default_local_dir", "out"),
        ("trainer.logger=console", "trainer.logger", ("console",)),
    ],
)
def test_a_name_sets_the_key_that_it_means(typed: str, key: str, value: Any) -> None:
    assert load_config(overrides=[typed]).value(key) == value


def test_two_names_of_one_key_must_agree_in_one_source() -> None:
    tree = {"trainer": {"num_epochs": 3, "total_epochs": 3}, "actor": {"model_name_or_path": "m"}}
    assert parse_config({**tree, "ref": {"model_name_or_path": "m"}}).trainer.total_epochs == 3
    with pytest.raises(ConfigError) as caught:
        parse_config({**tree, "ref": {"model_name_or_path": "other"}}, ["data.batch_size=2", "data.train_batch_size=4"])
    text = str(caught.value)
    assert "actor.model_name_or_path is 'm' and ref.model_name_or_path is 'other'" in text
    assert "the reference is version 0 of the policy" in text
    assert "data.batch_size is 2 and data.train_batch_size is 4, and both mean data.train_batch_size" in text


def test_an_override_counts_over_the_file_under_whatever_name() -> None:
    tree = {"trainer": {"num_epochs": 3}, "data": {"train_batch_size": 2, "max_prompt_length": 9}}
    overrides = ["trainer.total_epochs=5", "data.batch_size=4", "data.seq_length=20"]
    config = parse_config(tree, overrides)
    assert (config.trainer.total_epochs, config.data.train_batch_size) == (5, 4)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (10, 10)
    later = parse_config({"data": {"seq_length": 20}}, ["data.max_prompt_length=4", "rollout.response_length=5"])
    assert (later.data.max_prompt_length, later.data.max_response_length) == (4, 5)


def test_a_fault_names_the_key_as_it_was_typed() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.num_epochs \(trainer\.total_epochs\): .* but it is 0"):
        load_config(overrides=["trainer.num_epochs=0"])
    with pytest.raises(ConfigError, match=r"rollout\.type \(actor_rollout_ref\.rollout\.name\): verl has 'sglang'"):
        load_config(overrides=["rollout.type=sglang"])


@pytest.mark.parametrize(
    ("overrides", "lengths"),
    [
        (["data.seq_length=1024"], (512, 512)),
        (["data.seq_length=7"], (3, 4)),
        (["data.seq_length=1000", "data.max_prompt_length=300"], (300, 700)),
        (["data.seq_length=1000", "data.max_response_length=300"], (700, 300)),
        (["data.seq_length=1000", "data.max_prompt_length=300", "data.max_response_length=700"], (300, 700)),
    ],
)
def test_a_sequence_is_split_between_prompt_and_completion(overrides: list[str], lengths: tuple[int, int]) -> None:
    data = load_config(overrides=overrides).data
    assert (data.max_prompt_length, data.max_response_length) == lengths


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["data.seq_length=1"], "data.seq_length: expected at least 2"),
        (["data.seq_length=long"], "data.seq_length: expected at least 2"),
        (["data.seq_length=100", "data.max_prompt_length=100"], "max_prompt_length alone is 100"),
        (["data.seq_length=9", "data.max_prompt_length=4", "rollout.response_length=4"], "they must add up"),
    ],
)
def test_lengths_that_do_not_fit_a_sequence_are_refused(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "estimator"),
    [
        ([], "grpo"),
        (["critic.model.path=m"], "gae"),
        (["critic.optim.lr=1e-5"], "gae"),
        (["critic.enable=true"], "gae"),
        (["critic.enable=false", "critic.optim.lr=1e-5"], "grpo"),
        (["critic.enable=true", "trainer.algorithm=ppo"], "gae"),
        (["critic.enable=null"], "grpo"),
        (["critic.model.path=m", "trainer.algorithm=grpo"], "grpo"),
    ],
)
def test_who_configures_a_critic_means_ppo_unless_an_estimator_is_named(overrides: list[str], estimator: str) -> None:
    assert load_config(overrides=overrides).algorithm.adv_estimator == estimator


@pytest.mark.parametrize("overrides", [["critic.enable=true", "trainer.algorithm=grpo"], ["critic.enable=maybe"]])
def test_a_critic_that_the_estimator_contradicts_is_refused(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"critic\.enable"):
        load_config(overrides=overrides)
    with pytest.raises(ConfigError, match=r"critic\.enable is false, and trainer\.algorithm .*=gae needs the critic"):
        load_config(overrides=["critic.enable=false", "trainer.algorithm=ppo"])


def test_what_is_given_says_what_grades() -> None:
    assert load_config(overrides=["reward_model.path=m"]).reward_model.type == "model"
    assert load_config(overrides=["reward_model.url=http://host"]).reward_model.type == "api"
    assert load_config(overrides=[f"custom_reward_function.path={__file__}"]).reward_model.type == "custom"
    both = ["reward_model.path=m", "reward_model.url=http://host"]
    assert load_config(overrides=[*both, "reward_model.type=api"]).reward_model.type == "api"
    assert load_config(overrides=[*both, "reward_model.weights={model: 1, api: 2}"]).reward_model.type == "rule"
    with pytest.raises(ConfigError, match=r"say which grades with reward_model\.type"):
        load_config(overrides=both)


def test_the_critic_has_its_batches_from_the_actor_and_a_fault_in_them_is_the_actors() -> None:
    given = ["actor.ppo_mini_batch_size=64", "actor.ppo_epochs=2", "actor.ppo_max_token_len_per_gpu=4096"]
    config = load_config(overrides=["critic.ppo_epochs=3", *given])
    assert (config.critic.ppo_mini_batch_size, config.critic.ppo_epochs) == (64, 3)
    assert config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu == 4096
    # As in verl, the critic's token budget is its own.
    assert config.critic.ppo_max_token_len_per_gpu == 32768
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=["actor.ppo_epochs=0"])
    assert "critic" not in str(caught.value)


def test_names_are_spelled_out_one_section_after_the_other() -> None:
    assert long_name("reward.reward_kwargs.overlong_buffer_cfg.enable") == "reward_model.overlong_buffer.enable"
    assert long_name("actors.lr") == "actors.lr"
    assert spelled("actor.optim.lr", 1) == ("actor_rollout_ref.actor.optim.lr", 1)


def test_the_configs_of_tutorials_load_as_they_stand(shared: Path) -> None:
    folder = shared / "fixtures" / "configs"
    nested = load_config(folder / "grpo_nested.yaml")
    assert (nested.algorithm.adv_estimator, nested.data.train_batch_size) == ("grpo", 1024)
    assert nested.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 32
    assert nested.trainer.experiment_name == "qwen2-7b"

    short = load_config(folder / "grpo_short.yaml")
    assert short.actor_rollout_ref.model.path == short.critic.model.path == "Qwen/Qwen2-0.5B-Instruct"
    assert short.algorithm.adv_estimator == "grpo"
    assert not short.critic_is_needed
    assert (short.reward_model.type, short.reward_model.url) == ("api", "http://localhost:8000/score")
    assert (short.data.max_prompt_length, short.data.max_response_length) == (512, 512)
    assert (short.trainer.total_epochs, short.trainer.default_local_dir) == (1, "./output")

    ppo = load_config(overrides=(folder / "ppo_overrides.txt").read_text().split("\n")[:-1])
    assert ppo.critic_is_needed
    assert ppo.critic.model.path == ppo.actor_rollout_ref.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert ppo.actor_rollout_ref.rollout.max_num_seqs == 512
    assert (ppo.trainer.total_epochs, ppo.trainer.save_freq, ppo.trainer.logger) == (15, 10, ("console",))
