"""Whether numbers fit each other: processes, accelerators, attention heads, lengths and steps.

What follows from the config alone is refused when it is read (`ratchet.config.checks`); here it meets the model, the
prompts and the pods.
"""

from collections.abc import Iterator
from typing import Any

from ratchet.cluster.fitting import quantity
from ratchet.config import RunConfig
from ratchet.config.checks import config_warnings
from ratchet.errors import ConfigError
from ratchet.grains import distributed
from ratchet.grains.checks.finding import Finding, PipelineFacts
from ratchet.grains.checks.images import role_of
from ratchet.grains.loop import MAX_SEGMENTS, MAX_STEPS_AT_STAGE_GRAIN

_TENSOR_PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_RESIDENT_SHARE = 0.8
_LOADED_BYTES, _TRAINED_BYTES = 4, 16
"""Of a parameter: its float32 value; and with gradient and two moments."""


def config_findings(config: RunConfig, facts: PipelineFacts) -> Iterator[Finding]:
    """What the config sets without effect, and what this pipeline cannot do with it."""
    warnings = config_warnings(config)
    for warning in warnings:
        yield Finding("config", "warning", warning)
    if config.critic_is_needed and not facts.has_critic:
        yield Finding(
            "config",
            "error",
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs a critic, and this pipeline has no task "
            "that trains one: use the pipeline ratchet-ppo-stages",
        )
    if not warnings:
        yield Finding("config", "ok", "its keys agree with each other")


def process_findings(config: RunConfig, facts: PipelineFacts) -> Iterator[Finding]:
    """Trainer processes against the grain, and against the accelerators of the pods."""
    try:
        distributed.processes(config)
    except ConfigError as error:
        yield Finding("processes", "error", str(error))
    if not facts.on_cluster:
        return
    found = [*_sampler(config, facts), *_trainer(config, facts)]
    yield from found or [Finding("accelerators", "ok", "each pod asks for what its stage uses")]


def _sampler(config: RunConfig, facts: PipelineFacts) -> Iterator[Finding]:
    rollout = config.actor_rollout_ref.rollout
    if config.is_offline:
        return
    places = ["rollout" if facts.grain == "stage" else "segment", *(["evaluate"] if config.data.val_files else [])]
    for place in places:
        if place not in facts.placements:
            continue
        count, key = facts.placements[place].accelerator_count, f"device_map.{place}.accelerator_count"
        trainers = _num_trainers(config, place)
        needed = rollout.tensor_model_parallel_size if rollout.name == "vllm" else 1
        if rollout.dedicated_gpus:
            # At stage grain nobody trains beside them.
            needed = rollout.dedicated_gpus + (0 if facts.grain == "stage" else config.trainer.n_gpus_per_node)
        if rollout.name == "vllm" and count == 0 and needed == 1 and config.trainer.device != "cpu":
            # Somebody else's image may hold a vLLM that was built for a CPU; the project's do not.
            image = facts.placements[place].image
            is_foreign = bool(image) and role_of(image) is None
            yield Finding(
                "accelerators",
                "warning" if is_foreign else "error",
                f"actor_rollout_ref.rollout.name is vllm, and {key} is 0: expected at least 1, unless the image's vLLM "
                "is built for a CPU (then set trainer.device=cpu); raise it, or sample with "
                "actor_rollout_ref.rollout.name=hf",
            )
        elif needed > 1 and needed > count and config.trainer.device != "cpu":
            yield Finding(
                "accelerators",
                "error",
                f"{_asked(config)}, and {key} is {count}: expected at least {needed} accelerators; raise the latter or "
                "lower the former",
            )
        elif count > max(needed, trainers):
            yield Finding(
                "accelerators",
                "warning",
                f"{key} is {count}, and its pods use {max(needed, trainers)}: the others stay idle",
            )


