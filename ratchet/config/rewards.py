"""The sections about rewards: what grades a completion, and the user's own functions."""

from typing import Any, Literal

from pydantic import Field

from ratchet.config.section import AboveZero, Count, DType, NonNegative, Positive, Section

RewardKind = Literal["rule", "model", "api", "judge", "custom"]
RuleName = Literal["", "gsm8k", "math"]


class OverlongBufferConfig(Section):
    """DAPO's soft penalty on length (https://arxiv.org/abs/2503.14476, section 3.4)."""

    enable: bool = False
    """Lay the penalty on long completions."""
    len: Positive = 512
    """Tokens before data.max_response_length over which the penalty grows to its full size."""
    penalty_factor: NonNegative = 1.0
    """Its full size."""


class FormatConfig(Section):
    """A reward for the form of a completion, beside the one for what it says."""

    pattern: str = ""
    """Regular expression that is looked for in the completion; empty rewards no form."""
    weight: float = 1.0
    """What a completion earns in which it is found, 0 where it is not."""


class LengthPenaltyConfig(Section):
    """A penalty in proportion to length; that of overlong_buffer begins just before the limit."""

    weight: NonNegative = 0.0
    """What a completion of data.max_response_length tokens loses; 0 lays no penalty."""
    free_tokens: Count = 0
    """Tokens that cost nothing; from there on the penalty grows evenly."""


class JudgeConfig(Section):
    """A language model that grades completions, behind any endpoint that speaks OpenAI's chat completions."""

    url: str = ""
    """Address of the API, such as http://host:8000/v1."""
    model: str = ""
    """The name that the endpoint knows the model by."""
    prompt: str = (
        "Grade the answer to the question from 0 (wrong or useless) to 10 (right and complete).\n\n"
        "Question:\n{prompt}\n\nAnswer:\n{completion}\n\nReference answer:\n{ground_truth}\n\n"
        "Give your reasons in a few sentences, then end with a line: Score: <number>"
    )
    """What it is asked; {prompt}, {completion} and {ground_truth} are replaced, other braces stay as they are."""
    pattern: str = (
        r"(?im)(?:^|[.!?]\s)\W*(?:final |overall )?score(?: ?\([^()]*\))?\W{0,3}?[:=]\W{0,3}?"
        r"(-?(?:\d+(?:\.\d+)?|\.\d+))(?: ?(?:/|out of) ?\d+)?\W*$"
    )
    """Regular expression; the first group of its last match in the verdict is the number. This one finds a line or
    its last sentence that says "Score: 8", "**Score (0-10):** 8/10" or "Final score = 7.5", and nothing else."""
    scale: tuple[float, float] = (0.0, 10.0)
    """The numbers that become the rewards 0 and 1; what lies outside is no verdict."""
    max_tokens: Positive = 512
    """Longest verdict."""
    temperature: NonNegative = 0.0
    """0 has the judge repeat itself."""


class RewardModelConfig(Section):
    """What grades completions; the name of the section is verl's, a model is one of five ways."""

    type: RewardKind = "rule"
    """What grades: the rule of the row's data_source, a reward model, an HTTP endpoint, a judge, or
    custom_reward_function.

    Where neither it nor weights is given, the one of path, url, judge.url and custom_reward_function.path that is given
    decides.
    """
    weights: dict[RewardKind, float] = Field(default_factory=dict)
    """Several at once: `{rule: 1.0, model: 0.5}` adds their rewards with these weights; empty takes `type` alone."""
    rule: RuleName = ""
    """rule: grade every row by this one; empty takes the rule of its data_source."""
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
    """api: completions of one request; a judge is asked about one at a time."""
    concurrency: Positive = 32
    """api, judge: requests under way at once."""
    timeout: AboveZero = 60.0
    """api, judge: seconds for one request."""
    retries: Count = 3
    """api, judge: further tries after a failure that may pass, with growing pauses."""
    auth_env: str = ""
    """api, judge: environment variable that holds the Authorization header's value, which never stands in a config."""
    on_failure: Literal["fail", "exclude"] = "fail"
    """Where a service cannot grade a completion (no answer, no verdict): the step fails, or the completion is marked
    and left out of group statistics, advantages, loss and metrics. A step without a graded one fails all the same.
    """
    judge: JudgeConfig = JudgeConfig()
    format: FormatConfig = FormatConfig()
    length_penalty: LengthPenaltyConfig = LengthPenaltyConfig()
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()


class CustomRewardConfig(Section):
    """A reward of the user's own: verl's hook, or an object that grades a DataProto."""

    path: str = ""
    """Python file."""
    name: str = "compute_score"
    """Function `(data_source, solution_str, ground_truth, extra_info)`, function or class of `(data: DataProto)`."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the function, or the arguments of the class."""
    sandbox: bool = True
    """Grade in a process of its own, within the limits below; an object that was passed to fit() stays where it is."""
    timeout: AboveZero = 300.0
    """sandbox: seconds for one row of a function that grades rows, or for one call of what grades a DataProto."""
    memory_gib: AboveZero = 8.0
    """sandbox: memory that the process may allocate."""
    env: tuple[str, ...] = ()
    """sandbox: environment variables that the process gets beside those of paths, locale, threads and caches."""
