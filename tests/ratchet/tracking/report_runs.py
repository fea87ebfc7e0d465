"""Runs for reports: manifests with the metrics of a training that works, and a few tables that many steps share."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.data import schemas
from ratchet.data.parquet import table_from_rows, write_table
from ratchet.store import layout
from ratchet.store.manifest import Artifact, Content, Manifest, Provenance
from ratchet.store.run import Run

BEGAN = 1_790_000_000.0
STEP_SECONDS = 30.0
PROMPTS = 16
GROUP = 16
HOSTILE = "</script><script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\"> $$x$$ @{c0}"
"""What a completion, a reward's part and an error message may be called."""


def new_run(root: str, run_id: str = "gsm8k-grpo") -> Run:
    """A claimed run of one submission."""
    run = Run(root, run_id)
    run.create_or_check({"trainer": {"seed": 7}})
    run.claim(submission(total=100))
    return run


def submission(*, total: int, submission_id: str | None = "6f0c-1") -> dict[str, Any]:
    """What a pod of a pipeline submits, as far as a report reads it."""
    config = {
        "actor_rollout_ref": {"model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"}},
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": {"seed": 7, "total_training_steps": total},
        "promotion": {"name": ""},
    }
    return {
        "submission_id": submission_id,
        "config": config,
        "grain": "segment",
        "version": "1.0",
        "image": "ratchet:1",
    }


def put(
    run: Run,
    stage: str,
    step: int | None,
    *,
    metrics: Mapping[str, float],
    artifacts: Mapping[str, Artifact],
    seconds: float = 5.0,
    after: float = 0.0,
) -> Manifest:
    """Put a manifest as a commit would leave it; `after` are seconds from the step's beginning."""
    started = BEGAN + (step or 0) * STEP_SECONDS + after
    content = Content(
        step=step,
        stage=stage,
        policy_version=step,
        inputs={},
        outputs={role: artifact.digest for role, artifact in artifacts.items()},
        config="c" * 64,
    )
    provenance = Provenance(
        run_id=run.run_id,
        attempt=run.new_attempt(),
        epoch=run.check_ownership().epoch,
        artifacts=dict(artifacts),
        previous={},
        started=started,
        ended=started + seconds,
        device="NVIDIA H200",
        gpu_seconds=seconds,
        code_revision="cc71af4a4e64b1a6",
        image="registry.example.org/ratchet-segment:1",
        metrics=dict(metrics),
    )
    manifest = Manifest(content=content, provenance=provenance)
    run.store.put(layout.manifest(stage, step), manifest.to_json())
    return manifest


def put_prompts(run: Run) -> None:
    """Training and held-out prompts."""
    for split in ("train", "val"):
        rows = [
            {
                "prompt_id": f"{split}-{number:07d}",
                "data_source": "openai/gsm8k",
                "prompt": [
                    {"role": "user", "content": f"Ann has {number} pears and buys {number + 1} more. How many?"}
                ],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(2 * number + 1)},
                "extra_info": "{}",
            }
            for number in range(PROMPTS)
        ]
        artifact = write_table(run.store, f"data/{split}/0001-aa/prompts", table_from_rows(rows, schemas.PROMPTS))
        put(run, f"preprocess/{split}", None, metrics={}, artifacts={"prompts": artifact})


def graded_tables(run: Run, folder: str, rewards: Sequence[Sequence[float]]) -> dict[str, Artifact]:
    """Rollouts and rewards of prompts 0, 1, ..: a reward for each completion; NaN stands for one without an answer."""
    rollouts, graded = [], []
    for number, group in enumerate(rewards):
        for sample, reward in enumerate(group):
            key = {"group_id": f"{folder}/train-{number:07d}", "sample_index": sample}
            is_read = not math.isnan(reward)
            text = f"She has {2 * number + 1 if reward == 1 else 9} pears.\n#### {2 * number + 1 if reward == 1 else 9}"
            rollouts.append(
                {
                    **key,
                    "prompt_id": f"train-{number:07d}",
                    "prompt_token_ids": [1, 2],
                    "completion_token_ids": [3] * 60,
                    "completion": text if is_read else f"pears and {HOSTILE} and pears",
                    "sampler_log_probs": [-0.1] * 60,
                    "finish_reason": "stop" if is_read else "length",
                    "policy_version": 0,
                    "seed": 1,
                }
            )
            score = reward if is_read else 0.0
            graded.append(
                {
                    **key,
                    "reward": score,
                    "reward_breakdown": {"answer": score, f"format {HOSTILE}": 0.5},
                    "extracted": str(2 * number + 1 if reward == 1 else 9) if is_read else None,
                    "is_parseable": is_read,
                    "error": None if is_read else f"no answer {HOSTILE}",
                }
            )
    return {
        "rollouts": write_table(run.store, f"{folder}/rollouts", table_from_rows(rollouts, schemas.ROLLOUTS)),
        "rewards": write_table(run.store, f"{folder}/rewards", table_from_rows(graded, schemas.REWARDS)),
    }


