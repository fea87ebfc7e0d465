"""The typed configuration of a run, under verl's key names.

Keys are grouped as verl groups them, so that a config that users bring reads the same here. What the text may say is
checked here; names that verl has and Ratchet has not are refused by `ratchet.config.load`.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Probability = Annotated[float, Field(gt=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
DType = Literal["float32", "bfloat16"]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Logger = Literal["console", "jsonl", "mlflow", "tensorboard"]
KLType = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]


class Section(BaseModel):
    """One group of keys; unknown ones are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


class DataConfig(Section):
    train_files: str = ""
    """Training prompts: verl's Parquet, GSM8K JSONL, s3://..., a dataset id, or ratchet/word-problems?level=1."""
    val_files: str = ""
    """Held-out prompts; none means no evaluation."""
    prompt_key: str = "prompt"
    """Column that holds the prompt, in files that are not in verl's schema."""
    data_source: str | None = None
    """Names the reward where a file does not name it itself."""
    max_prompt_length: Positive = 512
    """Most prompt tokens."""
    max_response_length: Positive = 512
    """Most completion tokens."""
    train_batch_size: Positive = 1024
    """Prompts of one step."""
    filter_overlong_prompts: bool = False
    """Leave out prompts over the limit and count them; otherwise they are an error."""
    train_max_samples: int = -1
    """Use only the first so many training prompts; -1 uses all."""
    val_max_samples: int = -1
    """Use only the first so many held-out prompts; -1 uses all."""
    shuffle: bool = True
    """Draw the prompts of each epoch in an order of its own, fixed by the seed."""


class ModelConfig(Section):
    path: str = ""
    """Hub id or local folder; weights, tokenizer and chat template come from here."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about a third more time."""


class OptimConfig(Section):
    lr: NonNegative = 1e-6
    weight_decay: NonNegative = 0.01
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: NonNegative = 1e-8
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_steps: int = -1
    """Steps of linear warm-up; below 0 the ratio counts."""
    lr_warmup_steps_ratio: Share = 0.0
    min_lr_ratio: Share = 0.0
    """Where a decay ends, as a share of the learning rate."""


class FSDPConfig(Section):
    dtype: DType = "bfloat16"
    """Compute dtype; master weights, gradients' reduction and optimizer state are always float32."""


class ActorConfig(Section):
    strategy: Literal["fsdp", "fsdp2"] = "fsdp2"
    """Both mean FSDP2."""
    ppo_mini_batch_size: Positive | None = None
    """Prompts of one optimizer step; the whole batch where it is not given."""
    ppo_micro_batch_size_per_gpu: Positive | None = None
    """Sequences of one forward pass; the token budget counts where it is not given."""
    ppo_max_token_len_per_gpu: Positive = 16384
    """Token budget of one forward pass."""
    ppo_epochs: Positive = 1
    shuffle: bool = False
    """Draw mini-batches in another order each epoch."""
    clip_ratio: NonNegative = 0.2
    clip_ratio_low: NonNegative | None = None
    """Lower clip; `clip_ratio` where it is not given."""
    clip_ratio_high: NonNegative | None = None
    """Upper clip; `clip_ratio` where it is not given."""
    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    """Dual clip for negative advantages."""
    loss_agg_mode: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
    ] = "token-mean"
    loss_scale_factor: Annotated[float, Field(gt=0)] | None = None
    """Divisor of seq-mean-token-sum-norm, in tokens; data.max_response_length where it is not given."""
    entropy_coeff: NonNegative = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: NonNegative = 0.001
    kl_loss_type: KLType = "low_var_kl"
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    optim: OptimConfig = OptimConfig()
    fsdp_config: FSDPConfig = FSDPConfig()


class ValSampling(Section):
    do_sample: bool = False
    """Sample; otherwise the most likely token is taken."""
    temperature: NonNegative = 0.0
    top_p: Probability = 1.0
    top_k: int = -1
    n: Positive = 1


class RolloutConfig(Section):
    name: Literal["hf", "vllm"] = "vllm"
    """The sampler: vLLM, or Hugging Face for machines without a GPU."""
    n: Positive = 1
    """Completions of one prompt: the group size."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Probability = 1.0
    top_k: int = -1
    """Keep the k most likely tokens; -1 keeps all."""
    dtype: DType = "bfloat16"
    """Dtype of the sampler and of the published weights."""
    ignore_eos: bool = False
    gpu_memory_utilization: Probability | None = None
    """Share of the memory that vLLM may take; 0.5 of a GPU, 0.2 of a CPU's, where it is not given."""
    tensor_model_parallel_size: Positive = 1
    max_num_seqs: Positive = 256
    max_num_batched_tokens: Positive = 8192
    enable_chunked_prefill: bool = True
    enforce_eager: bool | None = None
    """Run vLLM without CUDA graphs and compilation; on a CPU only, where it is not given."""
    val_kwargs: ValSampling = ValSampling()


