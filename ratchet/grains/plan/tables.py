"""How large the tables of a step are: tables of the run's own schemas, filled with what looks like its rows.

Trap: how far texts compress depends on what the model writes. The completions here are tokens as frequent as in the
prompts, in no order, which is no easier to compress than text; numbers are drawn, since a model's do not compress.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.parquet import to_bytes
from ratchet.grains.plan.facts import Facts

_MOST_ROWS = 64
"""Rows that are made; the bytes of more follow from these and half as many."""


def step_tables(config: RunConfig, facts: Facts, positions: Sequence[int], completion: int) -> dict[str, int]:
    """Return table -> bytes of a step over these prompts, with completions of that many tokens each."""
    if config.is_offline:
        if not config.reference_is_needed:
            return {}
        lengths = [int(one) for one in facts.train.completions[list(positions)]]  # type: ignore[index]
        halves = [half for one in lengths for half in (one - one // 2, one // 2)]
        return {"reference_scores": _scaled(lambda count: _score_table(halves[:count]), len(halves))}
    group = config.actor_rollout_ref.rollout.n
    rows = len(positions) * group
    found: dict[str, int] = {}
    for name, make in _MAKERS.items():
        count = len(positions) if name.startswith("greedy") else rows
        if name in _names(config):
            found[name] = _scaled(partial(_filled, make, config, facts, completion), count)
    if config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.type == "adaptive":
        found["kl_controller"] = 64
    return found


def evaluation_table(config: RunConfig, facts: Facts, rows: int, completion: int) -> int:
    """Return the bytes of the table of one evaluation."""
    if config.is_offline:
        return _scaled(_offline_evaluation, rows)
    return _scaled(partial(_filled, _evaluation, config, facts, completion), rows)


def _filled(make: "_Make", config: RunConfig, facts: Facts, completion: int, count: int) -> pa.Table:
    return make(_Rows(config, facts, count, completion))


class _Rows:
    """Columns of some rows of a step."""

    def __init__(self, config: RunConfig, facts: Facts, count: int, completion: int) -> None:
        self.config = config
        self.count = count
        self.random = np.random.default_rng(0)
        ids = facts.train.token_ids
        stream = [token for one in ids for token in one] or [0]
        self.prompts = [ids[row % len(ids)] for row in range(count)]
        self.completions = self.random.choice(stream, (count, completion)).tolist()
        self.texts = facts.tokenizer.batch_decode(self.completions, skip_special_tokens=True)
        self.length = completion
        self.prompt_ids = [facts.train.ids[row % len(facts.train.ids)] for row in range(count)]
        group = 1 if config.is_offline else config.actor_rollout_ref.rollout.n
        self.key = {
            "group_id": [f"000001/{facts.train.ids[row // group % len(facts.train.ids)]}" for row in range(count)],
            "sample_index": [row % group for row in range(count)],
        }

    def drawn(self) -> list[np.ndarray]:
        """One number a completion token, no two alike."""
        return [self.random.normal(size=self.length).astype(np.float32) for _ in range(self.count)]

    def constant(self) -> list[np.ndarray]:
        """One number a row, at every token."""
        numbers = self.random.normal(size=self.count).astype(np.float32)
        return [np.full(self.length, number, np.float32) for number in numbers]


def _rollouts(rows: _Rows) -> pa.Table:
    rollout = rows.config.actor_rollout_ref.rollout
    is_asked = rows.random.random(rows.count) < (1.0 if rollout.calculate_log_probs else rollout.log_probs_share)
    columns = {
        **rows.key,
        "prompt_id": rows.prompt_ids,
        "prompt_token_ids": rows.prompts,
        "completion_token_ids": rows.completions,
        "completion": rows.texts,
        "sampler_log_probs": [one if asked else None for one, asked in zip(rows.drawn(), is_asked, strict=True)],
        "finish_reason": ["length"] * rows.count,
        "policy_version": [1] * rows.count,
        "seed": rows.random.integers(0, 2**62, rows.count),
    }
    return pa.table(columns, schema=schemas.ROLLOUTS)


def _rewards(rows: _Rows) -> pa.Table:
    names = list(rows.config.reward_weights)
    columns = {
        **rows.key,
        "reward": rows.random.integers(0, 2, rows.count).astype(float),
        "reward_breakdown": [[(name, 0.0) for name in names]] * rows.count,
        "extracted": [str(number) for number in rows.random.integers(0, 1000, rows.count)],
        "is_parseable": [True] * rows.count,
        "error": [None] * rows.count,
    }
    return pa.table(columns, schema=schemas.REWARDS)


def _trajectories(rows: _Rows) -> pa.Table:
    config, source = rows.config, rows.config.behaviour_source
    is_each = config.critic_is_needed or config.algorithm.use_kl_in_reward
    advantages, returns = (rows.drawn(), rows.drawn()) if is_each else (rows.constant(), rows.constant())
    rewards = rows.drawn() if config.algorithm.use_kl_in_reward else [np.zeros(rows.length, np.float32)] * rows.count
    columns = {
        **rows.key,
        "advantages": advantages,
        "returns": returns,
        "token_rewards": rewards,
        "loss_mask": [[True] * rows.length] * rows.count,
        "behaviour_log_probs": [None] * rows.count if source == "update" else rows.drawn(),
        "behaviour_source": [source] * rows.count,
        "group_reward_mean": rows.random.normal(size=rows.count),
        "group_reward_std": rows.random.normal(size=rows.count),
        "group_size": [4] * rows.count,
    }
    return pa.table(columns, schema=schemas.TRAJECTORIES)


def _column(schema: pa.Schema) -> Callable[[_Rows], pa.Table]:
    def make(rows: _Rows) -> pa.Table:
        return pa.table({**rows.key, **{name: rows.drawn() for name in schema.names[2:]}}, schema=schema)

    return make


def _evaluation(rows: _Rows) -> pa.Table:
    columns = {
        "prompt_id": rows.prompt_ids,
        "sample_index": rows.key["sample_index"],
        "data_source": ["ratchet/word-problems"] * rows.count,
        "prompt_token_ids": rows.prompts,
        "completion_token_ids": rows.completions,
        "completion": rows.texts,
        "finish_reason": ["length"] * rows.count,
        "reward": rows.random.integers(0, 2, rows.count).astype(float),
        "extracted": [str(number) for number in rows.random.integers(0, 1000, rows.count)],
        "is_parseable": [True] * rows.count,
    }
    return pa.table(columns, schema=schemas.EVALUATIONS)


def _offline_evaluation(count: int) -> pa.Table:
    numbers = np.random.default_rng(0).normal(size=(3, count))
    columns = {
        "example_id": [f"val-{row:07d}" for row in range(count)],
        "data_source": [""] * count,
        "loss": numbers[0],
        "num_tokens": [100] * count,
        "margin": numbers[1],
        "accuracy": (numbers[2] > 0).astype(float),
    }
    return pa.table(columns, schema=schemas.EVALUATIONS_OFFLINE)


def _score_table(lengths: Sequence[int]) -> pa.Table:
    random = np.random.default_rng(0)
    columns = {
        "group_id": [f"000001/train-{row // 2:07d}" for row in range(len(lengths))],
        "sample_index": [row % 2 for row in range(len(lengths))],
        "reference_log_probs": [random.normal(size=length).astype(np.float32) for length in lengths],
    }
    return pa.table(columns, schema=schemas.scores("reference"))


def _scaled(make: Callable[[int], Any], rows: int) -> int:
    """Return the bytes of a table of `rows` rows: made, or drawn out along a line."""
    if rows <= _MOST_ROWS:
        return len(to_bytes(make(rows)))
    half, whole = (len(to_bytes(make(count))) for count in (_MOST_ROWS // 2, _MOST_ROWS))
    per_row = (whole - half) / (_MOST_ROWS - _MOST_ROWS // 2)
    return round(whole + per_row * (rows - _MOST_ROWS))


def _names(config: RunConfig) -> set[str]:
    """Return the tables that a step of this config commits."""
    names = {"rollouts", "rewards", "trajectories"}
    if "greedy_rewards" in config.advantage_needs:
        names |= {"greedy_rollouts", "greedy_rewards"}
    if config.algorithm.filter_groups.enable:
        names.add("graded")
    if config.policy_scores_are_needed:
        names.add("policy_scores")
    if config.reference_is_needed:
        names.add("reference_scores")
    if config.critic_is_needed:
        names.add("values")
    correction = config.algorithm.rollout_correction
    if correction.rollout_is is not None and not correction.bypass_mode:
        names.add("importance_weights")
    return names


_Make = Callable[[_Rows], pa.Table]
_MAKERS: dict[str, _Make] = {
    "rollouts": _rollouts,
    "greedy_rollouts": _rollouts,
    "graded": _rewards,
    "rewards": _rewards,
    "greedy_rewards": _rewards,
    "policy_scores": _column(schemas.scores("policy")),
    "reference_scores": _column(schemas.scores("reference")),
    "values": _column(schemas.VALUES),
    "trajectories": _trajectories,
    "importance_weights": _column(schemas.IMPORTANCE_WEIGHTS),
}
