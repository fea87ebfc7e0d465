"""The keys of verl that are none of Ratchet's: with which values they are taken, and why others are refused. One table.

Trap: a key may be taken only if its value asks for what Ratchet does anyway, or for nothing that shows in a result or a
promise; a value that would change results is refused, however common it is in configs that users bring. The first rule
that matches counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

OFF: tuple[Any, ...] = (None, False, 0, "", "disabled", [], {})
"""Values that switch something off, or say nothing."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of some keys, each with everything below it; `*` stands for any part of a name."""

    names: tuple[str, ...]
    reason: str
    """Why the values that are taken change nothing, or why the others are refused and what to use instead."""
    takes: Sequence[Any] | None = OFF
    """Values that are taken; None takes all."""

    def covers(self, key: str) -> bool:
        """Whether the rule is about this key."""
        return any(fnmatchcase(key, name) or fnmatchcase(key, f"{name}.*") for name in self.names)

    def accepts(self, value: Any) -> bool:
        """Whether this value changes nothing."""
        # Compared with their types: 1 is not true, and 0 is not false.
        return self.takes is None or any(type(value) is type(item) and value == item for item in self.takes)


def _ignored(reason: str, *names: str) -> Rule:
    return Rule(names, reason, None)


def _only(reason: str, takes: Sequence[Any], *names: str) -> Rule:
    return Rule(names, reason, (None, *takes))


def _refused(reason: str, *names: str) -> Rule:
    return Rule(names, reason)


_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_F, _M = "actor_rollout_ref.ref", "actor_rollout_ref.model"
_UPDATES = (_A, _F, "critic")
_FSDP = tuple(f"{section}.fsdp_config" for section in _UPDATES)
_OPTIM = (f"{_A}.optim", "critic.optim")
_MODELS = (_M, "critic.model")
_PARALLEL = ("data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size")
_RETURNS = ("return_raw_input_ids", "return_raw_chat", "return_full_prompt", "return_multi_modal_inputs")
_REWARD_LOOP = ("reward_loop_source", "reward_loop_module_path", "reward_loop_class_name")
_OTHER_OPTIM = (
    *("decay_type", "exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype", "weight_decay_incr_style"),
    *("lr_decay_ratio", "lr_decay_steps", "lr_decay_style", "lr_start", "lr_warmup_init", "lr_wsd_decay_steps"),
    *("lr_wsd_decay_style", "use_checkpoint_opt_param_scheduler", "use_layer_wise_distributed_optimizer"),
    *("use_precision_aware_optimizer", "muon_*"),
)


def _each(sections: Sequence[str], *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for section in sections for name in names)


FAMILIES: tuple[Rule, ...] = (
    _ignored("names a class of verl's", "*._target_"),
    _refused("there is one training backend, FSDP2", "*.megatron", "*.veomni", "*.torchtitan", "*.automodel"),
    _refused("there is one training backend, FSDP2", "*.mindspeed", "*.mbridge_config", "*.turbo_config"),
    _refused("quantised training is not there", "*.qat"),
    _refused("there is no profiler; metrics hold the seconds of every stage", "*.profiler", "global_profiler"),
    _refused("mixture-of-experts routing is not replayed", "*.router_replay", f"{_R}.enable_rollout_routing_replay"),
    _refused("mixture-of-experts metrics are not there", f"{_R}.moe_load_balance_metrics_interval"),
    _refused("multi-token prediction is not there", "*.mtp"),
    _refused(
        "an episode is one turn and calls no tools",
        f"{_R}.multi_turn",
        "data.tool_config_path",
        "data.function_tool_path",
    ),
    _only("an episode is one turn; there are no agent loops", ("single_turn_agent",), f"{_R}.agent.default_agent_loop"),
    _ignored("rollouts are sampled in one process", f"{_R}.agent.num_workers"),
    _refused("an episode is one turn; there are no agent loops", f"{_R}.agent"),
    _ignored("new weights replace the sampler's in place", f"{_R}.checkpoint_engine", f"{_R}.layered_summon"),
    _refused("every completion is in the run's tables; there is no trace of another kind", f"{_R}.trace"),
    _refused("metrics go to trainer.logger; there is no Prometheus endpoint", f"{_R}.prometheus"),
    _refused("prefill and decoding run in one engine", "*.disaggregation"),
    _refused("engines take their named keys alone, such as rollout.max_num_seqs", "*.engine_kwargs"),
    _refused("on-policy distillation is not there", "distillation"),
    _refused("state passes through committed artifacts; there is no transfer queue", "transfer_queue"),
    _refused("committed rollouts are never sampled again; nothing is to be skipped", "skip"),
    _refused("there is no Ray", "ray_kwargs"),
    _refused("there is no sandbox for code; use reward_model.type=api", "sandbox_fusion"),
    _refused("samples are not re-weighted by preference", "algorithm.use_pf_ppo", "algorithm.pf_ppo"),
    _refused("only text is trained on", "*.freeze_vision_tower", "data.mm_processor_kwargs"),
)
"""Whole features of verl."""