class RefConfig(Section):
    log_prob_max_token_len_per_gpu: Positive = 16384
    """Token budget of one forward pass of the reference."""


class ActorRolloutRefConfig(Section):
    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
    ref: RefConfig = RefConfig()


class RewardModelConfig(Section):
    gsm8k_mode: Literal["default", "strict", "flexible"] = "default"
    """How an answer is read from a GSM8K completion; strict and flexible are verl's."""


class KLControlConfig(Section):
    type: Literal["fixed"] = "fixed"
    kl_coef: NonNegative = 0.001


class RolloutCorrectionConfig(Section):
    bypass_mode: bool = True
    """Take the sampler's log-probs as behaviour log-probs; otherwise the policy scores the rollouts first."""


class AlgorithmConfig(Section):
    adv_estimator: Literal["grpo"] = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    use_kl_in_reward: bool = False
    kl_penalty: KLType = "kl"
    kl_ctrl: KLControlConfig = KLControlConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    mask_truncated_completions: bool = False
    """Leave completions that reached the length limit out of the loss; their reward still counts in the group."""


class TrainerConfig(Section):
    total_epochs: Positive = 1
    total_training_steps: Positive | None = None
    """Steps of the whole run; follows from the epochs where it is not given."""
    project_name: str = "ratchet"
    """MLflow experiment."""
    experiment_name: str = "grpo"
    """Run id, unless one is given."""
    default_local_dir: str = "runs"
    """Root below which runs lie: a local folder or s3://bucket/prefix."""
    logger: tuple[Logger, ...] = ("console",)
    grain: Literal["stage", "step", "segment"] = "segment"
    """Whether a process lasts for a stage, a step or a segment of steps."""
    steps_per_segment: Positive = 50
    trainer_state_freq: Positive = 10
    """In a segment, steps between two commits of the trainer's state; other grains commit it every step."""
    save_freq: int = -1
    """Keep the trainer's state of every so many steps for good; the last two are always kept."""
    test_freq: int = -1
    """Evaluate every so many steps and after the last; -1 evaluates after the last only."""
    val_before_train: bool = True
    resume_mode: Literal["auto", "disable"] = "auto"
    """disable refuses a run id that exists."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    n_gpus_per_node: Positive = 1
    """Trainer processes of one node."""
    nnodes: Positive = 1
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0


class RunConfig(Section):
    """Everything a run is told; immutable."""

    data: DataConfig = DataConfig()
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        actor, rollout, algorithm = self.actor_rollout_ref.actor, self.actor_rollout_ref.rollout, self.algorithm
        mini_batch = actor.ppo_mini_batch_size
        if mini_batch is not None and mini_batch > self.data.train_batch_size:
            raise ValueError(
                f"actor_rollout_ref.actor.ppo_mini_batch_size is {mini_batch}, more than data.train_batch_size "
                f"({self.data.train_batch_size})"
            )
        if actor.use_kl_loss and algorithm.use_kl_in_reward:
            raise ValueError(
                "actor_rollout_ref.actor.use_kl_loss and algorithm.use_kl_in_reward are both on: "
                "the penalty would count twice"
            )
        if algorithm.rollout_correction.bypass_mode and (rollout.top_p < 1 or rollout.top_k > 0):
            raise ValueError(
                "actor_rollout_ref.rollout.top_p below 1 or top_k above 0 renormalises the sampler's log-probs, which "
                "biases the ratio against the policy's; keep top_p=1 and top_k=-1, or set "
                "algorithm.rollout_correction.bypass_mode=false"
            )
        if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0:
            raise ValueError(
                "actor_rollout_ref.rollout.val_kwargs.do_sample is on at temperature 0, which samples nothing: "
                "set val_kwargs.temperature above 0"
            )
        return self

    @property
    def reference_is_needed(self) -> bool:
        """Whether some term reads the reference's log-probs."""
        actor, algorithm = self.actor_rollout_ref.actor, self.algorithm
        in_loss = actor.use_kl_loss and actor.kl_loss_coef > 0
        return in_loss or (algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef > 0)

    @property
    def policy_scores_are_needed(self) -> bool:
        """Whether the behaviour log-probs come from the policy instead of the sampler."""
        return not self.algorithm.rollout_correction.bypass_mode

    def value(self, key: str) -> Any:
        """Return the value under a dotted key, a section as a plain dict."""
        found: Any = self
        for name in key.split("."):
            found = getattr(found, name)
        return found.model_dump(mode="json") if isinstance(found, BaseModel) else found
