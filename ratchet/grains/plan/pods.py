"""What each process of a run holds in memory: engines that stay, and the most that any of its stages takes beside them.

Sampler and trainers of a segment or a step share one process, and one accelerator where there is one; at stage grain
each stage has a pod, which holds what it needs alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ratchet.config import RunConfig
from ratchet.data.packing import pack_by_count, pack_by_tokens
from ratchet.engines.model import torch_dtype
from ratchet.engines.training import TrainingSettings
from ratchet.engines.vllm_engine import kv_bytes
from ratchet.grains.plan.facts import Facts, Model
from ratchet.grains.plan.memory import Batch, Device, Kind, Training, scoring, training
from ratchet.stages.settings import critic_settings, offline_settings, sampler_settings, trainer_settings

OUTSIDE_TORCH = round(1.8 * 2**30)
"""What a process has on a GPU beside torch's tensors: context, kernels, CUDA graphs (measured, docs/speed.md: what
nvidia-smi saw less torch's peak, with vLLM)."""
_HF_LOGITS = 4
"""Tensors of logits, float32, that a token takes while it is sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """Bytes on each accelerator of a process, or of its main memory where it has none."""

    name: str
    """Of the entry in device_map, or a stage."""
    device: Device
    resident: dict[str, int]
    """What stays in memory -> bytes."""
    passing: dict[str, int]
    """Stage -> the most that it takes beside that; never two at once, but for sampling ahead."""
    host: dict[str, int] = field(default_factory=dict)
    """What lies in pinned main memory beside a GPU -> bytes."""
    is_overlapping: bool = False
    """Whether sampling and training go on at the same time."""

    @property
    def peak(self) -> int:
        """The most at any time."""
        taken = sum(self.passing.values()) if self.is_overlapping else max(self.passing.values(), default=0)
        outside = OUTSIDE_TORCH if self.device == "cuda" else 0
        return sum(self.resident.values()) + taken + outside


@dataclass(frozen=True, kw_only=True, slots=True)
class Engines:
    """What the engines of a run take, each by itself."""

    trainers: dict[str, Training]
    """policy, and critic where there is one."""
    scorers: dict[str, tuple[int, int]]
    """Role -> bytes of the model, and of a forward pass beside it."""
    sampler: tuple[int, int] | None
    """Bytes that stay (weights, vLLM's cache), and those of a batch beside them."""


def engines(
    config: RunConfig, facts: Facts, lengths: Sequence[tuple[int, int]], device: Device, total: int | None
) -> Engines:
    """Work them out for a step whose rows have `lengths` (prompt, completion); `total` bytes are an accelerator's."""
    steps = facts.total_steps(config)
    settings: dict[str, TrainingSettings] = {
        "policy": offline_settings(config, steps) if config.is_offline else trainer_settings(config, steps)
    }
    if config.critic_is_needed:
        settings["critic"] = critic_settings(config, steps)
    models = {"policy": facts.policy, "critic": facts.critic}
    trainers = {
        role: _trainer(config, role, models[role] or facts.policy, one, lengths, device)
        for role, one in settings.items()
    }
    scorers: dict[str, tuple[int, int]] = {}
    actor, budget = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu
    for role, is_needed in (("policy", config.policy_scores_are_needed), ("reference", config.reference_is_needed)):
        if is_needed:
            batch = _heaviest(lengths, budget, None)[0]
            found = scoring(facts.policy.config, batch, kind="policy", dtype=actor.fsdp_config.dtype, device=device)
            scorers[f"{role}_scores"] = found
    if config.critic_is_needed and facts.critic is not None:
        batch = _heaviest(lengths, config.critic.forward_max_token_len_per_gpu, None)[0]
        dtype = config.critic.fsdp_config.dtype
        scorers["values"] = scoring(facts.critic.config, batch, kind="values", dtype=dtype, device=device)
    return Engines(trainers=trainers, scorers=scorers, sampler=_sampler(config, facts, lengths, device, total))


def pods(config: RunConfig, facts: Facts, found: Engines, device: Device) -> list[Pod]:
    """Return what the processes of the run hold, those of a step first."""
    copies = _published(config, facts)
    if config.trainer.grain != "stage":
        return [_shared(config, found, copies, device)]
    listed = []
    if found.sampler is not None:
        stays, passes = found.sampler
        listed.append(Pod(name="rollout", device=device, resident={"sampler": stays}, passing={"rollout": passes}))
    for role, (stays, passes) in found.scorers.items():
        listed.append(Pod(name=role, device=device, resident={role: stays}, passing={role: passes}))
    for role, one in found.trainers.items():
        resident = {f"{role}: weights": one.weights, f"{role}: Adam's moments": one.optimizer}
        listed.append(Pod(name=f"{role}_update", device=device, resident=resident, passing=_passing(role, one)))
    return listed


def _trainer(
    config: RunConfig,
    role: str,
    model: Model,
    settings: TrainingSettings,
    lengths: Sequence[tuple[int, int]],
    device: Device,
) -> Training:
    batch, count = _heaviest(
        lengths[: settings.mini_batch_size], settings.max_tokens_per_micro_batch, settings.micro_batch_size
    )
    kind: Kind = "values" if role == "critic" or config.algorithm.objective == "reward_model" else "policy"
    processes = config.trainer.n_gpus_per_node * config.trainer.nnodes
    return training(
        model.config,
        settings,
        batch,
        kind=kind,
        device=device,
        num_micro_batches=math.ceil(count / processes),
        world_size=processes,
        base_dtype=model.dtype,
    )


def _heaviest(lengths: Sequence[tuple[int, int]], budget: int, rows: int | None) -> tuple[Batch, int]:
    """Return the micro-batch with the most tokens, as the trainer packs them, and how many there are."""
    sums = [prompt + completion for prompt, completion in lengths]
    batches = pack_by_tokens(sums, budget) if rows is None else pack_by_count(len(sums), rows)
    most = max(batches, key=lambda batch: sum(sums[row] for row in batch))
    scored = sum(lengths[row][1] for row in most)
    return Batch(lengths=[sums[row] for row in most], scored=scored), len(batches)


def _sampler(
    config: RunConfig, facts: Facts, lengths: Sequence[tuple[int, int]], device: Device, total: int | None
) -> tuple[int, int] | None:
    if config.is_offline:
        return None
    rollout, model = config.actor_rollout_ref.rollout, facts.policy
    per_token = kv_bytes(model.config, rollout.dtype)
    weights = model.num_parameters * torch_dtype(rollout.dtype).itemsize
    vocabulary = model.config.get_text_config().vocab_size
    if rollout.name == "hf":
        at_once = min(rollout.max_num_seqs, len(lengths))
        room = max(prompt for prompt, _ in lengths) + config.data.max_response_length
        return weights, at_once * (room * per_token + _HF_LOGITS * 4 * vocabulary)
    parts: int = rollout.tensor_model_parallel_size
    if rollout.gpu_memory_utilization is not None and total is not None:
        return round(rollout.gpu_memory_utilization * total), 0
    settings: Any = sampler_settings(config, device)
    wanted = rollout.max_num_seqs * settings["max_model_len"] * per_token / parts
    cache = math.ceil(1.02 * wanted) + (64 << 20)
    logits = _HF_LOGITS * 4 * vocabulary * rollout.max_num_seqs
    return weights // parts + (min(cache, total // 2) if total is not None else cache), logits


def _published(config: RunConfig, facts: Facts) -> dict[str, int]:
    """Copies of the newest versions, which the sampler and the scorers take weights from."""
    rollout, versions = config.actor_rollout_ref.rollout, 1 + config.trainer.async_level
    copies = {"policy": facts.policy.num_parameters * torch_dtype(rollout.dtype).itemsize * versions}
    if facts.critic is not None:
        copies["critic"] = facts.critic.num_parameters * torch_dtype(config.critic.fsdp_config.dtype).itemsize
    return copies


def _passing(role: str, one: Training) -> dict[str, int]:
    return {f"{role}_update": one.passing}


def _shared(config: RunConfig, found: Engines, copies: dict[str, int], device: Device) -> Pod:
    """A process that holds everything; with free_cache_engine the sampler leaves while models are trained."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    resident: dict[str, int] = {}
    passing: dict[str, int] = {}
    for role, one in found.trainers.items():
        resident |= {f"{role}: weights": one.weights, f"{role}: Adam's moments": one.optimizer}
        passing |= _passing(role, one)
    for role, (stays, passes) in found.scorers.items():
        resident[f"{role}: weights"] = stays
        passing[role] = passes
    resident |= {f"{role}: published copy": size for role, size in copies.items()}
    if found.sampler is not None and not rollout.dedicated_gpus:
        stays, passes = found.sampler
        if rollout.free_cache_engine and rollout.name == "vllm" and not trainer.async_level:
            passing["rollout"] = stays + passes
        else:
            resident["sampler, with its KV cache" if rollout.name == "vllm" else "sampler"] = stays
            passing["rollout"] = passes
    host: dict[str, int] = {}
    if device == "cuda" and trainer.grain == "segment":
        versions = trainer.commit_lag + 1
        host = {f"{role}: copies to commit": versions * size for role, size in copies.items()}
        host |= {f"{role}: state to commit": one.optimizer // 2 * 3 for role, one in found.trainers.items()}
    is_overlapping = bool(trainer.async_level) and trainer.grain == "segment"
    name = "segment"
    return Pod(name=name, device=device, resident=resident, passing=passing, host=host, is_overlapping=is_overlapping)