UPDATES: tuple[Rule, ...] = (
    _only("sequences are always packed without padding", (True,), *_each((*_UPDATES, *_MODELS), "use_remove_padding")),
    _ignored(
        "the policy's update compiles as actor.use_torch_compile says, vLLM as rollout.use_torch_compile",
        *_each((_F, "critic", *_FSDP, *_MODELS), "use_torch_compile"),
    ),
    _ignored("use model.use_liger", *_each((*_UPDATES, *_FSDP), "use_liger")),
    _ignored(
        "changes speed or memory at most; the update has one implementation",
        *_each(
            (*_UPDATES, *_FSDP, *_MODELS),
            "use_fused_kernels",
            "fused_kernel_options",
            "tiled_mlp",
            "use_prefix_grouper",
            "entropy_from_logits_with_chunking",
            "entropy_from_logits_chunk_size",
            "entropy_checkpointing",
            "pad_to_length",
            "pad_to_length_bucket",
            "enable_activation_offload",
            "use_flash_attention_2",
        ),
    ),
    _ignored("processes wait as torch does", "*.nccl_timeout"),
    _ignored(
        "micro-batches never change a result; they follow the token budget where no size is given",
        *_each((*_UPDATES, _R), "use_dynamic_bsz", "log_prob_use_dynamic_bsz"),
        *_each((_F, _R), "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu"),
        *_each(("critic",), "forward_micro_batch_size", "forward_micro_batch_size_per_gpu"),
        "reward_model.use_dynamic_bsz",
        "reward_model.micro_batch_size",
        "reward_model.micro_batch_size_per_gpu",
        f"{_R}.log_prob_max_token_len_per_gpu",
    ),
    _ignored("how a batch is spread over GPUs changes no result", "trainer.balance_batch"),
    _refused(
        "the size over all GPUs is not derived from the number of GPUs: use ppo_micro_batch_size_per_gpu",
        *_each(_UPDATES, "ppo_micro_batch_size"),
    ),
    _only("the reference runs under FSDP2 or alone", ("fsdp", "fsdp2"), f"{_F}.strategy"),
    _only("FSDP2 is used", ("fsdp", "fsdp2"), *_each(_FSDP, "strategy")),
    _only(
        "master weights are always float32; the precision of the computation is fsdp_config.dtype",
        ("fp32", "float32"),
        *_each(_FSDP, "model_dtype", "mixed_precision"),
    ),
    _ignored("the reference computes as the policy does", f"{_F}.fsdp_config.dtype"),
    _ignored("models stay on their device", *_each(_FSDP, "param_offload", "optimizer_offload", "offload_policy")),
    _ignored(
        "how weights are sharded changes no result",
        *_each(_FSDP, "reshard_after_forward", "forward_prefetch", "use_orig_params", "wrap_policy", "forward_only"),
        *_each(_FSDP, "fsdp_size"),
    ),
    _refused("bitwise equality is not promised on a GPU", "*.full_determinism"),
    _only("there is one seed, trainer.seed", (42,), *_each(_FSDP, "seed"), f"{_R}.seed", "*.data_loader_seed"),
    _only("a sequence is not split over GPUs", (1,), "*.ulysses_sequence_parallel_size"),
    _only(
        "the optimizer is AdamW",
        ("AdamW", "adamw", "adam", "torch.optim"),
        *_each(_OPTIM, "optimizer", "optimizer_impl", "name"),
    ),
    _only("the optimizer has its named keys alone", ({},), *_each(_OPTIM, "override_optimizer_config")),
    _only("use trainer.total_training_steps", (-1,), *_each(_OPTIM, "total_training_steps")),
    _only("the cosine schedule falls once", (0.5,), *_each(_OPTIM, "num_cycles")),
    _only("step 1 of a warm-up has the rate 0", (True,), *_each(_OPTIM, "zero_indexed_step")),
    _ignored("the reference is never trained", f"{_F}.optim"),
    _refused("use min_lr_ratio", *_each(_OPTIM, "min_lr", "min_lr_factor", "lr_min")),
    _refused("the optimizer is AdamW, with the keys of actor.optim above", *_each(_OPTIM, *_OTHER_OPTIM)),
    _ignored(
        "the entropy is always measured; sums of squares where the estimator reads them",
        *_each((_A,), "calculate_entropy", "calculate_sum_pi_squared"),
    ),
    _ignored("a trainer state always holds everything", "*.checkpoint.save_contents"),
    _ignored("states are committed in order", "*.checkpoint.async_save"),
    _only(
        "a run goes on with everything that its state holds",
        (["model", "optimizer", "extra"],),
        "*.checkpoint.load_contents",
    ),
    _only("a state is loaded whole", (True,), "*.checkpoint.strict"),
    _only("policy, sampler and reference share a run's processes", (True,), "actor_rollout_ref.hybrid_engine"),
    _only("a critic has a value head", (True,), "critic.use_value_head"),
)
"""Updates and what surrounds them."""

