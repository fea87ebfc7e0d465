"""The sections about models: the policy's actor, its rollouts and reference, and the critic."""

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, field_validator

from ratchet.algorithms.catalog import POLICY_LOSSES, LossAggMode
from ratchet.config.section import (
    AboveZero,
    Count,
    Decay,
    DType,
    KLType,
    NonNegative,
    Positive,
    Probability,
    Section,
    Share,
)

ALL_LINEAR: Final = "all-linear"
"""Every linear layer but the output head."""


class ModelConfig(Section):
    """Where a model comes from, and how it computes."""

    path: str = ""
    """Hub id, local folder or s3:// folder, such as a run's export; weights, tokenizer and template come from here."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about a third more time."""
    use_liger: bool = True
    """Fused kernels for norms, rotary embeddings and gated MLPs on a GPU, where the model has such; verl's default is
    false."""


def _as_modules(value: Any) -> Any:
    return (value,) if isinstance(value, str) and value != ALL_LINEAR else value


class PolicyModelConfig(ModelConfig):
    """Where the policy comes from, and what of it is trained."""

    lora_rank: Count = 0
    """Train low-rank adapters of this rank (LoRA, https://arxiv.org/abs/2106.09685) in place of the weights, which are
    published with the adapters merged; 0 trains every weight. The critic has none."""
    lora_alpha: Positive = 16
    """lora_rank: what the adapters add is scaled by lora_alpha / lora_rank."""
    target_modules: Annotated[
        Literal["all-linear"] | tuple[str, ...], BeforeValidator(_as_modules), Field(min_length=1)
    ] = ALL_LINEAR
    """lora_rank: names of the layers that have adapters, such as `[q_proj, v_proj]`; all-linear means every linear
    layer but the output head."""


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: NonNegative = 1e-6
    """Learning rate after warm-up."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of the two moments."""
    eps: NonNegative = 1e-8
    """Added to the square root of the second moment."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after warm-up; linear and cosine read the number of steps."""
    lr_warmup_steps: int = -1
    """Steps of linear warm-up; below 0 the ratio counts."""
    lr_warmup_steps_ratio: Share = 0.0
    """Share of the steps that warm up, where lr_warmup_steps is below 0."""
    min_lr_ratio: Share = 0.0
    """Where a decay ends, as a share of the learning rate."""


class CriticOptimConfig(OptimConfig):
    """AdamW of the critic."""

    lr: NonNegative = 1e-5
    """Learning rate after warm-up."""


class FSDPConfig(Section):
    """Precision of the update."""

    dtype: DType = "bfloat16"
    """Compute dtype; master weights, gradients' reduction and optimizer state are always float32."""


class UpdateConfig(Section):
    """What the updates of policy and critic have in common."""

    strategy: Literal["fsdp", "fsdp2"] = "fsdp2"
    """Both mean FSDP2."""
    ppo_mini_batch_size: Positive | None = None
    """Prompts of one optimizer step; the whole batch where it is not given."""
    ppo_micro_batch_size_per_gpu: Positive | None = None
    """Sequences of one forward pass; the token budget counts where it is not given."""
    ppo_max_token_len_per_gpu: Positive = 16384
    """Token budget of one forward pass."""
    ppo_epochs: Positive = 1
    """Passes over the batch in one step."""
    shuffle: bool = False
    """Draw mini-batches in another order each epoch."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How the loss of tokens becomes one number; what is averaged is the mini-batch, whatever the micro-batches."""
    loss_scale_factor: AboveZero | None = None
    """Divisor of seq-mean-token-sum-norm, in tokens; data.max_response_length where it is not given."""
    grad_clip: AboveZero = 1.0
    """Largest norm of the gradient; a larger one is scaled down."""
    fsdp_config: FSDPConfig = FSDPConfig()
    optim: OptimConfig = OptimConfig()


class PolicyLossConfig(Section):
    """The policy loss and its own settings."""

    loss_mode: str = "vanilla"
    """Name of the policy loss: PPO's clipped loss, another one (docs/algorithms.md), or one that was registered."""
    clip_cov_ratio: Probability = 0.0002
    """clip_cov: share of the tokens that are taken out of the loss."""
    clip_cov_lb: float = 1.0
    """clip_cov: only tokens whose covariance is above this."""
    clip_cov_ub: float = 5.0
    """clip_cov: only tokens whose covariance is below this."""
    kl_cov_ratio: Probability = 0.0002
    """kl_cov: share of the tokens that a KL penalty is laid on."""
    ppo_kl_coef: NonNegative = 0.1
    """kl_cov: weight of that penalty."""
    dro_beta: AboveZero | None = None
    """dro: weight of the quadratic penalty; it must be given for that loss."""

    @field_validator("loss_mode")
    @classmethod
    def _is_known(cls, value: str) -> str:
        return POLICY_LOSSES.get(value).name


