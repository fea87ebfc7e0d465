"""Which keys make a run what it is, and which may change from one submission to the next.

`run.json` holds the semantic keys only. Trap: a key that changes any committed number is semantic, however technical it
looks (a micro-batch size changes the order in which floats are added, but not what is computed: it is not). And a key
that is new must not make the runs of yesterday other runs: beside FIRST_KEYS, a key with its default is left out.
"""

from collections.abc import Container, Iterable, Mapping
from typing import Any

from ratchet.config.keys import key_fields
from ratchet.config.schema import RunConfig

OPERATIONAL = frozenset(
    {
        # Places; what they hold is compared by digest.
        "actor_rollout_ref.model.path",
        "data.train_files",
        "data.val_files",
        "algorithm.hybrid.sft_files",
        "reward_model.path",
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        "actor_rollout_ref.model.use_liger",
        "actor_rollout_ref.actor.strategy",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        "actor_rollout_ref.actor.use_torch_compile",
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "actor_rollout_ref.rollout.dedicated_gpus",
        "actor_rollout_ref.rollout.max_num_seqs",
        "actor_rollout_ref.rollout.max_num_batched_tokens",
        "actor_rollout_ref.rollout.enable_chunked_prefill",
        "actor_rollout_ref.rollout.enforce_eager",
        "actor_rollout_ref.rollout.use_torch_compile",
        "actor_rollout_ref.rollout.max_log_prob_drift",
        "actor_rollout_ref.rollout.free_cache_engine",
        "actor_rollout_ref.rollout.sleep_level",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        "critic.model.path",
        "critic.model.enable_gradient_checkpointing",
        "critic.model.use_liger",
        "critic.strategy",
        "critic.ppo_micro_batch_size_per_gpu",
        "critic.ppo_max_token_len_per_gpu",
        "critic.forward_max_token_len_per_gpu",
        "reward_model.num_examine",
        "reward_model.max_token_len_per_gpu",
        # A service moves; what answers there is its owner's affair, as nothing of it can be compared.
        "reward_model.url",
        "reward_model.auth_env",
        "reward_model.batch_size",
        "reward_model.concurrency",
        "reward_model.timeout",
        "reward_model.retries",
        "reward_model.judge.url",
        # What it excludes is marked in the tables.
        "reward_model.on_failure",
        "custom_reward_function.sandbox",
        "custom_reward_function.timeout",
        "custom_reward_function.memory_gib",
        "custom_reward_function.env",
        "trainer.project_name",
        "trainer.experiment_name",
        "trainer.default_local_dir",
        "trainer.logger",
        "trainer.log_completions_freq",
        "trainer.system_metrics",
        "trainer.grain",
        "trainer.steps_per_segment",
        "trainer.full_weights_freq",
        "trainer.commit_lag",
        "trainer.trainer_state_freq",
        "trainer.save_freq",
        "trainer.test_freq",
        "trainer.val_before_train",
        "trainer.max_actor_ckpt_to_keep",
        "trainer.max_critic_ckpt_to_keep",
        "trainer.keep_policies",
        "trainer.storage_budget_gib",
        "trainer.resume_mode",
        "trainer.resume_from_path",
        "trainer.device",
        "trainer.n_gpus_per_node",
        "trainer.nnodes",
        "trainer.prices",
        # Where pods run, and what lets the result through.
        *(key for key in key_fields() if key.startswith(("device_map.", "promotion."))),
    }
)
"""Keys that say how and where, not what."""

EXTENT = frozenset({"trainer.total_epochs", "trainer.total_training_steps"})
"""How far the run goes: may grow on resume, unless the learning-rate schedule reads it."""


_FIRST = {
    "data": "prompt_key data_source max_prompt_length max_response_length train_batch_size filter_overlong_prompts "
    "train_max_samples val_max_samples shuffle",
    "actor_rollout_ref": "model ref",
    "actor_rollout_ref.actor": "ppo_mini_batch_size ppo_epochs shuffle clip_ratio clip_ratio_low clip_ratio_high "
    "clip_ratio_c loss_agg_mode loss_scale_factor entropy_coeff use_kl_loss kl_loss_coef kl_loss_type grad_clip",
    "actor_rollout_ref.actor.optim": "lr weight_decay betas eps lr_scheduler_type lr_warmup_steps "
    "lr_warmup_steps_ratio min_lr_ratio",
    "actor_rollout_ref.actor.fsdp_config": "dtype",
    "actor_rollout_ref.rollout": "name n temperature top_p top_k dtype ignore_eos",
    "actor_rollout_ref.rollout.val_kwargs": "do_sample temperature top_p top_k n",
    "reward_model": "gsm8k_mode",
    "algorithm": "adv_estimator norm_adv_by_std_in_grpo use_kl_in_reward kl_penalty mask_truncated_completions",
    "algorithm.kl_ctrl": "type kl_coef",
    "algorithm.rollout_correction": "bypass_mode",
    "trainer": "seed total_epochs total_training_steps",
}
FIRST_KEYS = frozenset(f"{section}.{name}" for section, names in _FIRST.items() for name in names.split())
"""What every `run.json` holds, default or not, as the first ones did. Keys that come later are not added here."""


def semantic(config: RunConfig) -> dict[str, Any]:
    """Return the nested config without the keys that may change, and without what is as if it were not there.

    A critic that nothing reads is left out, and Python files are known by their digests, wherever they lie.
    """
    leave_out = OPERATIONAL if schedule_reads_extent(config) else OPERATIONAL | EXTENT
    tree = config.model_dump(mode="json")
    files = {entry["path"]: entry["sha256"] for entry in tree["code"]}
    tree["code"] = list(files.values())
    hook = tree["custom_reward_function"]
    hook["path"] = files.get(hook["path"], hook["path"])
    if not config.critic_is_needed:
        del tree["critic"]
    return _without(tree, leave_out, RunConfig().model_dump(mode="json"))


def schedule_reads_extent(config: RunConfig) -> bool:
    """Whether the learning rate of a step depends on how many steps there are."""
    updates = [config.actor_rollout_ref.actor, *([config.critic] if config.critic_is_needed else [])]
    return any(
        update.optim.lr_scheduler_type != "constant"
        or (update.optim.lr_warmup_steps < 0 and update.optim.lr_warmup_steps_ratio > 0)
        for update in updates
    )


def selected(config: RunConfig, keys: Iterable[str]) -> dict[str, Any]:
    """Return the semantic values under `keys` (a section stands for all of its keys), for a stage's config digest.

    What `semantic` leaves out is left out here too, so that a stage that has come to read a new key has the digest of
    yesterday while that key has its default.
    """
    tree = semantic(config)
    found: dict[str, Any] = {}
    for key in keys:
        value: Any = tree
        for name in key.split("."):
            value = value.get(name, {}) if isinstance(value, dict) else {}
        if value != {} or any(first == key or first.startswith(f"{key}.") for first in FIRST_KEYS):
            found[key] = value
    return found


def _without(
    tree: Mapping[str, Any], leave_out: Container[str], default: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in tree.items():
        path, usual = f"{prefix}{name}", default.get(name)
        is_section = isinstance(value, dict) and path not in key_fields()
        found = _without(value, leave_out, usual or {}, f"{path}.") if is_section else value
        is_usual = found == {} if is_section else found == usual
        if path not in leave_out and (path in FIRST_KEYS or not is_usual):
            kept[name] = found
    return kept