MODELS: tuple[Rule, ...] = (
    _refused(
        "weights, tokenizer and chat template come from model.path", *_each(_MODELS, "hf_config_path", "tokenizer_path")
    ),
    _refused("the chat template is the tokenizer's", *_each(_MODELS, "custom_chat_template")),
    _refused("code from a model's folder is not run", "*.trust_remote_code"),
    _refused("name Python files in `code`", "*.external_lib"),
    _refused("a model is used as its config.json says", *_each(_MODELS, "override_config")),
    _ignored("files are read where they are", "*.use_shm"),
    _refused("use model.lora_rank", f"{_M}.lora.rank"),
    _refused(
        "adapters begin at 0; start from a folder with merged weights",
        *_each((_M,), "lora_adapter_path", "lora.adapter_path"),
    ),
    _refused("name the layers that have adapters in model.target_modules", f"{_M}.exclude_modules"),
    _refused(
        "LoRA trains the policy alone",
        *_each(("critic.model",), "lora_rank", "lora.rank", "lora_adapter_path", "lora.adapter_path"),
    ),
    _ignored(
        "it belongs to LoRA, which the critic has not",
        *_each(("critic.model",), "lora_alpha", "lora", "target_modules", "exclude_modules"),
    ),
    _ignored("LoRA's keys are lora_rank, lora_alpha and target_modules", f"{_M}.lora"),
)
"""Models."""

ROLLOUTS: tuple[Rule, ...] = (
    _ignored(
        "changes speed or memory at most",
        *_each(
            (_R,),
            "mode",
            "enable_prefix_caching",
            "cudagraph_capture_sizes",
            "disable_log_stats",
            "skip_tokenizer_init",
            "scheduling_policy",
            "load_format",
            "multi_stage_wake_up",
        ),
    ),
    _ignored("it follows from data.max_prompt_length and data.max_response_length", f"{_R}.max_model_len"),
    _only("log-probs are those of what was sampled from", ("processed_logprobs",), f"{_R}.logprobs_mode"),
    _only("rollouts are sampled; lower rollout.temperature instead", (True,), f"{_R}.do_sample"),
    _only("the sampler runs where the trainer does", (0,), f"{_R}.nnodes"),
    _ignored("the sampler runs where the trainer does", f"{_R}.n_gpus_per_node"),
    _only("use rollout.tensor_model_parallel_size", (1,), *_each((_R,), *_PARALLEL)),
    _only("a step samples what it needs; algorithm.filter_groups samples more", (0, 0.0), f"{_R}.over_sample_rate"),
    _refused("a sampler has the precision of rollout.dtype", *_each((_R,), "quantization", "quantization_config_file")),
    _only("the actor's loss is actor.policy_loss.loss_mode", ("ppo_clip",), "algorithm.rollout_correction.loss_type"),
    _ignored("rounds are sampled one after the other", "algorithm.filter_groups.max_inflight_gen_batches"),
)
"""Rollouts and the algorithm."""