class ActorConfig(UpdateConfig):
    """The policy update."""

    clip_ratio: NonNegative = 0.2
    """How far the ratio of policies may move from 1 before its gradient stops."""
    clip_ratio_low: NonNegative | None = None
    """Lower clip; `clip_ratio` where it is not given."""
    clip_ratio_high: NonNegative | None = None
    """Upper clip; `clip_ratio` where it is not given."""
    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    """Dual clip for negative advantages."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    tau_pos: AboveZero = 1.0
    """sapo: temperature of the gate where the advantage is positive."""
    tau_neg: AboveZero = 1.05
    """sapo: temperature of the gate elsewhere."""
    entropy_coeff: NonNegative = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL to the reference, the policy at version 0, to the loss."""
    kl_loss_coef: NonNegative = 0.001
    """Its weight."""
    kl_loss_type: KLType = "low_var_kl"
    """Its estimator: k1 = kl, k2 = mse, k3 = low_var_kl, abs; a `+` takes the gradient of k2."""
    use_torch_compile: bool = False
    """Compile the layers of the update, which takes about a minute before the first step; verl's default is true."""


class ValSampling(Section):
    """How held-out prompts are answered."""

    do_sample: bool = False
    """Sample; otherwise the most likely token is taken."""
    temperature: NonNegative = 0.0
    """Sampling temperature; it must be above 0 with do_sample."""
    top_p: Probability = 1.0
    """Keep the most likely tokens that make up this probability."""
    top_k: int = -1
    """Keep the k most likely tokens; -1 keeps all."""
    n: Positive = 1
    """Completions of one prompt."""


class RolloutConfig(Section):
    """How completions are sampled for training."""

    name: Literal["hf", "vllm"] = "vllm"
    """The sampler: vLLM, or Hugging Face for machines without a GPU."""
    n: Positive = 1
    """Completions of one prompt: the group size."""
    temperature: AboveZero = 1.0
    """Sampling temperature; log-probs are taken at it, too."""
    top_p: Probability = 1.0
    """Keep the most likely tokens that make up this probability."""
    top_k: int = -1
    """Keep the k most likely tokens; -1 keeps all."""
    dtype: DType = "bfloat16"
    """Dtype of the sampler and of the published weights."""
    ignore_eos: bool = False
    """Sample on to the length limit."""
    gpu_memory_utilization: Probability | None = None
    """Share of the memory that vLLM may take; 0.5 of a GPU, 0.2 of a CPU's, where it is not given."""
    tensor_model_parallel_size: Positive = 1
    """GPUs that vLLM spreads one model over."""
    dedicated_gpus: Count = 0
    """GPUs that only sample, beside those that train: on each a process with an engine of its own, which takes its
    share of the prompts; weights reach them over NCCL. 0 samples where the policy is trained."""
    max_num_seqs: Positive = 256
    """Sequences sampled at once."""
    max_num_batched_tokens: Positive = 8192
    """Token budget of one vLLM iteration."""
    enable_chunked_prefill: bool = True
    """Let vLLM split long prompts over iterations."""
    enforce_eager: bool | None = None
    """Run vLLM without CUDA graphs and compilation; on a CPU only, where it is not given."""
    use_torch_compile: bool = False
    """Have vLLM compile the model's layers on a GPU: a sampler then starts 11 to 27 s later, and a step of decoding may
    take a tenth less; see docs/speed.md."""
    calculate_log_probs: bool = True
    """Have the sampler report the log-prob of every token. Without it sampling can be faster; the behaviour log-probs
    are then the update's own (the step must be one optimizer step), or the policy's with
    rollout_correction.bypass_mode=false. verl's default is false."""
    log_probs_share: Share = 0.05
    """Share of the rollouts, drawn by the seed and at least one a step, whose log-probs the sampler reports without
    calculate_log_probs: enough to see how far it is from the policy."""
    max_log_prob_drift: AboveZero = 0.2
    """Mean difference, in nats a token, between the log-probs that sampler and trainer give one fixed prompt after an
    update of a segment, above which the step fails: the sampler then has other weights."""
    free_cache_engine: bool = False
    """Let vLLM give its memory back while the policy is trained, for models that fill the GPU; verl's default is
    true."""
    sleep_level: Literal[1, 2] = 2
    """free_cache_engine: 1 moves vLLM's weights to the host's memory, 2 drops them, since an update replaces them."""
    val_kwargs: ValSampling = ValSampling()


class RefConfig(Section):
    """The reference: version 0 of the policy, where a KL term needs it."""

    log_prob_max_token_len_per_gpu: Positive = 16384
    """Token budget of one forward pass of a scorer; actor.ppo_max_token_len_per_gpu where that alone is given."""


class ActorRolloutRefConfig(Section):
    """The policy: its model, update, rollouts and reference."""

    model: PolicyModelConfig = PolicyModelConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
    ref: RefConfig = RefConfig()


class CriticConfig(UpdateConfig):
    """The critic, trained where the advantage estimator needs values (gae).

    Its model may be the policy's, which is also the default; a value head is added where the folder has none. Of the
    batching and aggregation keys, those that are not given are the actor's.
    """

    model: ModelConfig = ModelConfig()
    cliprange_value: AboveZero = 0.5
    """How far a value may move from the one that the advantages were computed with, before its loss is clipped."""
    forward_max_token_len_per_gpu: Positive = 32768
    """Token budget of one forward pass of the values stage."""
    ppo_max_token_len_per_gpu: Positive = 32768
    """Token budget of one forward pass of the update."""
    optim: CriticOptimConfig = CriticOptimConfig()