def _asked(config: RunConfig) -> str:
    """What asks for more than one accelerator."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.dedicated_gpus:
        return f"actor_rollout_ref.rollout.dedicated_gpus is {rollout.dedicated_gpus}, beside those that train"
    return f"{_TENSOR_PARALLEL} is {rollout.tensor_model_parallel_size}"


def _num_trainers(config: RunConfig, place: str) -> int:
    return config.trainer.n_gpus_per_node if place == "segment" else 1


def _trainer(config: RunConfig, facts: PipelineFacts) -> Iterator[Finding]:
    processes, device = config.trainer.n_gpus_per_node, config.trainer.device
    idle = {
        "scores": not (config.policy_scores_are_needed or config.reference_is_needed or config.critic_is_needed),
        # The export is proven on a CPU.
        "evaluate": not config.data.val_files,
    }
    for place, placement in facts.placements.items():
        if idle.get(place):
            continue
        count, key = placement.accelerator_count, f"device_map.{place}.accelerator_count"
        if device == "cuda" and count == 0:
            yield Finding(
                "accelerators",
                "error",
                f"trainer.device is cuda, and {key} is 0: expected at least 1; set it, or trainer.device=auto",
            )
        elif device == "cpu" and count > 0:
            yield Finding(
                "accelerators",
                "warning",
                f"trainer.device is cpu, and {key} is {count}: nothing will use the accelerators",
            )
        elif place == "policy_update" and processes > max(count, 1) and device != "cpu":
            yield Finding(
                "accelerators",
                "error",
                f"trainer.n_gpus_per_node is {processes}, and {key} is {count}: expected an accelerator for each "
                "process; make the two equal",
            )
        elif place == "policy_update" and count > processes:
            yield Finding(
                "accelerators",
                "warning",
                f"{key} is {count}, and trainer.n_gpus_per_node is {processes}: the others stay idle; make them equal",
            )


def head_findings(config: RunConfig, model_config: Any) -> Iterator[Finding]:
    """vLLM gives each of its parts as many attention heads; key-value heads are split, or copied when they are few."""
    rollout = config.actor_rollout_ref.rollout
    size = rollout.tensor_model_parallel_size
    if rollout.name != "vllm" or config.is_offline:
        return
    text = model_config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):
        yield Finding("tensor parallel", "unknown", f"the model's configuration names no attention heads: {text!r:.80}")
        return
    of_keys = getattr(text, "num_key_value_heads", None) or heads
    possible = [n for n in range(1, heads + 1) if heads % n == 0 and (of_keys % n == 0 or n % of_keys == 0)]
    said = f"{_TENSOR_PARALLEL} is {size}, and the model has {heads} attention and {of_keys} key-value heads"
    if size not in possible:
        listed = ", ".join(map(str, possible))
        yield Finding("tensor parallel", "error", f"{said}: expected a size that divides both; take one of {listed}")
    else:
        yield Finding("tensor parallel", "ok", said)


def memory_findings(config: RunConfig, facts: PipelineFacts, num_parameters: int | None) -> Iterator[Finding]:
    """What a pod's memory and its GPU's hold at once, from below: a pod that needs more is killed, one with more waits.

    vLLM takes its share of a GPU at once; in a segment the trainer has to live with what is left.
    """
    rollout = config.actor_rollout_ref.rollout
    share = rollout.gpu_memory_utilization
    is_sampling = rollout.name == "vllm" and not config.is_offline
    if is_sampling and facts.grain != "stage" and share is not None and share > _RESIDENT_SHARE:
        yield Finding(
            "memory",
            "warning",
            f"actor_rollout_ref.rollout.gpu_memory_utilization is {share}, and the trainer shares the GPU at grain "
            f"{facts.grain}: leave it room (0.5 is the default), or use trainer.grain=stage",
        )
    if num_parameters is None or not facts.on_cluster:
        return
    for place, placement in facts.placements.items():
        trains = place in ("segment", "policy_update") and not placement.accelerator_count
        needed = num_parameters * (_TRAINED_BYTES if trains else _LOADED_BYTES)
        if place != "rollout" and needed > quantity(placement.memory):
            what = "to train it without an accelerator" if trains else "to hold it in float32"
            yield Finding(
                "memory",
                "warning",
                f"device_map.{place}.memory is {placement.memory}, and a model of {num_parameters / 1e6:.4g} million "
                f"parameters takes {needed / 2**30:.1f}Gi {what}: the pod would be killed; raise it",
            )


def length_findings(config: RunConfig, context: int | None, longest: int | None) -> Iterator[Finding]:
    """The model's context against prompt and completion; `longest` is the longest prompt, where it is known."""
    if config.is_offline:
        yield from _example_lengths(config, context, longest)
        return
    data, name = config.data, config.actor_rollout_ref.rollout.name
    # vLLM is started for the two limits; the other sampler takes each prompt as it is.
    prompt = longest if name == "hf" and longest is not None else data.max_prompt_length
    if context is None:
        yield Finding("context", "ok", "the model's configuration sets no limit")
    elif prompt + data.max_response_length > context:
        what = "the longest prompt" if prompt is longest else "data.max_prompt_length"
        yield Finding(
            "context",
            "error",
            f"{what} ({prompt}) and data.max_response_length ({data.max_response_length}) make "
            f"{prompt + data.max_response_length} tokens, and the model's context has {context}: lower one of them",
        )
    else:
        total = prompt + data.max_response_length
        yield Finding("context", "ok", f"prompt and completion take {total} tokens of the model's {context}")


def _example_lengths(config: RunConfig, context: int | None, longest: int | None) -> Iterator[Finding]:
    """The model's context against the longest example, or against what the limits let through."""
    total = config.data.max_prompt_length + config.data.max_response_length if longest is None else longest
    what = "prompt and completion" if longest is None else "the longest training example"
    if context is not None and total > context:
        yield Finding(
            "context",
            "error",
            f"{what} may take {total} tokens, and the model's context has {context}: lower data.max_prompt_length and "
            "data.max_response_length, and set data.filter_overlong_prompts=true to leave longer examples out",
        )
    else:
        yield Finding("context", "ok", f"{what} may take {total} tokens, which the model's context holds")


def step_findings(config: RunConfig, facts: PipelineFacts, *, total: int, last: int) -> Iterator[Finding]:
    """What is left to run against the iterations that one pipeline run may have."""
    trainer = config.trainer
    size = trainer.steps_per_segment if facts.grain == "segment" else 1
    most = MAX_STEPS_AT_STAGE_GRAIN if facts.grain == "stage" else MAX_SEGMENTS
    if last > total:
        yield Finding(
            "steps",
            "error",
            f"the run has committed {last} steps, and this submission asks for {total} in all: a run may grow, never "
            "shrink; raise trainer.total_training_steps, or use another run id",
        )
        return
    count = -(-(total - last) // size)
    if count > most and facts.placements:
        yield Finding(
            "steps",
            "error",
            f"{total - last} steps, {size} in a pod, make {count} iterations, and one pipeline run may have {most}: "
            + (
                "raise steps_per_segment, or lower total_steps and continue in a new run"
                if facts.grain == "segment"
                else "lower total_steps and continue in a new run, or use grain segment"
            ),
        )
        return
    done = f" ({last} are done)" if last else ""
    pods = "one iteration" if count == 1 else f"{count} iterations"
    yield Finding("steps", "ok", f"{total} steps{done}, {pods} of at most {size}")
