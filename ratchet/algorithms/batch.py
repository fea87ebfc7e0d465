"""What advantage estimators and policy losses are given; the one interface that built-in and users' functions share.

Trap: advantages see rows padded to one length, [B, T]; losses see the loss tokens of a micro-batch laid one after
another, [N], with the row that each belongs to, since training never pads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Compat = Literal["ratchet", "verl"]
"""Whose answer is given where verl's is an accident (docs/algorithms.md lists them)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageBatch:
    """The rollouts of one step, B rows padded on the right to T tokens. What is outside `mask` counts nowhere."""

    token_rewards: Tensor
    """float [B, T]: reward of each token; an outcome reward stands on the last token."""
    mask: Tensor
    """bool [B, T]: tokens that the policy sampled; False is padding or a tool's output."""
    group_index: Tensor
    """int64 [B]: equal for the rollouts of one prompt."""
    rewards: Tensor
    """float64 [B]: reward of each rollout, the sum of its token rewards; also where it has no token."""
    values: Tensor | None = None
    """float [B, T]: the critic's value before each token."""
    greedy_rewards: Tensor | None = None
    """float [B]: reward of the greedy completion of the row's prompt."""
    log_probs: Tensor | None = None
    """float [B, T]: log-probs (nats) of the tokens under the behaviour policy."""
    sum_pi_squared: Tensor | None = None
    """float [B, T]: sum over the vocabulary of squared probabilities before each token."""
    importance_weights: Tensor | None = None
    """float [B, T]: rollout correction's weights."""
    reward_parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> float [B]: the parts of each rollout's reward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageOptions:
    """Options of all estimators; each reads its own."""

    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True
    """Divide by the group's standard deviation (GRPO); False is Dr. GRPO's."""
    part_weights: Mapping[str, float] = field(default_factory=dict)
    """GDPO: the reward's parts that count, and their weights; empty takes all with weight 1."""
    compat: Compat = "ratchet"


@dataclass(frozen=True, kw_only=True, slots=True)
class LossBatch:
    """The N loss tokens of a micro-batch, row after row."""

    log_probs: Tensor
    """float [N] with gradient: log-probs (nats, at the sampling temperature) under the policy in training."""
    behaviour_log_probs: Tensor
    """float [N]: under the policy that the ratio is taken against."""
    advantages: Tensor
    """float [N]."""
    row_index: Tensor
    """int64 [N], not descending: the row of the micro-batch that each token belongs to, from 0."""
    num_rows: int
    """Rows of the micro-batch, R; a row may have no token."""
    importance_weights: Tensor | None = None
    """float [N]: rollout correction's weights, constants."""
    selection: Tensor | None = None
    """bool [N]: tokens that the loss's selection over the mini-batch picked; None where it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """Options of all policy losses; each reads its own. Names follow verl's configuration."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002
    ppo_kl_coef: float = 0.1
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    dro_beta: float | None = None
    compat: Compat = "ratchet"
