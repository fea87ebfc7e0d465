"""The typed configuration of a run, under verl's key names.

Keys are grouped as verl groups them, so that a config that users bring reads the same here. Trap: this is what a config
means once it is read; other spellings, and values that follow from other keys, are `ratchet.config.load`'s.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from ratchet.algorithms.catalog import ADVANTAGES
from ratchet.config.algorithm import OFFLINE, AlgorithmConfig
from ratchet.config.checks import combination_faults
from ratchet.config.cluster import DeviceMapConfig, PromotionConfig
from ratchet.config.models import ActorRolloutRefConfig, CriticConfig
from ratchet.config.rewards import CustomRewardConfig, RewardModelConfig
from ratchet.config.section import AboveZero, Count, DeviceName, Loggers, NonNegative, Positive, Section


class DataConfig(Section):
    """Prompts or examples, lengths and batches."""

    train_files: str = ""
    """Training prompts: verl's Parquet, GSM8K JSONL, s3://..., a dataset id, or ratchet/word-problems?level=1. With
    algorithm.objective sft, dpo or reward_model, examples: `prompt`, `chosen` and, but for sft, `rejected`."""
    val_files: str = ""
    """Held-out prompts or examples; none means no evaluation."""
    prompt_key: str = "prompt"
    """Column that holds the prompt, in files that are not in verl's schema."""
    data_source: str | None = None
    """Names the reward where a file does not name it itself."""
    max_prompt_length: Positive = 512
    """Most prompt tokens."""
    max_response_length: Positive = 512
    """Most completion tokens, sampled or of an example."""
    train_batch_size: Positive = 1024
    """Prompts or examples of one step."""
    filter_overlong_prompts: bool = False
    """Leave out prompts and examples over the limits and count them; otherwise they are an error."""
    train_max_samples: int = -1
    """Use only the first so many training prompts; -1 uses all."""
    val_max_samples: int = -1
    """Use only the first so many held-out prompts; -1 uses all."""
    shuffle: bool = True
    """Draw the prompts of each epoch in an order of its own, fixed by the seed."""


class CodeFile(Section):
    """A Python file that registers advantages, losses or rewards; it travels with the run."""

    path: str = ""
    """Where it was read."""
    sha256: str = ""
    """Of its bytes; filled in when it is read."""
    source: str = ""
    """Its text; filled in when it is read."""


class TrainerConfig(Section):
    """How long, where, and what is kept and reported."""

    total_epochs: Positive = 1
    """Passes over the training prompts."""
    total_training_steps: Positive | None = None
    """Steps of the whole run; follows from the epochs where it is not given."""
    project_name: str = "ratchet"
    """MLflow experiment."""
    experiment_name: str = "grpo"
    """Run id, unless one is given."""
    default_local_dir: str = "runs"
    """Root below which runs lie: a local folder or s3://bucket/prefix."""
    logger: Loggers = ("console",)
    """Where metrics go."""
    log_completions_freq: int = 10
    """With the logger mlflow, show a table of completions with their rewards of every so many steps, of the first and
    of every evaluation; -1 shows none."""
    system_metrics: bool = True
    """With the logger mlflow, measure processor, memory, disk, network and GPUs of the machine every 10 s, and show
    them beside the run's metrics; not at the grain stage, whose pods live for seconds."""
    grain: Literal["stage", "step", "segment"] = "segment"
    """Whether a process lasts for a stage, a step or a segment of steps."""
    async_level: Literal[0, 1] = 0
    """Steps by which sampling runs ahead: 0 samples step k from policy k - 1; 1 samples it from policy k - 2, which at
    segment grain is done while step k - 1 trains. Weigh the tokens then by
    algorithm.rollout_correction.rollout_is=token."""
    steps_per_segment: Positive = 50
    """Steps that one process runs at segment grain."""
    full_weights_freq: Positive = 10
    """In a segment, steps between two full copies of the published weights; the steps in between store what changed."""
    commit_lag: Positive = 6
    """In a segment, most steps whose commits may be under way while the next one runs."""
    trainer_state_freq: Positive = 10
    """In a segment, steps between two commits of the trainer's state; other grains commit it every step."""
    save_freq: int = -1
    """Keep the trainer's state of every so many steps for good, beside the last ones."""
    max_actor_ckpt_to_keep: Positive | None = None
    """Most of the policy's trainer states that save_freq keeps, beside the last two; all where it is not given."""
    max_critic_ckpt_to_keep: Positive | None = None
    """The same for the critic's."""
    keep_policies: Positive | None = None
    """Most of the newest policies, and critics, that are kept, at least 2; all where it is not given. Beside them stay
    version 0, those of steps whose trainer state is kept or that test_freq names, those that an evaluation or an export
    names, and what any of these builds on. The others are deleted, with a record."""
    storage_budget_gib: AboveZero | None = None
    """Most GiB that the run may hold. Over it no step begins: the run stops and can be gone on with."""
    test_freq: int = -1
    """Evaluate every so many steps and after the last; -1 evaluates after the last only."""
    val_before_train: bool = True
    """Evaluate version 0, too."""
    critic_warmup: Count = 0
    """Steps at the start in which only the critic learns."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto goes on with the run of this id if there is one; disable refuses a run id that exists; resume_path goes on
    with the run at resume_from_path, which must exist."""
    resume_from_path: str = ""
    """Folder of a run, ROOT/RUN-ID, with resume_mode=resume_path. A run goes on after its newest commit, so a folder of
    one step is refused."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models run; auto takes a GPU if there is one."""
    n_gpus_per_node: Positive = 1
    """Trainer processes of one node."""
    nnodes: Positive = 1
    """Nodes of the trainer."""
    prices: dict[DeviceName, NonNegative] = Field(default={})
    """What an hour of one accelerator costs, by its name as manifests have it: `{NVIDIA H200: 3.5}`; `cpu` is an hour
    of a process without one. In whatever currency; it turns GPU-seconds into money."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Fixes the order of prompts, every sample and the order of mini-batches."""


