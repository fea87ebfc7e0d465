"""Which keys make a run what it is, and which may change from one submission to the next.

`run.json` holds the semantic keys only. Trap: a key that changes any committed number is semantic, however technical it
looks (a micro-batch size changes the order in which floats are added, but not what is computed: it is not).
"""

from collections.abc import Iterable
from typing import Any

from ratchet.config.schema import RunConfig

OPERATIONAL = frozenset(
    {
        # Places; what they hold is compared by digest.
        "actor_rollout_ref.model.path",
        "data.train_files",
        "data.val_files",
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        "actor_rollout_ref.actor.strategy",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "actor_rollout_ref.rollout.max_num_seqs",
        "actor_rollout_ref.rollout.max_num_batched_tokens",
        "actor_rollout_ref.rollout.enable_chunked_prefill",
        "actor_rollout_ref.rollout.enforce_eager",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        "trainer.project_name",
        "trainer.experiment_name",
        "trainer.default_local_dir",
        "trainer.logger",
        "trainer.grain",
        "trainer.steps_per_segment",
        "trainer.trainer_state_freq",
        "trainer.save_freq",
        "trainer.test_freq",
        "trainer.val_before_train",
        "trainer.resume_mode",
        "trainer.device",
        "trainer.n_gpus_per_node",
        "trainer.nnodes",
    }
)
"""Keys that say how and where, not what."""

EXTENT = frozenset({"trainer.total_epochs", "trainer.total_training_steps"})
"""How far the run goes: may grow on resume, unless the learning-rate schedule reads it."""


def semantic(config: RunConfig) -> dict[str, Any]:
    """Return the nested config without the keys that may change."""
    leave_out = OPERATIONAL if schedule_reads_extent(config) else OPERATIONAL | EXTENT
    return _without(config.model_dump(mode="json"), leave_out)


def schedule_reads_extent(config: RunConfig) -> bool:
    """Whether the learning rate of a step depends on how many steps there are."""
    optim = config.actor_rollout_ref.actor.optim
    warms_up_by_ratio = optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio > 0
    return optim.lr_scheduler_type != "constant" or warms_up_by_ratio


def selected(config: RunConfig, keys: Iterable[str]) -> dict[str, Any]:
    """Return the semantic values under `keys` (a section stands for all of its keys), for a stage's config digest."""
    tree = semantic(config)
    found: dict[str, Any] = {}
    for key in keys:
        value: Any = tree
        for name in key.split("."):
            value = value.get(name, {}) if isinstance(value, dict) else {}
        found[key] = value
    return found


def _without(tree: dict[str, Any], keys: Iterable[str], prefix: str = "") -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if path in keys:
            continue
        kept[name] = _without(value, keys, f"{path}.") if isinstance(value, dict) else value
    return kept
