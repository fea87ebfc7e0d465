from fnmatch import fnmatchcase

import pytest

from ratchet.config import load_config
from ratchet.config.keys import key_fields
from ratchet.config.reading import PSEUDO_KEYS
from ratchet.config.verl_keys import GROUPS, OFF, RULES, VALUES, rule_of
from ratchet.errors import ConfigError

N = "actor_rollout_ref.rollout.n=2"


def _answer(typed: str) -> str:
    """What is said about `typed=xyzzy`; nothing where that is taken."""
    try:
        load_config(overrides=[f"{typed}=xyzzy"])
    except ConfigError as error:
        return str(error)
    return ""


def test_every_rule_is_in_the_reference_and_about_no_key_of_ratchet() -> None:
    assert {id(rule) for rules in GROUPS.values() for rule in rules} == {id(rule) for rule in RULES}
    for rule in RULES:
        assert not [key for key in key_fields() if rule.covers(key)], rule


@pytest.mark.parametrize("group", GROUPS)
def test_a_key_of_verl_is_never_called_unknown(group: str) -> None:
    for rule in GROUPS[group]:
        for name in [name.replace("*", "x") for name in rule.names if name != "*._target_"]:
            assert rule_of(name) is rule, f"{name} is another rule's"
            for typed in (name, f"{name}.below"):
                answer = _answer(typed)
                refused = f"{typed}: verl has it, Ratchet has not: " in answer
                assert (
                    refused or f"{typed}: expected a section of keys" in answer or (not answer and rule.takes is None)
                )


@pytest.mark.parametrize(
    "typed",
    [
        "actor.use_remove_padding=true",
        "actor.use_dynamic_bsz=False",
        "actor.fsdp_config.param_offload=True",
        "actor.fsdp_config.model_dtype=fp32",
        "actor.optim.optimizer=AdamW",
        "actor.checkpoint.load_contents=[model, optimizer, extra]",
        "rollout.mode=async",
        "rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.model.use_remove_padding=True",
        "data.truncation=error",
        "data.reward_fn_key=data_source",
        "trainer.balance_batch=true",
        "trainer.log_val_generations=10",
        "critic.use_value_head=true",
        "actor.use_flash_attention_2=true",
    ],
)
def test_a_value_that_changes_nothing_is_taken_with_a_warning(typed: str, caplog: pytest.LogCaptureFixture) -> None:
    load_config(overrides=[N, typed, "trainer.algorithm=grpo"])
    (record,) = caplog.records
    assert typed.partition("=")[0] in record.getMessage()


@pytest.mark.parametrize(
    "typed",
    [
        "rollout.calculate_log_probs=false",
        "rollout.free_cache_engine=true",
        "actor.use_torch_compile=true",
        "actor_rollout_ref.model.use_liger=false",
        "actor_rollout_ref.model.lora_rank=0",
        "actor_rollout_ref.model.lora_alpha=16",
        "actor_rollout_ref.model.target_modules=all-linear",
    ],
)
def test_a_key_that_means_the_same_in_both_is_taken_without_a_word(
    typed: str, caplog: pytest.LogCaptureFixture
) -> None:
    load_config(overrides=[N, typed])
    assert not caplog.records


def test_one_warning_lists_all_of_them_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    load_config(overrides=[N, "rollout.mode=async", "trainer.balance_batch=true", "rollout.load_format=dummy"])
    (record,) = caplog.records
    assert "rollout.mode, rollout.load_format (changes speed or memory at most)" in record.getMessage()
    assert "trainer.balance_batch (" in record.getMessage()


