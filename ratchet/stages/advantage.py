"""From rewards to advantages: everything that the update needs to know of a rollout beside its tokens."""

from typing import Any

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.join import align
from ratchet.data.parquet import read_table, table_from_rows, write_table
from ratchet.errors import DataError, NumericsError
from ratchet.stages.base import Context, Input, Result, Stage, step_inputs
from ratchet.store.run import Run
from ratchet.tracking.metrics import summary


class Advantage(Stage):
    """Group-relative advantages (GRPO, arXiv:2402.03300): one number a completion, the same for each of its tokens."""

    name = "advantage"
    timing = "adv"
    config_keys = ("algorithm", "actor_rollout_ref.actor.use_kl_loss")

    def needs(self, config: RunConfig) -> tuple[str, ...]:
        scores = []
        if config.reference_is_needed and config.algorithm.use_kl_in_reward:
            scores.append("reference_scores")
        if config.policy_scores_are_needed:
            scores.append("policy_scores")
        return ("rollout", "reward", *scores)

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        return step_inputs(run, self.needs(config), step)

    def compute(self, context: Context) -> Result:
        import torch

        from ratchet.algorithms.advantage import group_statistics, grpo_advantages

        algorithm = context.config.algorithm
        rows = _joined(context)
        token_rewards = [_token_rewards(row, context.config) for row in rows]
        # An empty completion has no token to carry its reward, but it is a member of its group all the same.
        totals = [sum(values) if values else row["reward"] for values, row in zip(token_rewards, rows, strict=True)]
        for row, total in zip(rows, totals, strict=True):
            if not abs(total) < float("inf"):
                raise NumericsError(f"rollout {row['group_id']}, sample {row['sample_index']}: the reward is {total}")
        groups: dict[str, int] = {}
        group_index = torch.tensor([groups.setdefault(row["group_id"], len(groups)) for row in rows])
        rewards = torch.tensor(totals, dtype=torch.float64)
        advantages = grpo_advantages(rewards, group_index, norm_by_std=algorithm.norm_adv_by_std_in_grpo).tolist()
        mean, std, size = (values.tolist() for values in group_statistics(rewards, group_index))
        finished = []
        for index, row in enumerate(rows):
            length = len(row["completion_token_ids"])
            is_masked = algorithm.mask_truncated_completions and row["finish_reason"] == "length"
            finished.append(
                {
                    "group_id": row["group_id"],
                    "sample_index": row["sample_index"],
                    "advantages": [advantages[index]] * length,
                    "returns": [advantages[index]] * length,
                    "token_rewards": token_rewards[index],
                    "loss_mask": [not is_masked] * length,
                    "behaviour_log_probs": row["behaviour_log_probs"],
                    "behaviour_source": row["behaviour_source"],
                    "group_reward_mean": mean[index],
                    "group_reward_std": std[index],
                    "group_size": int(size[index]),
                }
            )
        artifact = write_table(
            context.store, f"{context.folder}/trajectories", table_from_rows(finished, schemas.TRAJECTORIES)
        )
        metrics = {
            **summary("critic/rewards", totals),
            **summary("critic/advantages", advantages),
            **summary("critic/returns", advantages),
            "critic/constant_groups_ratio": _constant_groups_ratio(rows, totals),
        }
        policy_version = context.inputs["rollouts"].manifest.content.policy_version
        return Result(outputs={"trajectories": artifact}, policy_version=policy_version, metrics=metrics)


def _joined(context: Context) -> list[dict[str, Any]]:
    """Rollouts with their reward, behaviour log-probs and (where the reward needs them) reference log-probs."""
    store, inputs = context.run.store, context.inputs
    rollouts = read_table(store, inputs["rollouts"].artifact, schemas.ROLLOUTS)
    rewards = align(rollouts, read_table(store, inputs["rewards"].artifact, schemas.REWARDS), "rewards")
    rows: list[dict[str, Any]] = rollouts.to_pylist()
    for row, reward in zip(rows, rewards, strict=True):
        row["reward"] = reward["reward"]
        row["behaviour_log_probs"], row["behaviour_source"] = row["sampler_log_probs"], "sampler"
    for role in ("policy", "reference"):
        if f"{role}_scores" in inputs:
            table = read_table(store, inputs[f"{role}_scores"].artifact, schemas.scores(role))
            for row, scores in zip(rows, align(rollouts, table, f"{role}_scores"), strict=True):
                row[f"{role}_log_probs"] = scores[f"{role}_log_probs"]
    for row in rows:
        if "policy_log_probs" in row:
            row["behaviour_log_probs"], row["behaviour_source"] = row["policy_log_probs"], "policy"
        if row["behaviour_log_probs"] is None:
            raise DataError(
                f"rollout {row['group_id']}, sample {row['sample_index']} has no sampler_log_probs; "
                "set algorithm.rollout_correction.bypass_mode=false to score it with the policy"
            )
    return rows


def _token_rewards(row: dict[str, Any], config: RunConfig) -> list[float]:
    """The reward on the last token, minus the KL penalty on every token where it is in the reward."""
    length = len(row["completion_token_ids"])
    values = [0.0] * length
    if length:
        values[-1] = row["reward"]
    if "reference_log_probs" in row and length:
        import torch

        from ratchet.algorithms.kl import kl_estimate

        behaviour = torch.tensor(row["behaviour_log_probs"], dtype=torch.float64)
        reference = torch.tensor(row["reference_log_probs"], dtype=torch.float64)
        penalty = kl_estimate(behaviour, reference, config.algorithm.kl_penalty) * config.algorithm.kl_ctrl.kl_coef
        values = [value - float(kl) for value, kl in zip(values, penalty, strict=True)]
    return values


def _constant_groups_ratio(rows: list[dict[str, Any]], totals: list[float]) -> float:
    groups: dict[str, set[float]] = {}
    for row, total in zip(rows, totals, strict=True):
        groups.setdefault(row["group_id"], set()).add(total)
    return sum(len(values) == 1 for values in groups.values()) / len(groups)
