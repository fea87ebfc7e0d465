"""What keys say about each other: contradictions, which are errors, and settings without effect, which warn.

Trap: a config is read again from every submission, where each key has a value; so nothing here may ask whether a key
was given, only what it says.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel

from ratchet.algorithms.catalog import POLICY_LOSSES
from ratchet.algorithms.rollout_bands import weight_band
from ratchet.config.models import UpdateConfig
from ratchet.config.objective_checks import objective_faults, objective_warnings

if TYPE_CHECKING:
    from ratchet.config.schema import RunConfig

_RESCORED = "algorithm.rollout_correction.bypass_mode=false"
_ASKED = "actor_rollout_ref.rollout.calculate_log_probs"
_STEP_FOLDER = re.compile(r"(global_step_|step-)\d+$")


def combination_faults(config: "RunConfig") -> list[str]:
    """Return every contradiction between keys, as messages that name them."""
    always = [*objective_faults(config), *_update_faults(config), *_trainer_faults(config)]
    if config.is_offline:
        # Nothing is sampled or graded, whatever those keys say.
        return always
    return [*always, *_algorithm_faults(config), *_behaviour_faults(config), *_reward_faults(config)]


def config_warnings(config: "RunConfig") -> list[str]:
    """Return what the config sets without effect, and settings from which nothing can be learnt."""
    own = [*objective_warnings(config), *_unused_trainer_keys(config)]
    return own if config.is_offline else [*_unused_sections(config), *_unused_keys(config), *own]


def _update_faults(config: "RunConfig") -> Iterator[str]:
    batch_size, actor = config.data.train_batch_size, config.actor_rollout_ref.actor
    sections: dict[str, UpdateConfig] = {"actor_rollout_ref.actor": actor}
    if config.critic_is_needed:
        sections["critic"] = config.critic
    for name, update in sections.items():
        mini_batch = update.ppo_mini_batch_size
        if mini_batch is not None and mini_batch > batch_size:
            yield f"{name}.ppo_mini_batch_size is {mini_batch}, more than data.train_batch_size ({batch_size})"
    if actor.policy_loss.loss_mode == "dro" and actor.policy_loss.dro_beta is None:
        yield (
            "actor_rollout_ref.actor.policy_loss.loss_mode is dro, whose penalty has no default: "
            "set actor_rollout_ref.actor.policy_loss.dro_beta"
        )


def _algorithm_faults(config: "RunConfig") -> Iterator[str]:
    algorithm, rollout = config.algorithm, config.actor_rollout_ref.rollout
    if config.actor_rollout_ref.actor.use_kl_loss and algorithm.use_kl_in_reward:
        yield (
            "actor_rollout_ref.actor.use_kl_loss and algorithm.use_kl_in_reward are both on: "
            "the penalty would count twice"
        )
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive" and algorithm.kl_ctrl.kl_coef == 0:
        yield (
            "algorithm.kl_ctrl.kl_coef is 0, and an adaptive coefficient is multiplied from step to step, so that it "
            "would stay 0; set algorithm.kl_ctrl.kl_coef above 0"
        )
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0:
        yield (
            "actor_rollout_ref.rollout.val_kwargs.do_sample is on at temperature 0, which samples nothing: "
            "set val_kwargs.temperature above 0"
        )
    if rollout.dedicated_gpus and rollout.tensor_model_parallel_size > 1:
        yield (
            f"actor_rollout_ref.rollout.dedicated_gpus is {rollout.dedicated_gpus}, each with an engine of its own, "
            f"and tensor_model_parallel_size is {rollout.tensor_model_parallel_size}: set one of them to its default"
        )
    if algorithm.filter_groups.enable and rollout.n == 1:
        yield (
            "algorithm.filter_groups.enable drops groups whose rewards are all equal, which a group of one always is: "
            "set actor_rollout_ref.rollout.n above 1"
        )
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if weights and len(weights) != len(keys):
        yield (
            f"algorithm.gdpo_reward_weights has {len(weights)} weights, and algorithm.gdpo_reward_keys names "
            f"{len(keys)} parts: expected a weight for each"
        )


def _behaviour_faults(config: "RunConfig") -> Iterator[str]:
    """Whether the log-probs that are compared are there: the sampler's, the policy's, the update's own."""
    algorithm, rollout = config.algorithm, config.actor_rollout_ref.rollout
    correction, is_asked = algorithm.rollout_correction, rollout.calculate_log_probs
    if correction.bypass_mode and is_asked and (rollout.top_p < 1 or rollout.top_k > 0):
        yield (
            "actor_rollout_ref.rollout.top_p below 1 or top_k above 0 renormalises the sampler's log-probs, which "
            f"biases the ratio against the policy's; keep top_p=1 and top_k=-1, or set {_RESCORED}"
        )
    if correction.bypass_mode and correction.rollout_rs is not None:
        yield (
            "algorithm.rollout_correction.rollout_rs compares the policy's log-probs with the sampler's before the "
            f"update, and bypass_mode takes the sampler's for both: set {_RESCORED}"
        )
    if correction.bypass_mode and correction.rollout_is is not None and not _is_weighed_in_the_update(config):
        yield (
            "algorithm.rollout_correction.rollout_is with bypass_mode=true weighs tokens within the update, which "
            "takes rollout_is=token with one number as rollout_is_threshold and rollout_is_batch_normalize=false: "
            f"set these, or {_RESCORED}"
        )
    if config.behaviour_source == "update" and not _is_one_optimizer_step(config):
        cause = f"{_ASKED}=false" if not is_asked else "algorithm.rollout_correction.rollout_is with bypass_mode=true"
        yield (
            f"{cause} takes the update's own log-probs as behaviour log-probs, which they are only where a step is one "
            "optimizer step: leave actor_rollout_ref.actor.ppo_mini_batch_size out and set "
            f"actor_rollout_ref.actor.ppo_epochs=1, or set {_RESCORED}"
        )
    if not is_asked:
        yield from _unasked_faults(config)


