"""From the run's config to the settings of each engine; the only place where the two meet."""

import dataclasses
from typing import TYPE_CHECKING, Any

from ratchet.algorithms.rollout_bands import weight_band
from ratchet.config import RunConfig
from ratchet.data.order import steps_per_epoch
from ratchet.store.run import Run

if TYPE_CHECKING:
    from ratchet.config.models import ActorConfig, CriticConfig
    from ratchet.engines.critic import CriticSettings
    from ratchet.engines.sampler import SamplingParams
    from ratchet.engines.trainer import TrainerSettings
    from ratchet.engines.training import TrainingSettings


def total_steps(run: Run, config: RunConfig) -> int:
    """Return the steps of the whole run; the training prompts must be committed if the epochs decide."""
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    rows = run.require("preprocess/train", None).output(data_role(config)).rows
    assert rows is not None
    return config.trainer.total_epochs * steps_per_epoch(rows, config.data.train_batch_size)


def data_role(config: RunConfig) -> str:
    """Return what the run's training data are: prompts to sample from, or examples to learn from."""
    return "examples" if config.is_offline else "prompts"


def rollout_version(config: RunConfig, step: int) -> int:
    """Return the policy version that samples `step`: the one before it, or as far behind as sampling runs ahead."""
    return max(step - 1 - config.trainer.async_level, 0)


def sampling_params(config: RunConfig) -> "SamplingParams":
    """How rollouts are sampled."""
    from ratchet.engines.sampler import SamplingParams

    rollout = config.actor_rollout_ref.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k if rollout.top_k > 0 else None,
        max_tokens=config.data.max_response_length,
        ignore_eos=rollout.ignore_eos,
    )


def greedy_params(config: RunConfig) -> "SamplingParams":
    """How the completions are made that ReMax compares with."""
    return dataclasses.replace(sampling_params(config), temperature=0.0, with_log_probs=False)


def validation_params(config: RunConfig) -> "SamplingParams":
    """How held-out completions are sampled."""
    from ratchet.engines.sampler import SamplingParams

    values = config.actor_rollout_ref.rollout.val_kwargs
    return SamplingParams(
        temperature=values.temperature if values.do_sample else 0.0,
        top_p=values.top_p,
        top_k=values.top_k if values.top_k > 0 else None,
        max_tokens=config.data.max_response_length,
        with_log_probs=False,
    )


def sampler_settings(config: RunConfig, device: str) -> dict[str, Any]:
    """Keyword arguments of the sampler that the config names."""
    rollout = config.actor_rollout_ref.rollout
    settings: dict[str, Any] = {"dtype": rollout.dtype, "max_num_seqs": rollout.max_num_seqs}
    if rollout.dedicated_gpus:
        # At stage grain nobody trains in the pod that samples.
        trainers = 0 if config.trainer.grain == "stage" else config.trainer.n_gpus_per_node
        settings |= {"dedicated_gpus": rollout.dedicated_gpus, "first_gpu": trainers}
    if rollout.name == "hf":
        return settings | {"device": device}
    return settings | {
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enforce_eager": rollout.enforce_eager,
        "use_torch_compile": rollout.use_torch_compile,
        "free_cache_engine": rollout.free_cache_engine,
        "sleep_level": rollout.sleep_level,
        "max_model_len": config.data.max_prompt_length + config.data.max_response_length,
    }


def scorer_settings(config: RunConfig, device: str) -> dict[str, Any]:
    """Keyword arguments of a scorer."""
    return {
        "compute_dtype": config.actor_rollout_ref.actor.fsdp_config.dtype,
        # Nothing is sampled offline.
        "temperature": 1.0 if config.is_offline else config.actor_rollout_ref.rollout.temperature,
        "max_tokens_per_micro_batch": config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu,
        "device": device,
    }


def judge_settings(config: RunConfig, device: str) -> dict[str, Any]:
    """Keyword arguments of the scorer of a run that trains a reward model."""
    return {
        "compute_dtype": config.actor_rollout_ref.actor.fsdp_config.dtype,
        "max_tokens_per_micro_batch": config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu,
        "device": device,
    }


def value_scorer_settings(config: RunConfig, device: str) -> dict[str, Any]:
    """Keyword arguments of the critic's scorer."""
    return {
        "compute_dtype": config.critic.fsdp_config.dtype,
        "max_tokens_per_micro_batch": config.critic.forward_max_token_len_per_gpu,
        "device": device,
    }