@pytest.mark.parametrize(
    "typed",
    [
        "actor.ppo_micro_batch_size=null",
        "actor.profiler.enable=false",
        "rollout.multi_turn.enable=False",
        "rollout.engine_kwargs={}",
        "actor_rollout_ref.model.lora.rank=0",
        "critic.model.lora_rank=0",
        "actor_rollout_ref.model.override_config={}",
        "actor.router_replay.mode=disabled",
        "data.custom_cls.path=null",
        "data.gen_batch_size=null",
        "actor.checkpoint=null",
        "trainer.val_only=false",
        "trainer.default_hdfs_dir=null",
        "actor._target_=verl.workers.config.FSDPActorConfig",
    ],
)
def test_a_feature_that_is_off_is_taken(typed: str) -> None:
    load_config(overrides=[N, typed])


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("actor.use_remove_padding=false", "packed without padding"),
        ("actor.ppo_micro_batch_size=32", "use ppo_micro_batch_size_per_gpu"),
        ("actor.fsdp_config.model_dtype=bf16", "fsdp_config.dtype"),
        ("actor.megatron.tensor_model_parallel_size=2", "FSDP2"),
        ("actor.optim.muon_momentum=0.9", "AdamW"),
        ("rollout.engine_kwargs.vllm.swap_space=4", "named keys"),
        ("rollout.multi_turn.enable=true", "calls no tools"),
        ("rollout.data_parallel_size=2", "rollout.tensor_model_parallel_size"),
        ("rollout.do_sample=false", "rollout.temperature"),
        ("actor_rollout_ref.model.trust_remote_code=true", "is not run"),
        ("actor_rollout_ref.model.lora.rank=8", "use model.lora_rank"),
        ("actor_rollout_ref.model.lora_adapter_path=folder", "merged weights"),
        ("actor_rollout_ref.model.exclude_modules=[lm_head]", "model.target_modules"),
        ("critic.model.lora_rank=8", "the policy alone"),
        ("data.custom_cls.path=mine.py", "data.train_files"),
        ("data.truncation=left", "data.filter_overlong_prompts"),
        ("trainer.default_hdfs_dir=hdfs://x", "s3://"),
        ("trainer.val_only=true", "ratchet evaluate"),
        ("ray_kwargs.ray_init.num_cpus=8", "Ray"),
        ("global_profiler.tool=nsys", "profiler"),
        ("transfer_queue.enable=true", "committed artifacts"),
        ("distillation.enabled=true", "distillation"),
        ("reward_model.rollout.name=vllm", "reward_model.type=api"),
    ],
)
def test_what_verl_has_and_ratchet_has_not_is_refused_by_name_with_the_reason(typed: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[typed])
    key = typed.partition("=")[0]
    assert f"{key}: verl has it, Ratchet has not: " in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in VALUES.items() for value in values])
def test_a_value_that_verl_has_and_ratchet_has_not_is_refused_with_those_there_are(key: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[f"{key}={value}"])
    assert f"{key}" in str(caught.value)
    assert f"verl has '{value}', Ratchet has not. Input should be '" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "is_taken"), [(True, True), (None, True), (1, False), (False, False), ("true", False)]
)
def test_values_are_compared_with_their_types(value: object, is_taken: bool) -> None:
    rule = rule_of("actor_rollout_ref.actor.use_remove_padding")
    assert rule is not None
    assert rule.accepts(value) is is_taken


def test_a_misspelt_key_beside_keys_of_verl_is_still_called_unknown() -> None:
    for typed, near in {
        "actor_rollout_ref.actor.optim.lr_warmup_step": "actor_rollout_ref.actor.optim.lr_warmup_steps",
        "data.promt_key": "data.prompt_key",
        "rollout.tensor_model_paralel_size": "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "reward_model.wieghts": "reward_model.weights",
    }.items():
        with pytest.raises(ConfigError, match=f"{typed}: no such key; the nearest is {near}"):
            load_config(overrides=[f"{typed}=1"])


def test_names_with_a_star_are_whole_features() -> None:
    stars = [name for rule in RULES for name in rule.names if "*" in name]
    assert all(name.startswith("*.") or name.endswith("_*") for name in stars)
    assert not [key for key in PSEUDO_KEYS for name in stars if fnmatchcase(key, name)]
    assert OFF[0] is None
