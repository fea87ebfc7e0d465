"""The section about the algorithm: the objective, the advantage estimator, KL, dynamic sampling, rollout correction."""

from typing import Annotated, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from ratchet.algorithms.catalog import ADVANTAGES
from ratchet.algorithms.rollout_bands import rejection_bounds, weight_band
from ratchet.config.section import AboveZero, Count, KLType, NonNegative, Positive, Section, Share

Objective = Literal["rl", "sft", "dpo", "reward_model", "hybrid"]
OFFLINE: Final = ("sft", "dpo", "reward_model")
"""Objectives that learn from examples alone: nothing is sampled, and there is no reward and no advantage."""


class KLControlConfig(Section):
    """The coefficient of the KL in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """Whether the coefficient follows the measured KL."""
    kl_coef: NonNegative = 0.001
    """The coefficient, or where an adaptive one begins."""
    horizon: Positive = 10000
    """adaptive: rollouts over which the coefficient may change by its full share."""
    target_kl: AboveZero = 0.1
    """adaptive: the KL, in nats a token, that the coefficient steers to."""


class FilterGroupsConfig(Section):
    """DAPO's dynamic sampling (https://arxiv.org/abs/2503.14476, section 3.2): groups of equal rewards are replaced."""

    enable: bool = False
    """Sample on until a step has its groups."""
    metric: Literal["seq_reward", "seq_final_reward", "score", "acc"] | None = None
    """What must differ within a group: the reward's part of that name, where it has one. Otherwise acc, score and null
    mean the reward without the penalty on length, so that a group of right answers is not kept for their lengths;
    seq_reward and seq_final_reward mean the reward with it."""
    max_num_gen_batches: Count = 0
    """Sampling rounds of one step at most; 0 goes on while prompts are left."""


class RolloutCorrectionConfig(Section):
    """What is done about a sampler whose probabilities differ from the policy's."""

    bypass_mode: bool = True
    """Take the sampler's log-probs as behaviour log-probs; otherwise the policy scores the rollouts first.

    Where it is not given: false if rollout.top_p is below 1 or rollout.top_k above 0, else true.
    """
    rollout_is: Literal["token", "sequence"] | None = None
    """Weight tokens by the truncated ratio of policy to sampler, by token or by sequence.

    With bypass_mode=true the update itself takes the ratio, of its own log-probs to the sampler's, and no other forward
    pass is made: by token, truncated at one number, and where a step is one optimizer step.
    """
    rollout_is_threshold: float | str = 2.0
    """Where the weights are truncated; `"lo_hi"` sets those outside the band to 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean."""
    rollout_rs: str | None = None
    """Leave tokens or sequences out by their ratio: a mode, or several with commas (docs/algorithms.md)."""
    rollout_rs_threshold: float | str | None = None
    """One threshold for each mode of rollout_rs, or one for all: the largest that is kept; for k1, `"lo_hi"`."""

    @model_validator(mode="after")
    def _thresholds_can_be_read(self) -> Self:
        weight_band(self.rollout_is_threshold)
        if self.rollout_rs is not None:
            rejection_bounds(self.rollout_rs, self.rollout_rs_threshold)
        return self


class DPOConfig(Section):
    """algorithm.objective=dpo: direct preference optimisation (https://arxiv.org/abs/2305.18290)."""

    beta: AboveZero = 0.1
    """How much a difference of log-ratios counts; the larger, the closer the policy stays to the reference."""
    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """DPO's logistic loss, IPO's squared one (https://arxiv.org/abs/2310.12036), or SLiC's hinge
    (https://arxiv.org/abs/2305.10425)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """sigmoid: share of the preferences that are taken to be the wrong way round (conservative DPO)."""
    reference_free: bool = False
    """Take the reference's log-probs as 0: no reference is scored."""
    length_normalized: bool = False
    """Divide the log-probs of a completion by its tokens."""


class HybridConfig(Section):
    """algorithm.objective=hybrid: examples are imitated in the same update that learns from rewards."""

    mix_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of the update's loss tokens that come from examples, and the weight of their loss:
    `(1 - mix_ratio) * L_rl + mix_ratio * L_sft`, each the mean over its own tokens."""
    sft_files: str = ""
    """Examples, `prompt` and `chosen`, in any form that data.train_files takes."""
    sft_lr: AboveZero | None = None
    """Learning rate of the examples: their loss is scaled by sft_lr / actor.optim.lr. Where it is not given, the
    update's."""


class AlgorithmConfig(Section):
    """What is optimised."""

    objective: Objective = "rl"
    """rl learns from rewards of what the policy samples; sft imitates `chosen`; dpo prefers `chosen` to `rejected`;
    reward_model trains a sequence classifier to do so (Bradley-Terry); hybrid is rl and sft in one update."""
    dpo: DPOConfig = DPOConfig()
    hybrid: HybridConfig = HybridConfig()
    adv_estimator: str = "grpo"
    """Name of the advantage estimator (docs/algorithms.md), or of one that was registered.

    Where it is not given: gae if some key of critic is, else grpo. `ppo` is gae.
    """
    gamma: Share = 1.0
    """Discount of later rewards."""
    lam: Share = 1.0
    """gae: how far a temporal difference reaches back."""
    whiten_advantages: bool = False
    """Normalise the advantages over all tokens of the step, as PPO is often run, after any estimator."""
    norm_adv_by_std_in_grpo: bool = True
    """grpo: divide by the group's standard deviation; without it, Dr. GRPO."""
    gdpo_reward_keys: tuple[str, ...] = ()
    """gdpo: parts of the reward, as in reward_breakdown, that are normalised each on its own; where none is given, what
    grades (`reward_model.type` or `.weights`)."""
    gdpo_reward_weights: tuple[float, ...] = ()
    """gdpo: their weights, 1 each where none is given."""
    use_kl_in_reward: bool = False
    """Take the KL to the reference off the reward of every token."""
    kl_penalty: KLType = "kl"
    """Its estimator, as kl_loss_type."""
    kl_ctrl: KLControlConfig = KLControlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    mask_truncated_completions: bool = False
    """Leave completions that reached the length limit out of the loss; their reward still counts in the group."""
    compat: Literal["ratchet", "verl"] = "ratchet"
    """Whose numbers count where verl's are an accident (docs/algorithms.md lists them)."""

    @field_validator("adv_estimator")
    @classmethod
    def _is_known(cls, value: str) -> str:
        return ADVANTAGES.get(value).name