def trainer_settings(config: RunConfig, steps: int) -> "TrainerSettings":
    """What the policy's trainer is told in a run of `steps`."""
    from ratchet.algorithms.batch import LossOptions
    from ratchet.engines.trainer import TrainerSettings

    actor, loss = config.actor_rollout_ref.actor, config.actor_rollout_ref.actor.policy_loss
    hybrid, is_hybrid = config.algorithm.hybrid, config.algorithm.objective == "hybrid"
    return TrainerSettings(
        **_policy_settings(config, steps),
        sft_weight=hybrid.mix_ratio if is_hybrid else 0.0,
        sft_scale=hybrid.sft_lr / actor.optim.lr if is_hybrid and hybrid.sft_lr is not None else 1.0,
        importance_threshold=_importance_threshold(config),
        policy_loss=loss.loss_mode,
        loss_options=LossOptions(
            clip_ratio_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
            clip_ratio_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
            clip_ratio_c=actor.clip_ratio_c,
            clip_cov_ratio=loss.clip_cov_ratio,
            clip_cov_lb=loss.clip_cov_lb,
            clip_cov_ub=loss.clip_cov_ub,
            kl_cov_ratio=loss.kl_cov_ratio,
            ppo_kl_coef=loss.ppo_kl_coef,
            tau_pos=actor.tau_pos,
            tau_neg=actor.tau_neg,
            dro_beta=loss.dro_beta,
            compat=config.algorithm.compat,
        ),
        entropy_coeff=actor.entropy_coeff,
        kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_loss_type=actor.kl_loss_type,
        temperature=config.actor_rollout_ref.rollout.temperature,
    )


def offline_settings(config: RunConfig, steps: int) -> "TrainingSettings":
    """What the trainer of an offline objective is told."""
    # One example a row, and the mean over tokens, or pairs, is the loss.
    settings = _policy_settings(config, steps) | {"loss_agg_mode": "token-mean"}
    match config.algorithm.objective:
        case "sft":
            from ratchet.engines.sft_trainer import SFTSettings

            return SFTSettings(**settings)
        case "dpo":
            from ratchet.engines.dpo_trainer import DPOSettings

            dpo = config.algorithm.dpo
            return DPOSettings(
                **settings,
                beta=dpo.beta,
                loss_type=dpo.loss_type,
                label_smoothing=dpo.label_smoothing,
                reference_free=dpo.reference_free,
                length_normalized=dpo.length_normalized,
            )
    from ratchet.engines.reward_trainer import RewardModelSettings

    return RewardModelSettings(**settings)


def critic_settings(config: RunConfig, steps: int) -> "CriticSettings":
    """What the critic's trainer is told."""
    from ratchet.engines.critic import CriticSettings

    critic = config.critic
    return CriticSettings(
        **_update_settings(config, critic, steps),
        gradient_checkpointing=critic.model.enable_gradient_checkpointing,
        use_liger=critic.model.use_liger,
        cliprange_value=critic.cliprange_value,
    )


def _importance_threshold(config: RunConfig) -> float | None:
    """Where the update truncates the weights that it takes itself, if it does."""
    correction = config.algorithm.rollout_correction
    if config.behaviour_source != "update" or correction.rollout_is is None:
        return None
    _, threshold = weight_band(correction.rollout_is_threshold)
    return threshold


def _policy_settings(config: RunConfig, steps: int) -> dict[str, Any]:
    """What every trainer of a policy is told."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    targets = model.target_modules
    return {
        **_update_settings(config, actor, steps),
        "gradient_checkpointing": model.enable_gradient_checkpointing,
        "use_liger": model.use_liger,
        "use_torch_compile": actor.use_torch_compile,
        "lora_rank": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "lora_target_modules": () if isinstance(targets, str) or not model.lora_rank else targets,
    }


def _update_settings(config: RunConfig, section: "ActorConfig | CriticConfig", steps: int) -> dict[str, Any]:
    """What both trainers are told."""
    optim = section.optim
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * steps)
    mini_batch = section.ppo_mini_batch_size or config.data.train_batch_size
    return {
        "lr": optim.lr,
        "weight_decay": optim.weight_decay,
        "betas": optim.betas,
        "adam_eps": optim.eps,
        "lr_scheduler": optim.lr_scheduler_type,
        "warmup_steps": warmup,
        "total_steps": steps,
        "min_lr_ratio": optim.min_lr_ratio,
        "grad_clip": section.grad_clip,
        "ppo_epochs": section.ppo_epochs,
        "mini_batch_size": mini_batch * (1 if config.is_offline else config.actor_rollout_ref.rollout.n),
        "shuffle": section.shuffle,
        "max_tokens_per_micro_batch": section.ppo_max_token_len_per_gpu,
        "micro_batch_size": section.ppo_micro_batch_size_per_gpu,
        "loss_agg_mode": section.loss_agg_mode,
        "loss_norm_length": section.loss_scale_factor or config.data.max_response_length,
        "compute_dtype": section.fsdp_config.dtype,
        "seed": config.trainer.seed,
    }