def _unasked_faults(config: "RunConfig") -> Iterator[str]:
    """What reads the log-probs of every rollout, and the sampler reports those of a share."""
    algorithm = config.algorithm
    correction = algorithm.rollout_correction
    if config.trainer.async_level:
        yield (
            f"trainer.async_level={config.trainer.async_level} samples with an older policy than is trained, whose "
            f"log-probs have to be known: set {_ASKED}=true"
        )
    for name in ("rollout_is", "rollout_rs"):
        if getattr(correction, name) is not None:
            yield f"algorithm.rollout_correction.{name} reads the sampler's log-probs: set {_ASKED}=true"
    if correction.bypass_mode:
        readers = {
            "algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
            f"algorithm.adv_estimator={algorithm.adv_estimator}": "sum_pi_squared" in config.advantage_needs,
        }
        for name in [name for name, is_on in readers.items() if is_on]:
            yield f"{name} reads log-probs before the update: set {_ASKED}=true, or {_RESCORED}"


def _is_weighed_in_the_update(config: "RunConfig") -> bool:
    correction = config.algorithm.rollout_correction
    lowest, _ = weight_band(correction.rollout_is_threshold)
    return correction.rollout_is == "token" and lowest is None and not correction.rollout_is_batch_normalize


def _is_one_optimizer_step(config: "RunConfig") -> bool:
    actor = config.actor_rollout_ref.actor
    return actor.ppo_epochs == 1 and actor.ppo_mini_batch_size in (None, config.data.train_batch_size)


def _reward_faults(config: "RunConfig") -> Iterator[str]:
    reward, limit = config.reward_model, config.data.max_response_length
    places = {
        "model": ("reward_model.path", reward.path),
        "api": ("reward_model.url", reward.url),
        "judge": ("reward_model.judge.url", reward.judge.url),
        "custom": ("custom_reward_function.path", config.custom_reward_function.path),
    }
    for kind in config.reward_weights:
        key, place = places.get(kind, ("", "given"))
        if not place:
            said = "reward_model.weights names" if reward.weights else "reward_model.type is"
            yield f"{said} {kind}, and {key} is not set"
    buffer = reward.overlong_buffer
    if buffer.enable and buffer.len > limit:
        yield f"reward_model.overlong_buffer.len is {buffer.len}, more than data.max_response_length ({limit})"
    penalty = reward.length_penalty
    if penalty.weight and penalty.free_tokens >= limit:
        yield (
            f"reward_model.length_penalty.free_tokens is {penalty.free_tokens}, which data.max_response_length "
            f"({limit}) does not exceed: no completion would be penalised"
        )


def _trainer_faults(config: "RunConfig") -> Iterator[str]:
    place, processes = config.trainer.resume_from_path, config.trainer.n_gpus_per_node * config.trainer.nnodes
    if config.actor_rollout_ref.model.lora_rank and processes > 1:
        yield (
            f"actor_rollout_ref.model.lora_rank is {config.actor_rollout_ref.model.lora_rank}, and LoRA trains in one "
            f"process, not in {processes}: set trainer.n_gpus_per_node=1 and trainer.nnodes=1"
        )
    if config.trainer.resume_mode != "resume_path":
        return
    if not place:
        yield "trainer.resume_mode is resume_path, and trainer.resume_from_path names no run"
    elif _STEP_FOLDER.search(place.rstrip("/")):
        yield (
            f"trainer.resume_from_path is {place}, the folder of a step; a run goes on after its newest commit: "
            "expected the folder of the run, ROOT/RUN-ID"
        )


