"""The section about the algorithm: the advantage estimator, KL, dynamic sampling, rollout correction."""

from typing import Literal, Self

from pydantic import field_validator, model_validator

from ratchet.algorithms.catalog import ADVANTAGES
from ratchet.algorithms.rollout_bands import rejection_bounds, weight_band
from ratchet.config.section import AboveZero, Count, KLType, NonNegative, Positive, Section, Share


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


class AlgorithmConfig(Section):
    """What is optimised."""

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
