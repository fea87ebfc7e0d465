"""Other names of the same keys: verl's that live elsewhere here, and the short ones of its tutorials. One table.

Trap: these are applied before anything is checked, and errors must still name what was typed; `Spelled` keeps both.
Names that mean no key of Ratchet are `ratchet.config.verl_keys`'s.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

DROP = object()
"""What a conversion returns for a value that says nothing beyond the default."""


def one_file(value: Any) -> Any:
    """verl's list of files, where it holds one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def estimator(value: Any) -> Any:
    """The tutorials' name of an algorithm as the name of its estimator."""
    return "gae" if isinstance(value, str) and value.lower() == "ppo" else value


def model_if_true(value: Any) -> Any:
    """verl's switch of its reward model as what grades."""
    return {True: "model", False: DROP}.get(value, value) if isinstance(value, bool) else value


@dataclass(frozen=True, slots=True)
class Spelling:
    """A name of the key `key`; `convert` makes its value this key's."""

    key: str
    note: str = ""
    convert: Callable[[Any], Any] = field(default=lambda value: value)


PREFIXES: Mapping[str, str] = {
    "actor": "actor_rollout_ref.actor",
    "rollout": "actor_rollout_ref.rollout",
    "ref": "actor_rollout_ref.ref",
    "critic.fsdp": "critic.fsdp_config",
    "critic.model.fsdp_config": "critic.fsdp_config",
    "reward.custom_reward_function": "custom_reward_function",
    "reward.reward_model": "reward_model",
    "reward.reward_manager": "reward_manager",
    "reward.sandbox_fusion": "sandbox_fusion",
    "reward.reward_kwargs": "reward_model.reward_kwargs",
    "reward_model.reward_kwargs.overlong_buffer_cfg": "reward_model.overlong_buffer",
}
"""Sections under another name; applied until none is left."""

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model.path"
_REFERENCE = "the reference is version 0 of the policy, so its model is the policy's"

SPELLINGS: Mapping[str, Spelling] = {
    "data.train_dataset": Spelling("data.train_files"),
    "data.val_dataset": Spelling("data.val_files"),
    "data.batch_size": Spelling("data.train_batch_size"),
    "data.seq_length": Spelling(
        "data.seq_length",
        "max_prompt_length + max_response_length: half each, or what the one that is given leaves to the other",
    ),
    "data.seed": Spelling("trainer.seed", "one seed for everything"),
    f"{_ACTOR}.model_name_or_path": Spelling(_MODEL),
    f"{_ROLLOUT}.model_name_or_path": Spelling(_MODEL, "rollouts are sampled from the policy"),
    "actor_rollout_ref.ref.model_name_or_path": Spelling(_MODEL, _REFERENCE),
    "actor_rollout_ref.ref.model.path": Spelling(_MODEL, _REFERENCE),
    f"{_ACTOR}.torch_dtype": Spelling(f"{_ACTOR}.fsdp_config.dtype"),
    f"{_ACTOR}.rollout_n": Spelling(f"{_ROLLOUT}.n"),
    f"{_ACTOR}.optim.clip_grad": Spelling(f"{_ACTOR}.grad_clip"),
    f"{_ACTOR}.optim.warmup_style": Spelling(f"{_ACTOR}.optim.lr_scheduler_type"),
    f"{_ROLLOUT}.type": Spelling(f"{_ROLLOUT}.name"),
    f"{_ROLLOUT}.tensor_parallel_size": Spelling(f"{_ROLLOUT}.tensor_model_parallel_size"),
    f"{_ROLLOUT}.prompt_length": Spelling("data.max_prompt_length"),
    f"{_ROLLOUT}.response_length": Spelling("data.max_response_length"),
    "actor_rollout_ref.ref.rollout_n": Spelling(f"{_ROLLOUT}.n"),
    "critic.model_name_or_path": Spelling("critic.model.path"),
    "critic.torch_dtype": Spelling("critic.fsdp_config.dtype"),
    "critic.enable": Spelling("critic.enable", "the estimator decides: gae has a critic, the others have none"),
    "critic.rollout_n": Spelling(f"{_ROLLOUT}.n"),
    "critic.optim.clip_grad": Spelling("critic.grad_clip"),
    "critic.optim.warmup_style": Spelling("critic.optim.lr_scheduler_type"),
    "reward_manager.name": Spelling("reward_model.reward_manager"),
    "reward_model.enable": Spelling("reward_model.type", "true is `model`", model_if_true),
    "reward_model.model.path": Spelling("reward_model.path"),
    "reward_model.model_path": Spelling("reward_model.path"),
    "reward_model.forward_max_token_len_per_gpu": Spelling("reward_model.max_token_len_per_gpu"),
    "reward_model.reward_kwargs.max_resp_len": Spelling("data.max_response_length"),
    "trainer.algorithm": Spelling(
        "algorithm.adv_estimator", "`ppo` is gae; sft, dpo, reward_model, hybrid are `algorithm.objective`"
    ),
    "trainer.num_epochs": Spelling("trainer.total_epochs"),
    "trainer.num_gpus": Spelling("trainer.n_gpus_per_node", "`--num_gpus`, and the processes that torchrun started"),
    "trainer.save_dir": Spelling("trainer.default_local_dir"),
}
"""Keys under another name, after PREFIXES."""

OBJECTIVES = frozenset({"sft", "dpo", "reward_model", "hybrid"})
"""Algorithms by whose name `trainer.algorithm` means the objective."""

CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "data.train_files": one_file,
    "data.val_files": one_file,
    "algorithm.hybrid.sft_files": one_file,
    "algorithm.adv_estimator": estimator,
}
"""What is done to a key's value under whatever name it came."""

INHERITED: Mapping[str, str] = {
    **{
        f"critic.{name}": f"{_ACTOR}.{name}"
        for name in ("ppo_mini_batch_size", "ppo_epochs", "shuffle", "loss_agg_mode", "loss_scale_factor")
    },
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": f"{_ACTOR}.ppo_max_token_len_per_gpu",
}
"""Keys that take another key's value where that one is given and they are not, as in verl."""


def long_name(typed: str) -> str:
    """Return the typed name with its sections spelled out; the last part is as it was."""
    name, is_done = typed, False
    while not is_done:
        is_done = True
        for short, full in PREFIXES.items():
            if name == short or name.startswith(f"{short}."):
                name, is_done = full + name[len(short) :], False
                break
    return name


def spelled(typed: str, value: Any) -> tuple[str, Any]:
    """Return the key that a name means, and the value as that key's; the value may be DROP."""
    name = long_name(typed)
    spelling = SPELLINGS.get(name)
    key = spelling.key if spelling else name
    if name == "trainer.algorithm" and isinstance(value, str) and value.lower() in OBJECTIVES:
        key, value = "algorithm.objective", value.lower()
    for convert in (spelling.convert if spelling else None, CONVERSIONS.get(key)):
        value = convert(value) if convert is not None and value is not DROP else value
    return key, value


def note_of(typed: str) -> str:
    """Return what is to be said about a name where it contradicts another."""
    spelling = SPELLINGS.get(long_name(typed))
    return spelling.note if spelling else ""
