"""What the objective says about other keys: what it cannot go with, and what it does not read.

Trap: as in `ratchet.config.checks`, nothing here may ask whether a key was given, only what it says.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ratchet.config.algorithm import AlgorithmConfig
from ratchet.config.section import Section

if TYPE_CHECKING:
    from ratchet.config.schema import RunConfig

_UNREAD = (
    "actor_rollout_ref.rollout",
    "reward_model",
    "custom_reward_function",
    "critic",
    "trainer.critic_warmup",
    "algorithm",
    *(
        f"actor_rollout_ref.actor.{name}"
        for name in (
            *("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "policy_loss", "tau_pos", "tau_neg"),
            *("entropy_coeff", "use_kl_loss", "kl_loss_coef", "kl_loss_type", "loss_agg_mode", "loss_scale_factor"),
        )
    ),
)
"""Keys and sections that an offline objective does not read, but for those below."""

_READ = (
    "actor_rollout_ref.rollout.dtype",  # of the published weights
    "algorithm.objective",
    "algorithm.dpo",
    "algorithm.hybrid",
)

_SAME_ANYWHERE = (
    *("actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.n"),
    *("algorithm.rollout_correction.bypass_mode",),
    # Another key's value where they are not given.
    *(f"critic.{name}" for name in ("ppo_mini_batch_size", "ppo_epochs", "shuffle", "loss_agg_mode")),
    "critic.loss_scale_factor",
)
"""Keys that configs for any objective may share, or that follow from others: not worth a warning."""


def objective_faults(config: "RunConfig") -> Iterator[str]:
    """Yield what the objective cannot go with."""
    algorithm = config.algorithm
    objective, dpo, hybrid = algorithm.objective, algorithm.dpo, algorithm.hybrid
    if objective == "hybrid" and not hybrid.sft_files:
        yield "algorithm.objective is hybrid, and algorithm.hybrid.sft_files names no examples"
    if objective == "hybrid" and hybrid.sft_lr is not None and not config.actor_rollout_ref.actor.optim.lr:
        yield (
            "algorithm.hybrid.sft_lr scales the loss of the examples by its ratio to actor_rollout_ref.actor.optim.lr, "
            "which is 0: set that above 0"
        )
    if dpo.label_smoothing and dpo.loss_type != "sigmoid":
        yield (
            f"algorithm.dpo.label_smoothing is {dpo.label_smoothing}, and only loss_type=sigmoid has it, not "
            f"{dpo.loss_type}: leave it out"
        )
    if not config.is_offline:
        return
    usual = AlgorithmConfig.model_fields["adv_estimator"].default
    if algorithm.adv_estimator != usual:
        yield (
            f"algorithm.objective={objective} learns from examples, and algorithm.adv_estimator="
            f"{algorithm.adv_estimator} weighs sampled completions: leave one of the two out"
        )
    if config.trainer.async_level:
        yield (
            f"trainer.async_level={config.trainer.async_level} samples ahead, and algorithm.objective={objective} "
            "samples nothing: set it to 0"
        )


def objective_warnings(config: "RunConfig") -> Iterator[str]:
    """Yield the sections of other objectives that are configured, and what an offline one does not read."""
    algorithm = config.algorithm
    for name in ("dpo", "hybrid"):
        if algorithm.objective != name and _set_below(getattr(algorithm, name), ""):
            yield (
                f"algorithm.{name} is configured without effect: algorithm.objective is {algorithm.objective}; "
                f"algorithm.objective={name} reads it"
            )
    if config.is_offline:
        unread = [key for key in _set_below(config, "") if _is_below(key, _UNREAD) and not _is_below(key, _READ)]
        unread = [key for key in unread if key not in _SAME_ANYWHERE]
        if unread:
            yield f"algorithm.objective={algorithm.objective} samples and grades nothing; without effect: " + ", ".join(
                unread
            )


def _is_below(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _set_below(section: Section, prefix: str) -> list[str]:
    """Return the dotted keys of a section that are not its defaults."""
    default, found = type(section)(), []
    for name, value in section:
        if isinstance(value, Section):
            found += _set_below(value, f"{prefix}{name}.")
        elif value != getattr(default, name):
            found.append(f"{prefix}{name}")
    return found