DATA_AND_REWARDS: tuple[Rule, ...] = (
    _only("a round of sampling takes data.train_batch_size prompts", (), "data.gen_batch_size"),
    _ignored("held-out prompts are evaluated all together", "data.val_batch_size", "data.validation_shuffle"),
    _ignored("prompts are prepared once a run", "data.dataloader_num_workers", "data.filter_overlong_prompts_workers"),
    _ignored("tables have the columns that stages read", *_each(("data",), *_RETURNS)),
    _only("the column that names the reward is data_source", ("data_source",), "data.reward_fn_key"),
    _only("long prompts are an error, or left out with data.filter_overlong_prompts", ("error",), "data.truncation"),
    _only(
        "only text is trained on", ("images", "videos", "audios"), "data.image_key", "data.video_key", "data.audio_key"
    ),
    _ignored("only text is trained on", "data.image_patch_size"),
    _refused("name a file in data.train_files; there are no dataset classes", "data.custom_cls", "data.sampler"),
    _refused("the tokenizer comes from actor_rollout_ref.model.path", "data.tokenizer"),
    _refused("the chat template is applied without arguments", "data.apply_chat_template_kwargs"),
    _ignored(
        "how many requests run at once is reward_model.concurrency",
        *_each(("reward", "reward_model"), "num_workers"),
        "num_workers",
    ),
    _only("use custom_reward_function.path", ("register",), "reward_manager.source"),
    _only("use custom_reward_function.path", ("custom_reward_manager",), "reward_manager.module.name"),
    _refused("use custom_reward_function.path", "reward_manager.module", *_each(("reward_model",), *_REWARD_LOOP)),
    _ignored("the reward model runs where the policy does", "reward_model.n_gpus_per_node", "reward_model.strategy"),
    _refused("the reward model runs where the policy does", "reward_model.nnodes", "reward_model.enable_resource_pool"),
    _refused(
        "a reward model is read by its own tokenizer",
        *_each(("reward_model", "reward_model.model"), "input_tokenizer"),
    ),
    _refused("a reward model is a classifier; ask a generating one by reward_model.type=api", "reward_model.rollout"),
    _ignored("penalties are in reward_breakdown", "reward_model.overlong_buffer.log"),
    _refused("use reward_model.overlong_buffer and custom_reward_function", "reward_model.reward_kwargs"),
)
"""Data and rewards."""

TRAINER: tuple[Rule, ...] = (
    _ignored("every evaluated completion is kept, and MLflow shows 16 of them", "trainer.log_val_generations"),
    _ignored("every rollout is in the run's tables", "trainer.rollout_data_dir", "trainer.validation_data_dir"),
    _refused("use `ratchet evaluate RUN --step N`", "trainer.val_only"),
    _refused("use an s3:// root, trainer.default_local_dir=s3://bucket/prefix", "trainer.default_hdfs_dir"),
    _refused("trainer states are kept as trainer.max_actor_ckpt_to_keep says", "trainer.del_local_ckpt_after_load"),
    _ignored("every stage is committed as it ends", "trainer.esi_redundant_time"),
    _ignored("there is no Ray", "trainer.ray_wait_register_center_timeout"),
    _ignored("there is one trainer", "trainer.use_v1"),
    _only("sampling runs ahead with trainer.async_level=1", ("sync",), "trainer.v1.trainer_mode"),
    _refused("sampling runs ahead with trainer.async_level=1", "trainer.v1"),
)
"""How a run is driven."""

GROUPS = {
    "Updates": UPDATES,
    "Models": MODELS,
    "Rollouts and algorithm": ROLLOUTS,
    "Data and rewards": DATA_AND_REWARDS,
    "Running": TRAINER,
    "Features": FAMILIES,
}
"""The whole table, by the headings of the reference."""

RULES = (*FAMILIES, *UPDATES, *MODELS, *ROLLOUTS, *DATA_AND_REWARDS, *TRAINER)

_BACKENDS = ("megatron", "veomni", "torchtitan", "automodel", "mindspeed", "fsdp_turbo")

VALUES = {
    "actor_rollout_ref.rollout.name": ("sglang", "trtllm", "vllm_omni"),
    "actor_rollout_ref.actor.strategy": _BACKENDS,
    "critic.strategy": _BACKENDS,
    "reward_model.reward_manager": ("prime", "batch", "gdpo", "remote", "rate_limited", "limited"),
    "trainer.logger": ("wandb", "swanlab", "vemlp_wandb", "clearml", "trackio", "file"),
    "trainer.device": ("npu",),
}
"""Values that verl has and Ratchet has not, of keys that both have."""


def rule_of(key: str) -> Rule | None:
    """Return the rule about a key of verl, spelled out; None where there is none."""
    return next((rule for rule in RULES if rule.covers(key)), None)
