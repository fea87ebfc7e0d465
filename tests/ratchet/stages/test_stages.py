"""Each stage on what a run can meet: rows that cannot be graded, completions without tokens, groups of one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ratchet.data import schemas
from ratchet.data.parquet import read_table
from ratchet.engines.sampler import Completion
from ratchet.errors import CommitConflictError, ConfigError, DataError, EngineError, NumericsError
from ratchet.grains import loop
from ratchet.grains.entry import replay_stage
from ratchet.grains.session import open_session, submit
from ratchet.stages.graph import step_stages
from ratchet.store.run import POLICY_UPDATE, Run
from tests.runs import (
    CUT,
    EMPTY,
    RIGHT,
    WRONG,
    ScriptedSampler,
    one_step_config,
    prepared,
    table_rows,
    tiny_config,
    train_tiny,
    use_sampler,
    write_problems,
)


def _policy_is_unmoved(run: Run) -> bool:
    def weights(step: int) -> dict[str, torch.Tensor]:
        folder = Path(run.uri) / run.require(POLICY_UPDATE, step).output("policy").folder
        return load_file(folder / "model.safetensors")

    before, after = weights(0), weights(1)
    return all(torch.equal(before[name], tensor) for name, tensor in after.items())


# -- preprocess ------------------------------------------------------------------------------------------------------


def test_prompts_over_the_limit_are_left_out_and_counted_and_keep_their_numbers(
    tmp_path: Path, tiny_model: Path
) -> None:
    short, long = write_problems(tmp_path / "short.jsonl", 2), write_problems(tmp_path / "long.jsonl", 1, words=300)
    lines = short.read_text().splitlines()
    (tmp_path / "mixed.jsonl").write_text("\n".join([lines[0], long.read_text().strip(), lines[1], lines[0]]))
    with prepared(tmp_path, one_step_config(tiny_model, tmp_path / "mixed.jsonl")) as session:
        manifest = session.store_run.require("preprocess/train", None)
        prompts = read_table(session.store_run.store, manifest.output("prompts"), schemas.PROMPTS)
    assert prompts["prompt_id"].to_pylist() == ["train-0000000", "train-0000002", "train-0000003"]
    assert manifest.provenance.metrics == {
        "data/train/num_prompts": 3.0,
        "data/train/num_overlong_prompts": 1.0,
        "data/train/num_duplicate_prompts": 1.0,
    }


def test_prompts_over_the_limit_are_refused_with_the_row_and_the_way_out(tmp_path: Path, tiny_model: Path) -> None:
    problems = write_problems(tmp_path / "problems.jsonl", 2, words=300)
    config = one_step_config(tiny_model, problems, **{"data.filter_overlong_prompts": False})
    with (
        pytest.raises(DataError, match=r"2 of 2 prompts .*max_prompt_length=256 .* row 0 with \d+\. Raise"),
        prepared(tmp_path, config),
    ):
        pass
    everything = one_step_config(tiny_model, problems)
    with pytest.raises(DataError, match="no train prompt is left"), prepared(tmp_path / "other", everything):
        pass


def test_only_the_first_prompts_are_used_where_so_many_are_asked_for(tmp_path: Path, tiny_model: Path) -> None:
    problems = write_problems(tmp_path / "problems.jsonl", 5)
    limits = {"data.train_max_samples": 3, "data.val_files": str(problems), "data.val_max_samples": 1}
    with prepared(tmp_path, one_step_config(tiny_model, problems, **limits)) as session:
        run = session.store_run
        assert [run.require(f"preprocess/{split}", None).output("prompts").rows for split in ("train", "val")] == [3, 1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "How many?", "data_source": "openai/gsm8k"}, "line 1: no ground truth"),
        ({"question": "How many?"}, "line 1: no column 'answer'"),
        ({"prompt": "How many?", "answer": "4", "data_source": "mine/own"}, "no reward function .*'mine/own'"),
    ],
)
def test_rows_that_could_never_be_graded_are_refused_before_anything_is_sampled(
    tmp_path: Path, tiny_model: Path, row: dict[str, str], message: str
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps(row))
    with pytest.raises(DataError, match=message), prepared(tmp_path, one_step_config(tiny_model, source)):
        pass


def test_a_data_source_can_be_given_to_rows_that_name_none(tmp_path: Path, tiny_model: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"ask": "How many?", "answer": "4"}))
    names = {"data.prompt_key": "ask", "data.data_source": "openai/gsm8k"}
    with prepared(tmp_path, one_step_config(tiny_model, source, **names)) as session:
        run = session.store_run
        artifact = run.require("preprocess/train", None).output("prompts")
        (row,) = read_table(run.store, artifact, schemas.PROMPTS).to_pylist()
    assert row["data_source"] == "openai/gsm8k"
    assert row["prompt"] == [{"role": "user", "content": "How many?"}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "4"}


# -- the model -------------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_used_is_named(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with (
        pytest.raises(EngineError, match="bare' has no tokenizer"),
        prepared(tmp_path, one_step_config(bare, problems)),
    ):
        pass
    absent = tmp_path / "absent"
    with (
        pytest.raises(EngineError, match="absent' does not exist"),
        prepared(tmp_path / "other", one_step_config(absent, problems)),
    ):
        pass


@pytest.mark.parametrize(
    ("damaged", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer in .* cannot be loaded"),
        ("chat_template.jinja", "", "has no chat template"),
    ],
)
def test_a_model_that_cannot_be_prompted_never_becomes_the_runs_policy(
    tmp_path: Path, tiny_model: Path, problems: Path, damaged: str, content: str, message: str
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / damaged).write_text(content)
    with pytest.raises(EngineError, match=message), prepared(tmp_path, one_step_config(folder, problems)):
        pass
    assert Run(str(tmp_path), "run").manifest(POLICY_UPDATE, 0) is None


@pytest.mark.parametrize("key", ["actor_rollout_ref.model.path", "data.train_files"])
def test_a_run_without_model_or_prompts_is_not_created(
    tmp_path: Path, tiny_model: Path, problems: Path, key: str
) -> None:
    with pytest.raises(ConfigError, match=f"{key} is not set"):
        submit(str(tmp_path / "runs"), "run", one_step_config(tiny_model, problems, **{key: ""}))
    assert not (tmp_path / "runs" / "run").exists()


def test_a_run_of_this_process_is_not_created_for_a_model_or_prompts_that_are_not_here(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    root = tmp_path / "runs"
    with pytest.raises(EngineError, match="does not exist"):
        submit(str(root), "run", one_step_config(tmp_path / "absent", problems))
    with pytest.raises(DataError, match="no such file"):
        submit(str(root), "run", one_step_config(tiny_model, tmp_path / "absent.jsonl"))
    with pytest.raises(DataError, match="no such file"):
        submit(str(root), "run", one_step_config(tiny_model, problems, **{"data.val_files": "/absent"}))
    assert not (root / "run").exists()


def test_a_second_copy_of_the_weights_beside_the_model_is_not_stored(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    index = {"weight_map": dict.fromkeys(load_file(model / "model.safetensors"), "model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copyfile(model / "model.safetensors", model / "consolidated.safetensors")
    with prepared(tmp_path, one_step_config(model, problems)) as session:
        files = session.store_run.require(POLICY_UPDATE, 0).output("policy").files
        loop.run_step(session, 1)
    names = {entry.path for entry in files}
    assert "consolidated.safetensors" not in names
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= names


# -- rollout ---------------------------------------------------------------------------------------------------------


def test_a_batch_larger_than_the_data_is_refused_with_both_numbers(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    config = one_step_config(tiny_model, problems, **{"data.train_batch_size": 2})
    with pytest.raises(ConfigError, match="is 2, but the run has 1 training"):
        submit(str(tmp_path), "run", config)
    # The mistake did not take the run id.
    assert Run(str(tmp_path), "run").newest_epoch() == 0


def test_a_sampler_that_loses_a_request_is_refused(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    class Forgetful(ScriptedSampler):
        def sample(self, requests: Any, params: Any) -> list[Completion]:
            return super().sample(requests, params)[1:]

    with prepared(tmp_path, one_step_config(tiny_model, problems)) as session:
        use_sampler(session, Forgetful([RIGHT]))
        with pytest.raises(EngineError, match="returned 1 completions for 2 requests"):
            loop.run_step(session, 1)


def test_rollout_metrics_have_verls_names(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    with prepared(tmp_path, one_step_config(tiny_model, problems), RIGHT, CUT) as session:
        loop.run_step(session, 1)
        metrics = session.store_run.require("rollout", 1).provenance.metrics
    assert metrics["response_length/mean"] == 4.5
    assert (metrics["response_length/min"], metrics["response_length/max"]) == (3, 6)
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["timing_s/gen"] > 0


# -- reward ----------------------------------------------------------------------------------------------------------


def test_rewards_are_joined_to_their_prompts_by_key(tmp_path: Path, tiny_model: Path) -> None:
    problems = write_problems(tmp_path / "problems.jsonl", 4)
    config = one_step_config(tiny_model, problems, **{"data.train_batch_size": 4, "actor_rollout_ref.rollout.n": 1})
    truths = {f"train-{number:07d}": str(2 * number + 1) for number in range(4)}
    with prepared(tmp_path, config, RIGHT) as session:
        loop.run_step(session, 1)
        rewards = table_rows(session.store_run, "reward", "rewards", schemas.REWARDS)
    graded = {row["group_id"].split("/")[1]: row["reward"] for row in rewards}
    assert graded == {prompt_id: float(truth == "1") for prompt_id, truth in truths.items()}


def test_a_wrong_answer_is_told_apart_from_none(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    config = one_step_config(tiny_model, problems, **{"actor_rollout_ref.rollout.n": 4})
    with prepared(tmp_path, config, RIGHT, WRONG, CUT, EMPTY) as session:
        loop.run_step(session, 1)
        rows = table_rows(session.store_run, "reward", "rewards", schemas.REWARDS)
        metrics = session.store_run.require("reward", 1).provenance.metrics
    assert [(row["reward"], row["is_parseable"], row["extracted"]) for row in rows] == [
        (1.0, True, "1"),
        (0.0, True, "8"),
        (0.0, False, None),
        (0.0, False, None),
    ]
    assert metrics["critic/score/mean"] == 0.25
    assert metrics["reward/parseable_ratio"] == 0.5


def test_a_reward_that_is_not_finite_is_refused_with_its_row(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return float('nan')\n"
    )
    config = one_step_config(tiny_model, problems, **{"custom_reward_function.path": str(tmp_path / "mine.py")})
    with (
        prepared(tmp_path, config, RIGHT) as session,
        pytest.raises(NumericsError, match=r"rollout 000001/train-0000000, sample 0.*the reward is nan"),
    ):
        loop.run_step(session, 1)


# -- advantage and update --------------------------------------------------------------------------------------------


def test_advantages_are_those_of_the_group_on_every_token(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    config = one_step_config(tiny_model, problems, **{"actor_rollout_ref.rollout.n": 4})
    with prepared(tmp_path, config, RIGHT, WRONG, CUT, EMPTY) as session:
        loop.run_step(session, 1)
        rows = table_rows(session.store_run, "advantage", "trajectories", schemas.TRAJECTORIES)
        metrics = session.store_run.require("advantage", 1).provenance.metrics
    # Rewards 1, 0, 0, 0: mean 1/4, standard deviation (n - 1) 1/2.
    assert rows[0]["advantages"] == pytest.approx([1.5, 1.5, 1.5], rel=1e-4)
    assert rows[1]["advantages"] == pytest.approx([-0.5, -0.5, -0.5], rel=1e-4)
    assert rows[0]["token_rewards"] == [0.0, 0.0, 1.0]
    assert [len(row["advantages"]) for row in rows] == [3, 3, 6, 0]
    assert all(row["loss_mask"] == [True] * len(row["advantages"]) for row in rows)
    assert rows[2]["behaviour_log_probs"] == [-2.0] * 6
    assert {row["behaviour_source"] for row in rows} == {"sampler"}
    assert [row["group_reward_mean"] for row in rows] == [0.25] * 4
    assert [row["group_reward_std"] for row in rows] == pytest.approx([0.5] * 4)
    assert [row["group_size"] for row in rows] == [4] * 4
    assert metrics["critic/constant_groups_ratio"] == 0.0


def test_without_division_by_the_deviation_advantages_are_differences(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    config = one_step_config(tiny_model, problems, **{"algorithm.norm_adv_by_std_in_grpo": False})
    with prepared(tmp_path, config, RIGHT, WRONG) as session:
        loop.run_step(session, 1)
        rows = table_rows(session.store_run, "advantage", "trajectories", schemas.TRAJECTORIES)
    assert [row["advantages"] for row in rows] == [[0.5] * 3, [-0.5] * 3]


def test_a_penalty_in_the_reward_lowers_each_token_by_its_divergence(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    penalty = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.5}
    with prepared(tmp_path, one_step_config(tiny_model, problems, **penalty), RIGHT, EMPTY) as session:
        loop.run_step(session, 1)
        run = session.store_run
        rows = table_rows(run, "advantage", "trajectories", schemas.TRAJECTORIES)
        reference = table_rows(run, "reference_scores", "reference_scores", schemas.scores("reference"))
    assert RIGHT.log_probs is not None
    kl = [own - other for own, other in zip(RIGHT.log_probs, reference[0]["reference_log_probs"], strict=True)]
    expected = [-0.5 * kl[0], -0.5 * kl[1], 1.0 - 0.5 * kl[2]]
    assert rows[0]["token_rewards"] == pytest.approx(expected, abs=1e-5)
    assert rows[0]["group_reward_mean"] == pytest.approx((sum(expected) + 0.0) / 2, abs=1e-5)
    assert rows[1]["token_rewards"] == []


@pytest.mark.parametrize("overrides", [{}, {"algorithm.rollout_correction.bypass_mode": False},
                                       {"actor_rollout_ref.actor.use_kl_loss": True}])  # fmt: skip
def test_empty_completions_train_nothing_and_break_nothing(
    tmp_path: Path, tiny_model: Path, problems: Path, overrides: dict[str, Any]
) -> None:
    with prepared(tmp_path, one_step_config(tiny_model, problems, **overrides), EMPTY) as session:
        loop.run_step(session, 1)
        run = session.store_run
    assert _policy_is_unmoved(run)
    assert run.require(POLICY_UPDATE, 1).provenance.metrics["actor/skipped_mini_batches"] == 1.0


def test_truncated_completions_are_left_out_of_the_loss_where_that_is_asked_for(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    masked = one_step_config(tiny_model, problems, **{"algorithm.mask_truncated_completions": True})
    with prepared(tmp_path, masked, RIGHT, CUT) as session:
        loop.run_step(session, 1)
        rows = table_rows(session.store_run, "advantage", "trajectories", schemas.TRAJECTORIES)
        assert not _policy_is_unmoved(session.store_run)
    assert [row["loss_mask"] for row in rows] == [[True] * 3, [False] * 6]
    # It still counts in its group.
    assert rows[0]["group_reward_mean"] == 0.5
    with prepared(tmp_path / "all", masked, CUT) as session:
        loop.run_step(session, 1)
        assert _policy_is_unmoved(session.store_run)
    with prepared(tmp_path / "none", one_step_config(tiny_model, problems), CUT) as session:
        loop.run_step(session, 1)
        assert not _policy_is_unmoved(session.store_run)


def test_groups_of_one_have_no_advantage(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    alone = {"actor_rollout_ref.rollout.n": 1, "actor_rollout_ref.actor.entropy_coeff": 0.0}
    with prepared(tmp_path, one_step_config(tiny_model, problems, **alone), RIGHT) as session:
        loop.run_step(session, 1)
        run = session.store_run
    (row,) = table_rows(run, "advantage", "trajectories", schemas.TRAJECTORIES)
    assert (row["advantages"], row["group_size"], row["group_reward_std"]) == ([0.0] * 3, 1, 0.0)
    assert run.require("advantage", 1).provenance.metrics["critic/constant_groups_ratio"] == 1.0
    assert _policy_is_unmoved(run)


def test_completions_without_log_probs_need_the_policy_to_score_them(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    silent = Completion([60, 61, 2], None, "#### 1", "stop")
    with (
        prepared(tmp_path, one_step_config(tiny_model, problems), silent) as session,
        pytest.raises(DataError, match=r"sample 0 has no sampler_log_probs; .*bypass_mode=false"),
    ):
        loop.run_step(session, 1)
    scored = one_step_config(tiny_model, problems, **{"algorithm.rollout_correction.bypass_mode": False})
    with prepared(tmp_path / "scored", scored, silent) as session:
        loop.run_step(session, 1)
        rows = table_rows(session.store_run, "advantage", "trajectories", schemas.TRAJECTORIES)
        scores = table_rows(session.store_run, "policy_scores", "policy_scores", schemas.scores("policy"))
    assert [row["behaviour_source"] for row in rows] == ["policy"] * 2
    assert [row["behaviour_log_probs"] for row in rows] == [row["policy_log_probs"] for row in scores]


def test_policy_scores_of_what_the_policy_sampled_are_the_samplers_log_probs(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    config = one_step_config(tiny_model, problems, **{"algorithm.rollout_correction.bypass_mode": False})
    run = train_tiny(tmp_path, "run", config)
    rollouts = table_rows(run, "rollout", "rollouts", schemas.ROLLOUTS)
    scores = table_rows(run, "policy_scores", "policy_scores", schemas.scores("policy"))
    for row, score in zip(rollouts, scores, strict=True):
        assert score["policy_log_probs"] == pytest.approx(row["sampler_log_probs"], abs=1e-4)


def test_what_a_stage_is_committed_from_cannot_change_under_it(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    config = one_step_config(tiny_model, problems)
    run = train_tiny(tmp_path, "run", config)
    other = one_step_config(tiny_model, problems, **{"trainer.seed": 1, "reward_model.gsm8k_mode": "strict"})
    rollout, reward, *_ = step_stages(other)
    with open_session(run, other) as session:
        with pytest.raises(CommitConflictError, match="step-000001/rollout is committed with another configuration"):
            session.run(rollout, 1)
        with pytest.raises(CommitConflictError, match="it reads: reward_model"):
            session.run(reward, 1)


def test_every_stage_computed_again_gives_what_is_committed(tmp_path: Path, tiny_model: Path) -> None:
    problems = write_problems(tmp_path / "problems.jsonl")
    config = tiny_config(
        tiny_model,
        problems,
        **{
            "actor_rollout_ref.actor.use_kl_loss": True,
            "algorithm.rollout_correction.bypass_mode": False,
            "trainer.total_training_steps": 2,
        },
    )
    train_tiny(tmp_path, "run", config)
    # Only to be read: no claim, so that nothing can be published.
    run = Run(str(tmp_path), "run")
    files = sorted(path for path in (tmp_path / "run").rglob("*"))
    for stage in step_stages(config):
        digests = replay_stage(stage, run, config, 2)
        assert digests
        assert all(old == new for old, new in digests.values()), stage.name
    assert sorted(path for path in (tmp_path / "run").rglob("*")) == files


# -- evaluate --------------------------------------------------------------------------------------------------------
