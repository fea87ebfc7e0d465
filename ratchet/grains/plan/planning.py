"""Puts a plan together, and says what of it does not fit.

Trap: nothing is guessed without saying so. What nobody measured or gave is None in the plan, or an upper bound, with a
note that says which option would make it known.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ratchet.cluster.fitting import quantity
from ratchet.config import RunConfig
from ratchet.engines.model import torch_dtype
from ratchet.grains.plan import cost as costing
from ratchet.grains.plan import pods as holding
from ratchet.grains.plan import storage as storing
from ratchet.grains.plan.facts import Facts, Model, read_facts
from ratchet.grains.plan.measured import Measured
from ratchet.grains.plan.memory import Device
from ratchet.grains.plan.work import Tasks, Tokens, count_tasks, count_tokens
from ratchet.store.run import CRITIC_UPDATE, POLICY_UPDATE
from ratchet.tracking.cost import CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What is known beside the config."""

    accelerator: str | None = None
    """Its name, as prices have it; None for none."""
    memory: int | None = None
    """Its bytes."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """In place of those of trainer.prices."""
    measured: Measured = field(default_factory=lambda: Measured(source="nobody"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a whole run takes, from its first step."""

    model: dict[str, Any]
    """Role -> parameters, and how many of them are trained."""
    grain: str
    steps: int
    device: Device
    accelerator: str | None
    accelerator_memory: int | None
    pods: list[holding.Pod]
    tokens: Tokens
    tasks: Tasks
    storage: storing.Storage
    cost: costing.Cost
    faults: tuple[str, ...]
    """What does not fit."""
    notes: tuple[str, ...]
    """What is not known, and what would tell."""

    def as_record(self) -> dict[str, Any]:
        """Return plain values, with what follows from others."""
        record = asdict(self)
        for pod, one in zip(record["pods"], self.pods, strict=True):
            pod["peak"] = one.peak
        for name in ("trained_bound", "trained_expected"):
            record["tokens"][name] = getattr(self.tokens, name)
        for name in ("work_seconds", "total_seconds"):
            record["cost"][name] = getattr(self.cost, name)
        return record


def make_plan(config: RunConfig, wishes: Wishes, facts: Facts | None = None) -> Plan:
    """Plan a run of this config; what is wrong with model, data or config is an error as in a run."""
    facts = read_facts(config) if facts is None else facts
    device, steps = device_of(config, wishes), facts.total_steps(config)
    memory = wishes.memory if device == "cuda" else None
    measured, limit = wishes.measured, config.data.max_response_length
    mean = None if measured.completion_tokens is None else min(measured.completion_tokens, limit)
    tokens = count_tokens(config, facts, steps, mean)
    tasks = count_tasks(config, steps)
    lengths = step_lengths(config, facts, tokens.longest_step)
    found = holding.engines(config, facts, lengths, device, memory)
    pods = holding.pods(config, facts, found, device)
    learned = _learned(config, facts, found)
    storage = storing.lay_out(config, facts, tokens, steps, learned, measured)
    accelerator = wishes.accelerator if device == "cuda" else CPU
    cost = costing.estimate(
        config,
        tokens,
        tasks,
        measured,
        accelerator=accelerator or "the accelerator",
        prices={**config.trainer.prices, **wishes.prices},
    )
    return Plan(
        model={
            WEIGHTS_ROLE[one.stage]: {"parameters": one.model.num_parameters, "trained": one.trained} for one in learned
        },
        grain=config.trainer.grain,
        steps=steps,
        device=device,
        accelerator=accelerator,
        accelerator_memory=memory,
        pods=pods,
        tokens=tokens,
        tasks=tasks,
        storage=storage,
        cost=cost,
        faults=tuple(_faults(config, wishes, pods, tasks, storage)),
        notes=tuple(_notes(config, wishes, device, tokens, storage, cost)),
    )


WEIGHTS_ROLE = {POLICY_UPDATE: "policy", CRITIC_UPDATE: "critic"}


def device_of(config: RunConfig, wishes: Wishes) -> Device:
    """Return where models run: on a GPU where config or options speak of one."""
    if config.trainer.device != "auto":
        return config.trainer.device
    asked = any(getattr(config.device_map, name).accelerator_count for name in type(config.device_map).model_fields)
    is_vllm = config.actor_rollout_ref.rollout.name == "vllm" and not config.is_offline
    return "cuda" if asked or is_vllm or wishes.memory is not None or wishes.accelerator is not None else "cpu"


def step_lengths(config: RunConfig, facts: Facts, step: int) -> list[tuple[int, int]]:
    """Return (prompt, completion) tokens of every row that a step trains on, completions at full length."""
    positions, train = facts.positions(config, step), facts.train
    if train.completions is None:
        limit, group = config.data.max_response_length, config.actor_rollout_ref.rollout.n
        return [(int(train.prompts[row]), limit) for row in positions for _ in range(group)]
    return [(int(train.prompts[row]) * train.sides, int(train.completions[row])) for row in positions]


