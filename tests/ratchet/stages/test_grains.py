"""The same run at every grain: artifacts of equal content, in whatever processes they were made."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.data import schemas
from ratchet.data.parquet import read_table
from ratchet.stages.graph import step_stages
from tests.runs import content_digests, manifests, tiny_config, train_tiny, write_problems

KL_IN_LOSS = {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_coef": 0.1}
KL_IN_REWARD = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.1}
RESCORED = {"algorithm.rollout_correction.bypass_mode": False}
NO_WEIGHT = {**KL_IN_LOSS, "actor_rollout_ref.actor.kl_loss_coef": 0.0}


@pytest.mark.parametrize(
    ("overrides", "stages"),
    [
        ({}, ["rollout", "reward", "advantage", "policy_update"]),
        (NO_WEIGHT, ["rollout", "reward", "advantage", "policy_update"]),
        (KL_IN_LOSS, ["rollout", "reward", "advantage", "reference_scores", "policy_update"]),
        (KL_IN_REWARD, ["rollout", "reward", "reference_scores", "advantage", "policy_update"]),
        (RESCORED, ["rollout", "reward", "policy_scores", "advantage", "policy_update"]),
        (
            {**KL_IN_LOSS, **RESCORED},
            ["rollout", "reward", "policy_scores", "advantage", "reference_scores", "policy_update"],
        ),
    ],
)
def test_a_step_has_the_stages_that_its_update_needs_each_after_those_it_reads(
    overrides: dict[str, Any], stages: list[str]
) -> None:
    assert [stage.name for stage in step_stages(tiny_config("model", "data", **overrides))] == stages


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="plain"),
        pytest.param(KL_IN_LOSS, id="kl in the loss"),
        pytest.param(KL_IN_REWARD, id="kl in the reward"),
        pytest.param(RESCORED, id="policy scores"),
        pytest.param({"actor_rollout_ref.actor.ppo_mini_batch_size": 1, "actor_rollout_ref.actor.ppo_epochs": 2,
                      "actor_rollout_ref.actor.shuffle": True}, id="mini-batches"),
        pytest.param({"actor_rollout_ref.rollout.dtype": "bfloat16"}, id="bfloat16 policy"),
    ],
)  # fmt: skip
def test_every_grain_commits_artifacts_of_equal_content(
    tmp_path: Path, tiny_model: Path, overrides: dict[str, Any]
) -> None:
    problems = write_problems(tmp_path / "problems.jsonl")
    digests = {}
    for grain, state_freq in (("segment", 2), ("step", 1), ("stage", 1)):
        how = {"trainer.grain": grain, "trainer.trainer_state_freq": state_freq, "trainer.test_freq": 2}
        config = tiny_config(tiny_model, problems, **{"data.val_files": str(problems), **how, **overrides})
        run = train_tiny(tmp_path, grain, config)
        digests[grain] = content_digests(run)
    assert digests["segment"] == digests["step"] == digests["stage"]

    found = manifests(run)
    expected = {f"{step}/{stage.name}" for step in (1, 2, 3) for stage in step_stages(config)}
    expected |= {"data/train", "data/val", "0/policy_update", "3/checkpoint_export"}
    assert set(found) == expected | {f"{step}/evaluate" for step in (0, 2, 3)}
    policies = [found[f"{step}/policy_update"].content.outputs["policy"] for step in range(4)]
    assert len(set(policies)) == 4, "an update that moves nothing would make the comparison above worthless"


def test_a_run_in_short_segments_is_the_run_in_a_long_one(tmp_path: Path, tiny_model: Path) -> None:
    problems = write_problems(tmp_path / "problems.jsonl")
    short = tiny_config(tiny_model, problems, **{"trainer.steps_per_segment": 1, "trainer.total_training_steps": 4})
    long = tiny_config(tiny_model, problems, **{"trainer.steps_per_segment": 9, "trainer.total_training_steps": 4})
    assert content_digests(train_tiny(tmp_path, "short", short)) == content_digests(train_tiny(tmp_path, "long", long))


def test_steps_follow_from_the_epochs_and_the_last_batch_is_smaller(tmp_path: Path, tiny_model: Path) -> None:
    problems = write_problems(tmp_path / "problems.jsonl", 3)
    config = tiny_config(
        tiny_model, problems, **{"trainer.total_training_steps": None, "trainer.total_epochs": 2, "data.shuffle": False}
    )
    run = train_tiny(tmp_path, "epochs", config)
    assert run.steps() == [0, 1, 2, 3, 4]
    asked = []
    for step in (1, 2, 3, 4):
        rollouts = read_table(run.store, run.require("rollout", step).output("rollouts"), schemas.ROLLOUTS).to_pylist()
        asked.append([(int(row["prompt_id"][-1]), row["sample_index"]) for row in rollouts])
    assert asked == [[(0, 0), (0, 1), (1, 0), (1, 1)], [(2, 0), (2, 1)]] * 2
    assert [run.require("policy_update", step).provenance.metrics["training/epoch"] for step in (1, 2, 3, 4)] == [
        0, 0, 1, 1,
    ]  # fmt: skip


def test_the_manifests_of_a_step_name_what_they_were_made_from(tmp_path: Path, tiny_model: Path) -> None:
    config = tiny_config(tiny_model, write_problems(tmp_path / "problems.jsonl"), **KL_IN_LOSS)
    found = manifests(train_tiny(tmp_path, "chain", config))
    update, before = found["2/policy_update"], found["1/policy_update"]
    assert update.content.policy_version == 2
    assert found["2/rollout"].content.policy_version == 1
    assert update.content.inputs == {
        "policy": before.content.outputs["policy"],
        "rollouts": found["2/rollout"].content.outputs["rollouts"],
        "trajectories": found["2/advantage"].content.outputs["trajectories"],
        "reference_scores": found["2/reference_scores"].content.outputs["reference_scores"],
    }
    assert found["2/reference_scores"].content.inputs["policy"] == found["0/policy_update"].content.outputs["policy"]
    assert update.provenance.previous == {
        "step-000001/policy_update": before.sha256,
        **{
            f"step-000002/{stage}": found[f"2/{stage}"].sha256 for stage in ("rollout", "advantage", "reference_scores")
        },
    }
