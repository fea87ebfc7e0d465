"""The sections about rewards: what grades a completion, and the user's own functions."""

from typing import Any, Literal

from pydantic import Field

from ratchet.config.section import AboveZero, Count, DType, NonNegative, Positive, Section

RewardKind = Literal["rule", "model", "api", "custom"]


class OverlongBufferConfig(Section):
    """DAPO's soft penalty on length (https://arxiv.org/abs/2503.14476, section 3.4)."""

    enable: bool = False
    """Lay the penalty on long completions."""
    len: Positive = 512
    """Tokens before data.max_response_length over which the penalty grows to its full size."""
    penalty_factor: NonNegative = 1.0
    """Its full size."""


class RewardModelConfig(Section):
    """What grades completions; the name of the section is verl's, a model is one of four ways."""

    type: RewardKind = "rule"
    """What grades: the rule of the row's data_source, a reward model, an HTTP endpoint, or custom_reward_function.

    Where neither it nor weights is given, the one of path, url and custom_reward_function.path that is given decides.
    """
    weights: dict[RewardKind, float] = Field(default_factory=dict)
    """Several at once: `{rule: 1.0, model: 0.5}` adds their rewards with these weights; empty takes `type` alone."""
    gsm8k_mode: Literal["default", "strict", "flexible"] = "default"
    """How an answer is read from a GSM8K completion; strict and flexible are verl's."""
    reward_manager: Literal["naive", "dapo"] = "naive"
    """Both grade alike; what dapo adds, the penalty on length, is switched on by overlong_buffer.enable."""
    num_examine: Count = 0
    """Completions of each data_source that are printed with their reward, in every step."""
    path: str = ""
    """model: hub id or folder of a sequence classifier with one label, or of a model with a reward head."""
    dtype: DType = "bfloat16"
    """model: compute dtype; the head computes in float32."""
    max_token_len_per_gpu: Positive = 16384
    """model: token budget of one forward pass."""
    url: str = ""
    """api: where completions are posted to (docs/rewards.md)."""
    batch_size: Positive = 64
    """api: completions of one request."""
    concurrency: Positive = 32
    """api: requests under way at once."""
    timeout: AboveZero = 60.0
    """api: seconds for one request."""
    retries: Count = 3
    """api: further tries after a failure that may pass, with growing pauses."""
    auth_env: str = ""
    """api: environment variable that holds the Authorization header's value, which never stands in a config."""
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()


class CustomRewardConfig(Section):
    """A reward of the user's own: verl's hook, or an object that grades a DataProto."""

    path: str = ""
    """Python file."""
    name: str = "compute_score"
    """Function `(data_source, solution_str, ground_truth, extra_info)`, function or class of `(data: DataProto)`."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the function, or the arguments of the class."""