def _unused_sections(config: "RunConfig") -> Iterator[str]:
    algorithm, estimator = config.algorithm, config.algorithm.adv_estimator
    if not config.critic_is_needed:
        if _changes(config.critic, like=config.actor_rollout_ref.actor):
            yield f"critic is configured, and algorithm.adv_estimator={estimator} uses none; gae does"
        if config.trainer.critic_warmup:
            yield f"trainer.critic_warmup has no effect: algorithm.adv_estimator={estimator} uses no critic"
    switches = {
        "algorithm.kl_ctrl": (algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward=true"),
        "algorithm.filter_groups": (algorithm.filter_groups.enable, "algorithm.filter_groups.enable=true"),
        "reward_model.overlong_buffer": (config.reward_model.overlong_buffer.enable, "overlong_buffer.enable=true"),
        "reward_model.length_penalty": (config.reward_model.length_penalty.weight > 0, "length_penalty.weight"),
        "reward_model.format": (bool(config.reward_model.format.pattern), "format.pattern"),
    }
    for name, (is_on, switch) in switches.items():
        section: BaseModel = config
        for part in name.split("."):
            section = getattr(section, part)
        if not is_on and _changes(section):
            yield f"{name} is configured without effect; {switch} turns it on"


def _unused_keys(config: "RunConfig") -> Iterator[str]:
    algorithm, reward, used = config.algorithm, config.reward_model, config.reward_weights
    correction, estimator = algorithm.rollout_correction, algorithm.adv_estimator
    if "group" in config.advantage_needs and config.actor_rollout_ref.rollout.n == 1:
        yield (
            f"actor_rollout_ref.rollout.n is 1, and {estimator} compares the completions of one prompt with each "
            "other: nothing is learnt from a group of one; set rollout.n above 1, or use another estimator"
        )
    places = {
        "reward_model.path": ("model", reward.path),
        "reward_model.url": ("api", reward.url),
        "reward_model.judge.url": ("judge", reward.judge.url),
        "custom_reward_function.path": ("custom", config.custom_reward_function.path),
    }
    for key, (kind, place) in places.items():
        if place and kind not in used:
            yield f"{key} is given without effect: what grades is {', '.join(used)}"
    if correction.rollout_rs is None and correction.rollout_rs_threshold is not None:
        yield "algorithm.rollout_correction.rollout_rs_threshold has no effect without rollout_rs"
    actor = config.actor_rollout_ref.actor
    fixed = POLICY_LOSSES.get(actor.policy_loss.loss_mode).loss_agg_mode
    if fixed and actor.loss_agg_mode not in (fixed, "token-mean"):
        yield (
            f"actor_rollout_ref.actor.loss_agg_mode={actor.loss_agg_mode} holds for the entropy and KL terms alone: "
            f"the loss {actor.policy_loss.loss_mode} is averaged by {fixed}"
        )
    if estimator == "gae" and algorithm.compat == "verl" and algorithm.whiten_advantages:
        yield "algorithm.whiten_advantages whitens a second time what gae has whitened with algorithm.compat=verl"
    if estimator == "gdpo" and algorithm.use_kl_in_reward:
        yield (
            "algorithm.use_kl_in_reward has no effect with gdpo, which reads the reward's parts: use "
            "actor_rollout_ref.actor.use_kl_loss"
        )
    if algorithm.gdpo_reward_keys and estimator != "gdpo":
        yield f"algorithm.gdpo_reward_keys has no effect with algorithm.adv_estimator={estimator}"
    rollout = config.actor_rollout_ref.rollout
    if rollout.calculate_log_probs and _is_set(rollout, "log_probs_share"):
        yield f"actor_rollout_ref.rollout.log_probs_share has no effect with {_ASKED}=true"
    trainer = config.trainer
    if trainer.async_level and not correction.bypass_mode and correction.rollout_is is None:
        yield (
            f"trainer.async_level={trainer.async_level} samples with an older policy than is trained, and {_RESCORED} "
            "without rollout_is does not correct for it: set algorithm.rollout_correction.rollout_is=token"
        )
    if trainer.async_level and config.actor_rollout_ref.rollout.free_cache_engine:
        yield (
            "actor_rollout_ref.rollout.free_cache_engine has no effect with trainer.async_level=1: the sampler works "
            "while the policy is trained"
        )


def _unused_trainer_keys(config: "RunConfig") -> Iterator[str]:
    """What any objective reads."""
    model, trainer = config.actor_rollout_ref.model, config.trainer
    if not model.lora_rank and any(_is_set(model, name) for name in ("lora_alpha", "target_modules")):
        yield "actor_rollout_ref.model.lora_alpha and target_modules have no effect with lora_rank=0"
    if trainer.resume_from_path and trainer.resume_mode != "resume_path":
        yield f"trainer.resume_from_path has no effect with trainer.resume_mode={trainer.resume_mode}"


def _is_set(section: BaseModel, name: str) -> bool:
    """Whether a key is not its default."""
    return bool(getattr(section, name) != getattr(type(section)(), name))


def _changes(section: BaseModel, *, like: BaseModel | None = None) -> bool:
    """Whether some key is neither its default nor the value that it has in `like`."""
    default, other = type(section)(), dict(like or ())
    return any(value not in (getattr(default, name), other.get(name)) for name, value in section)
