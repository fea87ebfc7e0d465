"""One Arrow schema for each table that a stage commits; the only place where columns are declared.

A stage adds a table and never rewrites one. Rows join by key, never by position: `prompt_id` for prompts,
(`group_id`, `sample_index`) for everything that belongs to a rollout. No table holds a time, an attempt or a run id, so
that equal work gives equal bytes.
"""

import pyarrow as pa

ROLLOUT_KEY = ("group_id", "sample_index")

_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])

PROMPTS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("data_source", pa.string()),
        ("prompt", pa.list_(_MESSAGE)),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        # JSON text: files from the wild disagree about the types inside (index is int64 in one, a UUID in another).
        ("extra_info", pa.string()),
    ]
)
"""What the policy is asked. `prompt_id` is `<split>-<row>`; the other columns are verl's.

Example: ("train-0000000", "openai/gsm8k", [{"role": "user", "content": "Natalia sold ..."}], "math",
{"style": "rule", "ground_truth": "72"}, '{"index": 0, "split": "train"}').
"""

EXAMPLES = pa.schema(
    [
        ("example_id", pa.string()),
        ("data_source", pa.string()),
        ("prompt", pa.list_(_MESSAGE)),
        ("chosen", pa.string()),
        ("rejected", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("chosen_token_ids", pa.list_(pa.int32())),
        ("chosen_loss_mask", pa.list_(pa.bool_())),
        ("rejected_token_ids", pa.list_(pa.int32())),
        ("rejected_loss_mask", pa.list_(pa.bool_())),
        ("extra_info", pa.string()),
    ]
)
"""What an offline objective learns from, tokenised once. `example_id` is `<split>-<row>`.

`chosen` and `rejected` are texts, JSON of the messages where the assistant has several turns; what belongs to
`rejected` is null where nothing is compared. A loss mask has one entry per token of its completion: true for the tokens
that the assistant wrote. For a reward model the three lists of ids are as it reads conversations: what both begin with,
and the rest of each to the end of what the chat template writes, every token counted.

Example: ("train-0000012", "helpful", [{"role": "user", "content": "Hi"}], "Hello!", "No.", [1, 4093, 198], [24, 2],
[true, true], [31, 2], [true, true], '{"index": 12, "split": "train"}').
"""

_KEY: list[tuple[str, pa.DataType]] = [("group_id", pa.string()), ("sample_index", pa.int32())]

ROLLOUTS = pa.schema(
    [
        *_KEY,
        ("prompt_id", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("completion_token_ids", pa.list_(pa.int32())),
        ("completion", pa.string()),
        ("sampler_log_probs", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
        ("policy_version", pa.int64()),
        ("seed", pa.int64()),
    ]
)
"""One sampled completion: exactly the token ids that were sampled; `completion` is their text, for rewards and people.

`group_id` is `<step>/<prompt_id>`. `sampler_log_probs` (nats, at the sampling temperature) has one entry per completion
token, the end token included, or is null where it was not asked for. `finish_reason` is "stop" or "length". `seed`
names the sample's noise.

Example: ("000003/train-0000007", 0, "train-0000007", [1, 4093, 198], [24, 2], "6", [-0.11, -0.02], "stop", 2, 77123).
"""

REWARDS = pa.schema(
    [
        *_KEY,
        ("reward", pa.float64()),
        ("reward_breakdown", pa.map_(pa.string(), pa.float64())),
        ("extracted", pa.string()),
        ("is_parseable", pa.bool_()),
        ("error", pa.string()),
    ]
)
"""One reward per rollout. `extracted` is the answer as it was read, null where none was found (`is_parseable` false).

A null reward is that of a completion which could not be graded, `error` says why; no later stage learns from it.

Example: ("000003/train-0000007", 0, 1.0, {"gsm8k": 1.0}, "6", true, null).
"""


def scores(role: str, *, with_sum_pi_squared: bool = False) -> pa.Schema:
    """Log-probs (nats, at the sampling temperature) of the sampled tokens under `role`: "policy" or "reference".

    Of an offline run the rows are the completions of the step's pairs: `group_id` is `<step>/<example_id>`,
    `sample_index` 0 what was chosen and 1 what was rejected, and one entry per token of that completion.
    `sum_pi_squared`, where it is wanted, is the sum over the vocabulary of squared probabilities at each token.
    """
    more = [("sum_pi_squared", pa.list_(pa.float32()))] if with_sum_pi_squared else []
    return pa.schema([*_KEY, (f"{role}_log_probs", pa.list_(pa.float32())), *more])


TOKEN_REWARDS = pa.schema([*_KEY, ("token_rewards", pa.list_(pa.float32()))])
"""Rewards of single tokens, beside REWARDS, where the reward gives them; null for a rollout whose reward is one number.
"""

VALUES = pa.schema([*_KEY, ("values", pa.list_(pa.float32()))])
"""What the critic expects of the rest of the completion, before each completion token."""

IMPORTANCE_WEIGHTS = pa.schema([*_KEY, ("importance_weights", pa.list_(pa.float32()))])
"""Rollout correction's weight of each completion token, beside TRAJECTORIES, where it is on."""


TRAJECTORIES = pa.schema(
    [
        *_KEY,
        ("advantages", pa.list_(pa.float32())),
        ("returns", pa.list_(pa.float32())),
        ("token_rewards", pa.list_(pa.float32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("behaviour_log_probs", pa.list_(pa.float32())),
        ("behaviour_source", pa.string()),
        ("group_reward_mean", pa.float64()),
        ("group_reward_std", pa.float64()),
        ("group_size", pa.int32()),
    ]
)
"""A rollout once scored: one entry per completion token in every list. `behaviour_source` is "sampler", "policy" or
"update"; of the last, behaviour_log_probs are null: the update takes its own. The statistics of a group are null for a
rollout that was not graded, which is in none, and its loss_mask is false.

Example: ("000003/train-0000007", 0, [0.7, 0.7], [0.7, 0.7], [0.0, 1.0], [true, true], [-0.11, -0.02], "sampler",
0.5, 0.707, 2).
"""

EVALUATIONS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("sample_index", pa.int32()),
        ("data_source", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("completion_token_ids", pa.list_(pa.int32())),
        ("completion", pa.string()),
        ("finish_reason", pa.string()),
        ("reward", pa.float64()),
        ("extracted", pa.string()),
        ("is_parseable", pa.bool_()),
    ]
)
"""One held-out completion and its reward, sampled with the validation settings."""

EVALUATIONS_OFFLINE = pa.schema(
    [
        ("example_id", pa.string()),
        ("data_source", pa.string()),
        ("loss", pa.float64()),
        ("num_tokens", pa.int64()),
        ("margin", pa.float64()),
        ("accuracy", pa.float64()),
    ]
)
"""One held-out example under an offline objective.

`num_tokens` counts the tokens inside the loss masks. `loss` is the objective's own: of SFT the mean of -log p (nats)
over them. `margin` is by how much the chosen completion is preferred to the rejected one (of DPO beta times the
difference of what its loss compares, of a reward model the difference of scores), `accuracy` 1.0 where that is above 0,
else 0.0; both are null for SFT.

Example: ("val-0000003", "helpful", 0.41, 57, 0.68, 1.0).
"""