class RunConfig(Section):
    """Everything a run is told; immutable."""

    data: DataConfig = DataConfig()
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    critic: CriticConfig = CriticConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    device_map: DeviceMapConfig = DeviceMapConfig()
    promotion: PromotionConfig = PromotionConfig()
    code: Annotated[tuple[CodeFile, ...], BeforeValidator(lambda value: _as_files(value))] = ()
    """Python files that are imported before names are looked up; a path alone is enough."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        faults = combination_faults(self)
        if faults:
            raise ValueError("\n  ".join(faults))
        return self

    @property
    def is_offline(self) -> bool:
        """Whether the run learns from examples alone: no rollouts, rewards and advantages."""
        return self.algorithm.objective in OFFLINE

    @property
    def needs_pairs(self) -> bool:
        """Whether every example must have a rejected completion beside the chosen one."""
        return self.algorithm.objective in ("dpo", "reward_model")

    @property
    def reference_is_needed(self) -> bool:
        """Whether some term reads the reference's log-probs."""
        actor, algorithm = self.actor_rollout_ref.actor, self.algorithm
        if self.is_offline:
            return algorithm.objective == "dpo" and not algorithm.dpo.reference_free
        in_loss = actor.use_kl_loss and actor.kl_loss_coef > 0
        return in_loss or (algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef > 0)

    @property
    def advantage_needs(self) -> frozenset[str]:
        """What the advantage estimator reads beside rewards and groups (`ratchet.algorithms.catalog.Need`)."""
        return ADVANTAGES.get(self.algorithm.adv_estimator).needs

    @property
    def critic_is_needed(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return "values" in self.advantage_needs and not self.is_offline

    @property
    def behaviour_source(self) -> Literal["sampler", "policy", "update"]:
        """Whose log-probs the update's ratio is taken against.

        "sampler": as it sampled; "policy": as the policy scored before its update; "update": the update's own, which
        are the policy's as long as a step is one optimizer step.
        """
        correction = self.algorithm.rollout_correction
        if not correction.bypass_mode:
            return "policy"
        is_own = correction.rollout_is is not None or not self.actor_rollout_ref.rollout.calculate_log_probs
        return "update" if is_own else "sampler"

    @property
    def policy_scores_are_needed(self) -> bool:
        """Whether the policy scores the rollouts before its update."""
        is_rescored = not self.algorithm.rollout_correction.bypass_mode
        return (is_rescored or "sum_pi_squared" in self.advantage_needs) and not self.is_offline

    @property
    def reward_weights(self) -> dict[str, float]:
        """What grades, each with its weight: reward_model.weights, or reward_model.type alone with weight 1."""
        return {str(kind): weight for kind, weight in self.reward_model.weights.items()} or {
            self.reward_model.type: 1.0
        }

    def value(self, key: str) -> Any:
        """Return the value under a dotted key, a section as a plain dict."""
        found: Any = self
        for name in key.split("."):
            found = getattr(found, name)
        return found.model_dump(mode="json") if isinstance(found, BaseModel) else found


def _as_files(value: Any) -> Any:
    """A path, or a list with paths in it, as a list of files."""
    items = [value] if isinstance(value, (str, dict, CodeFile)) else value
    if not isinstance(items, (list, tuple)):
        return items
    return [{"path": item} if isinstance(item, str) else item for item in items]