def evaluation_table(run: Run, folder: str, rewards: Sequence[float]) -> dict[str, Artifact]:
    """One completion for each held-out prompt 0, 1, .. with its reward."""
    rows = [
        {
            "prompt_id": f"val-{number:07d}",
            "sample_index": 0,
            "data_source": "openai/gsm8k",
            "prompt_token_ids": [1],
            "completion_token_ids": [2],
            "completion": f"held out {number}: reward {reward:g}",
            "finish_reason": "stop",
            "reward": reward,
            "extracted": "1",
            "is_parseable": True,
        }
        for number, reward in enumerate(rewards)
    ]
    return {"evaluations": write_table(run.store, folder, table_from_rows(rows, schemas.EVALUATIONS))}


def learning_run(root: str, steps: int) -> Run:
    """A run of `steps` steps of 256 rollouts whose reward rises from 0.1 to 0.7, evaluated every tenth of them."""
    run, noise = new_run(root), random.Random(7)
    put_prompts(run)
    dice = [[1.0 if noise.random() < 0.2 else 0.0 for _ in range(GROUP)] for _ in range(PROMPTS)]
    dice[3][5] = math.nan
    early = graded_tables(run, "step-000001/rollout/0001-aa", dice)
    sharp = [[1.0 if noise.random() < 0.7 else 0.0 for _ in range(GROUP)] for _ in range(PROMPTS)]
    sharp[2][1] = math.nan
    late = graded_tables(run, f"step-{max(steps // 2, 2):06d}/rollout/0001-bb", sharp)
    policy = {"policy": early["rollouts"]}
    for step in range(steps + 1):
        share = step / steps
        if step % max(steps // 10, 1) == 0:
            right = round(PROMPTS * (0.2 + 0.5 * share))
            rewards = [1.0 if number < right else 0.0 for number in range(PROMPTS)]
            accuracy = right / PROMPTS
            metrics = {
                "val-core/openai/gsm8k/acc/mean@1": accuracy,
                "val-aux/openai/gsm8k/acc/ci95_low@1": accuracy - 0.1,
                "val-aux/openai/gsm8k/acc/ci95_high@1": accuracy + 0.1,
                "timing_s/testing": 9.0,
            }
            tables = evaluation_table(run, f"step-{step:06d}/evaluate/0001-aa/evaluations", rewards)
            put(run, "evaluate", step, metrics=metrics, artifacts=tables, after=22.0)
        if step:
            _put_step(run, step, share, noise, early if step < steps / 2 else late, policy)
    return run


def _put_step(
    run: Run, step: int, share: float, noise: random.Random, tables: Mapping[str, Artifact], policy: dict[str, Artifact]
) -> None:
    reward = 0.1 + 0.6 * share + noise.gauss(0, 0.03)
    length = 180 - 60 * share + noise.gauss(0, 6)
    stages: dict[str, dict[str, float]] = {
        "rollout": {
            "response_length/mean": length,
            "response_length/min": length / 3,
            "response_length/max": min(length * 2.2, 256),
            "response_length/clip_ratio": 0.1 * (1 - share),
            "timing_s/gen": 9 - 2 * share + noise.random(),
            "training/probe_log_prob_diff": 0.002 + 0.001 * noise.random(),
        },
        "reward": {
            "critic/score/mean": reward,
            "reward/parseable_ratio": min(1.0, 0.6 + 0.4 * share + 0.02 * noise.random()),
            "reward/answer/mean": reward,
            f"reward/format {HOSTILE}/mean": 0.5,
            "timing_s/reward": 0.2,
        },
        "advantage": {"critic/constant_groups_ratio": 0.2 + 0.3 * share, "timing_s/adv": 0.1},
        "policy_update": {
            "actor/pg_loss": 0.02 * noise.gauss(0, 1),
            "actor/entropy": 0.6 - 0.4 * share + 0.01 * noise.random(),
            "actor/ppo_kl": 0.0005 * noise.random(),
            "actor/kl_loss": 0.02 * share,
            "actor/pg_clipfrac": 0.01 + 0.01 * noise.random(),
            "actor/pg_clipfrac_lower": 0.001 * noise.random(),
            "actor/grad_norm": 0.5 + 0.3 * noise.random(),
            "actor/lr": 1e-6,
            "training/rollout_probs_diff_mean": 0.004 + 0.002 * noise.random(),
            "training/rollout_probs_diff_max": 0.2 + 0.1 * noise.random(),
            "timing_s/update_actor": 7 + noise.random(),
            "timing_s/step": 18.0,
            "perf/throughput": 9000 + 1500 * share + 300 * noise.random(),
            "perf/total_num_tokens": 80000.0,
        },
    }
    artifacts = {
        "rollout": {"rollouts": tables["rollouts"]},
        "reward": {"rewards": tables["rewards"]},
        "policy_update": policy,
    }
    for place, (stage, metrics) in enumerate(stages.items()):
        put(run, stage, step, metrics=metrics, artifacts=artifacts.get(stage, {}), after=5.0 * place)
