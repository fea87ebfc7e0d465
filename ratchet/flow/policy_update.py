"""How the policy learns from advantages: FSDP2, the loss, and the optimizer."""

from dataclasses import field
from typing import Any, ClassVar

from ratchet.errors import ConfigError
from ratchet.flow.part import Part, part, sets
from ratchet.flow.registered import Registered

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_LOSS = f"{_ACTOR}.policy_loss"
_OPTIM = f"{_ACTOR}.optim"
_CORRECTION = "algorithm.rollout_correction"


@part
class PolicyUpdate(Part):
    """What every update takes: optimizer, batches, precision, adapters."""

    lr: float = sets(f"{_OPTIM}.lr", default=1e-6)
    grad_clip: float = sets(f"{_ACTOR}.grad_clip", default=1.0)
    ppo_epochs: int = sets(f"{_ACTOR}.ppo_epochs", default=1)
    """Passes over the batch in one step."""
    device_mesh: Any = field(default=None, kw_only=True)
    """A live DeviceMesh to train on, for a run in this process; otherwise the trainer makes its own."""
    mini_batch_size: int | None = sets(f"{_ACTOR}.ppo_mini_batch_size", default=None, kw_only=True)
    """Prompts or examples of one optimizer step; the whole batch where it is not given."""
    micro_batch_size: int | None = sets(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", default=None, kw_only=True)
    """Sequences of one forward pass; the token budget counts where it is not given."""
    max_token_len_per_gpu: int = sets(f"{_ACTOR}.ppo_max_token_len_per_gpu", default=16384, kw_only=True)
    shuffle: bool = sets(f"{_ACTOR}.shuffle", default=False, kw_only=True)
    weight_decay: float = sets(f"{_OPTIM}.weight_decay", default=0.01, kw_only=True)
    betas: tuple[float, float] = sets(f"{_OPTIM}.betas", default=(0.9, 0.999), kw_only=True)
    lr_scheduler_type: str = sets(f"{_OPTIM}.lr_scheduler_type", default="constant", kw_only=True)
    lr_warmup_steps: int = sets(f"{_OPTIM}.lr_warmup_steps", default=-1, kw_only=True)
    lr_warmup_steps_ratio: float = sets(f"{_OPTIM}.lr_warmup_steps_ratio", default=0.0, kw_only=True)
    min_lr_ratio: float = sets(f"{_OPTIM}.min_lr_ratio", default=0.0, kw_only=True)
    dtype: str = sets(f"{_ACTOR}.fsdp_config.dtype", default="bfloat16", kw_only=True)
    """Compute dtype; master weights are float32."""
    use_liger: bool = sets(f"{_MODEL}.use_liger", default=True, kw_only=True)
    """Fused kernels on a GPU, where the model has such."""
    use_torch_compile: bool = sets(f"{_ACTOR}.use_torch_compile", default=False, kw_only=True)
    """Compile the layers, which takes about a minute before the first step."""
    lora_rank: int = sets(f"{_MODEL}.lora_rank", default=0, kw_only=True)
    """Train low-rank adapters of this rank in place of the weights; 0 trains every weight."""
    lora_alpha: int = sets(f"{_MODEL}.lora_alpha", default=16, kw_only=True)
    """What the adapters add is scaled by lora_alpha / lora_rank."""
    target_modules: str | tuple[str, ...] = sets(f"{_MODEL}.target_modules", default="all-linear", kw_only=True)
    """Names of the layers that have adapters, or all-linear."""

    def stays_here(self) -> str | None:
        if self.device_mesh is None:
            return None
        return (
            "device_mesh is a live mesh of this process: leave it out, and say trainer.n_gpus_per_node and "
            "trainer.nnodes in the config"
        )


@part
class FSDPPolicyUpdate(PolicyUpdate):
    """Update the policy with FSDP2; PPO's clipped loss, or another one by its name or its registered function."""

    name: ClassVar[str] = "fsdp"
    clip_ratio_low: float | None = sets(f"{_ACTOR}.clip_ratio_low", default=None)
    """0.2 where it is not given."""
    clip_ratio_high: float | None = sets(f"{_ACTOR}.clip_ratio_high", default=None)
    """0.2 where it is not given; above clip_ratio_low it is DAPO's clip-higher."""
    loss_agg_mode: str = sets(f"{_ACTOR}.loss_agg_mode", default="token-mean")
    policy_loss: Any = sets(f"{_LOSS}.loss_mode", default="vanilla", kw_only=True)
    """vanilla, gspo, cispo, sapo, gpg, clip_cov, kl_cov, geo_mean, dppo_tv, dppo_kl, dro, or what was registered."""
    entropy_coeff: float = sets(f"{_ACTOR}.entropy_coeff", default=0.0, kw_only=True)
    clip_ratio_c: float = sets(f"{_ACTOR}.clip_ratio_c", default=3.0, kw_only=True)
    """Dual clip for negative advantages."""
    loss_scale_factor: float | None = sets(f"{_ACTOR}.loss_scale_factor", default=None, kw_only=True)
    """Divisor of seq-mean-token-sum-norm, in tokens."""
    tau_pos: float = sets(f"{_ACTOR}.tau_pos", default=1.0, kw_only=True)
    """sapo: temperature of the gate where the advantage is positive."""
    tau_neg: float = sets(f"{_ACTOR}.tau_neg", default=1.05, kw_only=True)
    """sapo: temperature of the gate elsewhere."""
    clip_cov_ratio: float = sets(f"{_LOSS}.clip_cov_ratio", default=0.0002, kw_only=True)
    clip_cov_lb: float = sets(f"{_LOSS}.clip_cov_lb", default=1.0, kw_only=True)
    clip_cov_ub: float = sets(f"{_LOSS}.clip_cov_ub", default=5.0, kw_only=True)
    kl_cov_ratio: float = sets(f"{_LOSS}.kl_cov_ratio", default=0.0002, kw_only=True)
    ppo_kl_coef: float = sets(f"{_LOSS}.ppo_kl_coef", default=0.1, kw_only=True)
    """kl_cov: weight of its KL penalty."""
    dro_beta: float | None = sets(f"{_LOSS}.dro_beta", default=None, kw_only=True)
    """dro: weight of the quadratic penalty; it must be given for that loss."""
    bypass_mode: bool = sets(f"{_CORRECTION}.bypass_mode", default=True, kw_only=True)
    """Take the sampler's log-probs as behaviour log-probs; otherwise the policy scores the rollouts first, as it does
    by default where the rollout has top_p or top_k."""
    rollout_is: str | None = sets(f"{_CORRECTION}.rollout_is", default=None, kw_only=True)
    """Weight tokens by the truncated ratio of policy to sampler: "token" or "sequence"; with bypass_mode "token" alone,
    by the update itself."""
    rollout_is_threshold: float | str = sets(f"{_CORRECTION}.rollout_is_threshold", default=2.0, kw_only=True)
    rollout_is_batch_normalize: bool = sets(f"{_CORRECTION}.rollout_is_batch_normalize", default=False, kw_only=True)
    rollout_rs: str | None = sets(f"{_CORRECTION}.rollout_rs", default=None, kw_only=True)
    """Leave tokens or sequences out by their ratio: a mode, or several with commas."""
    rollout_rs_threshold: float | str | None = sets(f"{_CORRECTION}.rollout_rs_threshold", default=None, kw_only=True)
    _registered: ClassVar[Registered]

    def __post_init__(self) -> None:
        found = Registered.policy_loss(self.policy_loss)
        object.__setattr__(self, "_registered", found)
        object.__setattr__(self, "policy_loss", found.name)

    def code(self) -> list[dict[str, str]]:
        return self._registered.code()

    def stays_here(self) -> str | None:
        return PolicyUpdate.stays_here(self) or self._registered.stays_here()


FSPPolicyUpdate = FSDPPolicyUpdate
"""The same class under the name that is also in use."""


def as_policy_update(thing: Any) -> PolicyUpdate:
    """Return the policy update that was passed to a flow; None is the default one."""
    if thing is None:
        return FSDPPolicyUpdate()
    if not isinstance(thing, PolicyUpdate) or type(thing) is PolicyUpdate:
        raise ConfigError(f"policy_update is {thing!r}: expected FSDPPolicyUpdate(...), or an update of an objective")
    return thing