def _learned(config: RunConfig, facts: Facts, found: holding.Engines) -> list[storing.Learned]:
    rollout, critic = config.actor_rollout_ref.rollout, config.critic
    dtypes = {"policy": rollout.dtype, "critic": critic.fsdp_config.dtype}
    models: dict[str, Model | None] = {"policy": facts.policy, "critic": facts.critic}
    listed = []
    for stage, role in WEIGHTS_ROLE.items():
        model = models[role]
        if model is None or role not in found.trainers:
            continue
        trainer = found.trainers[role]
        listed.append(
            storing.Learned(
                stage=stage,
                model=model,
                version_bytes=model.num_parameters * torch_dtype(dtypes[role]).itemsize + 110 * model.num_tensors,
                trained=trainer.trained,
                num_trained_tensors=trainer.num_tensors,
            )
        )
    return listed


def _faults(
    config: RunConfig, wishes: Wishes, pods: list[holding.Pod], tasks: Tasks, storage: storing.Storage
) -> list[str]:
    faults = []
    for pod in pods:
        if pod.device == "cuda" and wishes.memory is not None and pod.peak > wishes.memory:
            faults.append(
                f"memory: {pod.name} takes {pod.peak / 2**30:.1f} GiB of an accelerator that has "
                f"{wishes.memory / 2**30:.1f}: {_advice(config, pod)}"
            )
        placement = getattr(config.device_map, _PLACES.get(pod.name, pod.name), None)
        main = pod.peak if pod.device == "cpu" else sum(pod.host.values())
        if placement is not None and placement.accelerator_count == 0 and pod.device == "cuda":
            continue
        if placement is not None and "device_map" in config.model_fields_set and main > quantity(placement.memory):
            faults.append(
                f"memory: {pod.name} takes {main / 2**30:.1f} GiB of main memory, and its pod asks for "
                f"{placement.memory}: raise device_map.{_PLACES.get(pod.name, pod.name)}.memory"
            )
    if tasks.iterations > tasks.most_iterations:
        faults.append(
            f"pods: {tasks.iterations} iterations, and one pipeline run may have {tasks.most_iterations}: raise "
            "trainer.steps_per_segment, or go on in a further pipeline run"
        )
    budget = config.trainer.storage_budget_gib
    if budget is not None and storage.peak > budget * 2**30:
        faults.append(
            f"storage: {storage.peak / 2**30:.1f} GiB at most, and trainer.storage_budget_gib is {budget:g}: raise it, "
            "or set trainer.keep_policies"
        )
    return faults


_PLACES = {
    "policy_scores": "scores",
    "reference_scores": "scores",
    "values": "scores",
    "critic_update": "policy_update",
}
"""Pod -> its entry of device_map, where that has another name."""


def _advice(config: RunConfig, pod: holding.Pod) -> str:
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    most = max(pod.passing, key=lambda name: pod.passing[name])
    ways = []
    if most.endswith("_update") and not model.enable_gradient_checkpointing:
        ways.append("set actor_rollout_ref.model.enable_gradient_checkpointing=true")
    if most.endswith("_update"):
        ways.append("lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    if rollout.name == "vllm" and pod.name == "segment" and not rollout.free_cache_engine:
        ways.append("set actor_rollout_ref.rollout.free_cache_engine=true")
    if rollout.name == "vllm" and most == "rollout":
        ways.append("lower actor_rollout_ref.rollout.max_num_seqs")
    return ", or ".join(ways) or "take a larger one"


def _notes(
    config: RunConfig,
    wishes: Wishes,
    device: Device,
    tokens: Tokens,
    storage: storing.Storage,
    cost: costing.Cost,
) -> list[str]:
    notes = []
    if device == "cpu" and (wishes.accelerator or wishes.memory):
        notes.append("trainer.device is cpu: the accelerator that was given is not used")
    if (wishes.measured.completion_tokens or 0) > config.data.max_response_length:
        notes.append("completions are counted at data.max_response_length: those that were measured were longer")
    if device == "cuda" and wishes.memory is None:
        notes.append("whether it fits is not known: give --accelerator NAME, or --accelerator-memory GIB")
    if tokens.completion_expected is None:
        notes.append("how long completions get is not known: give --completion-tokens, or --like RUN")
    if config.algorithm.filter_groups.enable:
        notes.append("dynamic sampling: prompts that are sampled and left out are in no count of tokens")
    if config.trainer.grain == "stage" and config.trainer.test_freq > 0 and config.data.val_files:
        notes.append("the pipelines of stage grain leave out the evaluations between steps, `ratchet train` makes them")
    if config.trainer.n_gpus_per_node * config.trainer.nnodes > 1:
        notes.append("memory of several trainer processes was compared with no measurement")
    if config.algorithm.objective == "hybrid":
        notes.append("the examples that a hybrid run imitates are in no count of tokens, memory and tables")
    if "model" in config.reward_weights and not config.is_offline:
        notes.append("the reward model's memory is in no count")
    return [*notes, *storage.notes, *cost.notes]


def with_measured(measured: Measured, **given: float | None) -> Measured:
    """Return what a run measured with what was given in its place."""
    known = {name: value for name, value in given.items() if value is not None}
    if not known:
        return measured
    source = "the command line" if "throughput" in known else measured.source
    return replace(measured, source=source, **known)
