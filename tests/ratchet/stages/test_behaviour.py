"""Whose log-probs the update takes as the behaviour's, what the sampler is asked for, and which policy samples."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.engines.sampler import Completion, SamplingParams
from ratchet.errors import DataError
from ratchet.grains import loop
from ratchet.stages.base import run_stage
from ratchet.stages.graph import step_stages
from ratchet.stages.settings import rollout_version, sampler_settings, trainer_settings
from ratchet.store.run import POLICY_UPDATE, Run
from tests.runs import (
    EMPTY,
    RIGHT,
    WRONG,
    ScriptedSampler,
    one_step_config,
    prepared,
    table_rows,
    tiny_config,
    use_sampler,
    write_problems,
)

ASKED = "actor_rollout_ref.rollout.calculate_log_probs"
SHARE = "actor_rollout_ref.rollout.log_probs_share"
BYPASS = "algorithm.rollout_correction.bypass_mode"
WEIGHED = {"algorithm.rollout_correction.rollout_is": "token", "algorithm.rollout_correction.rollout_is_threshold": 1.5}
# The sampler claims that the policy finds these tokens likelier by e^2 than it: a weight that is truncated.
UNLIKELY = Completion([80, 81, 82], [-8.2, -8.2, -8.2], "#### 1", "stop")
DRIFT = "training/rollout_probs_diff_mean"


class AskedSampler(ScriptedSampler):
    """Reports log-probs of the requests that ask for them, and notes what it is asked."""

    def __init__(self, *completions: Completion) -> None:
        super().__init__(completions)
        self.asked: list[bool] = []

    def sample(self, requests: Any, params: SamplingParams) -> list[Completion]:
        self.asked = [request.with_log_probs and params.with_log_probs for request in requests]
        return [
            found if is_asked else Completion(found.token_ids, None, found.text, found.finish_reason)
            for found, is_asked in zip(super().sample(requests, params), self.asked, strict=True)
        ]


def _step(root: Path, config: RunConfig, *completions: Completion) -> tuple[Run, list[bool]]:
    """A run of one step that samples `completions`, or what its policy says; the rows that were asked about."""
    sampler = AskedSampler(*completions)
    with prepared(root, config) as session:
        if completions:
            use_sampler(session, sampler)
        loop.run_step(session, 1)
        return session.store_run, sampler.asked


def _policy(run: Run) -> dict[str, torch.Tensor]:
    folder = Path(run.uri) / run.require(POLICY_UPDATE, 1).output("policy").folder
    return load_file(folder / "model.safetensors")


def _config(model: Path, problems: Path, **overrides: Any) -> RunConfig:
    # Adam divides by the gradient's size: a larger eps keeps rounding in a gradient of almost 0 from becoming a step.
    usual = {"actor_rollout_ref.rollout.n": 4, "actor_rollout_ref.actor.optim.eps": 1e-3}
    return one_step_config(model, problems, **{**usual, "actor_rollout_ref.rollout.dtype": "float32", **overrides})


def _differ_by(one: Run, other: Run) -> float:
    first, second = _policy(one), _policy(other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def _metrics(run: Run, stage: str) -> dict[str, float]:
    return run.require(stage, 1).provenance.metrics


def test_the_updates_own_log_probs_train_as_those_of_a_forward_pass_before_it(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    own, _ = _step(tmp_path / "own", _config(tiny_model, problems, **{ASKED: False}))
    scored, _ = _step(tmp_path / "scored", _config(tiny_model, problems, **{BYPASS: False}))
    tokens = [
        [row["completion_token_ids"] for row in table_rows(run, "rollout", "rollouts", schemas.ROLLOUTS)]
        for run in (own, scored)
    ]
    assert tokens[0] == tokens[1]
    assert own.manifest("policy_scores", 1) is None
    assert _differ_by(own, scored) < 1e-6
    before = own.require(POLICY_UPDATE, 0).content.outputs["policy"]
    assert own.require(POLICY_UPDATE, 1).content.outputs["policy"] != before
    # Sampler and trainer are the same arithmetic on a CPU, and the rows that tell are a share of all.
    assert _metrics(own, POLICY_UPDATE)[DRIFT] < 1e-4


def test_rows_whose_log_probs_nobody_knows_say_so(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    run, asked = _step(tmp_path, _config(tiny_model, problems, **{ASKED: False, SHARE: 0.0}), RIGHT, WRONG, EMPTY)
    assert sum(asked) == 1
    sampled = table_rows(run, "rollout", "rollouts", schemas.ROLLOUTS)
    assert [row["sampler_log_probs"] is not None for row in sampled] == asked
    rows = table_rows(run, "advantage", "trajectories", schemas.TRAJECTORIES)
    assert [row["behaviour_log_probs"] for row in rows] == [None] * 4
    assert {row["behaviour_source"] for row in rows} == {"update"}
    assert [len(row["advantages"]) for row in rows] == [3, 3, 0, 3]


def test_which_rows_are_watched_follows_from_their_seeds_alone(tmp_path: Path, tiny_model: Path) -> None:
    problems = write_problems(tmp_path / "problems.jsonl", 4)
    found: dict[str, set[int]] = {}
    for name, batch_size, share in (("few", 4, 0.25), ("many", 4, 0.75), ("small", 2, 0.75), ("all", 4, 1.0)):
        options = {ASKED: False, SHARE: share, "data.train_batch_size": batch_size, "data.shuffle": False}
        config = _config(tiny_model, problems, **options, **{"actor_rollout_ref.rollout.n": 16})
        run, _ = _step(tmp_path / name, config, RIGHT, WRONG)
        rows = table_rows(run, "rollout", "rollouts", schemas.ROLLOUTS)
        found[name] = {row["seed"] for row in rows if row["sampler_log_probs"] is not None}
        if name == "small":
            assert found["small"] == found["many"] & {row["seed"] for row in rows}
    assert found["few"] < found["many"] < found["all"]
    assert 4 <= len(found["few"]) <= 28
    assert len(found["all"]) == 64


def test_the_share_of_rows_is_compared_with_the_policys_scores_too(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    options = {ASKED: False, BYPASS: False, SHARE: 0.5}
    run, asked = _step(tmp_path, _config(tiny_model, problems, **options), RIGHT, WRONG, RIGHT, WRONG)
    assert 0 < sum(asked) < 4
    rows = table_rows(run, "advantage", "trajectories", schemas.TRAJECTORIES)
    assert {row["behaviour_source"] for row in rows} == {"policy"}
    sampled = table_rows(run, "rollout", "rollouts", schemas.ROLLOUTS)
    differences = [
        abs(torch.tensor(scored).exp() - torch.tensor(said).exp()).item()
        for row, sample in zip(rows, sampled, strict=True)
        if sample["sampler_log_probs"] is not None
        for scored, said in zip(row["behaviour_log_probs"], sample["sampler_log_probs"], strict=True)
    ]
    assert _metrics(run, "advantage")[DRIFT] == pytest.approx(sum(differences) / len(differences), rel=1e-5)
    assert DRIFT not in _metrics(run, POLICY_UPDATE)


def test_tokens_are_weighed_within_the_update_as_after_another_forward_pass(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    said = (RIGHT, UNLIKELY, WRONG, UNLIKELY)
    fused, _ = _step(tmp_path / "fused", _config(tiny_model, problems, **WEIGHED), *said)
    scored, _ = _step(tmp_path / "scored", _config(tiny_model, problems, **WEIGHED, **{BYPASS: False}), *said)
    plain, _ = _step(tmp_path / "plain", _config(tiny_model, problems, **{BYPASS: False}), *said)
    assert fused.manifest("policy_scores", 1) is None
    assert "importance_weights" not in fused.require("advantage", 1).content.outputs
    assert _differ_by(fused, scored) < 1e-6 < _differ_by(fused, plain)
    assert _metrics(fused, POLICY_UPDATE)["rollout_corr/rollout_is_max"] == pytest.approx(1.5)
    for name in ("rollout_is_mean", "rollout_is_max", "rollout_is_min"):
        both = _metrics(fused, POLICY_UPDATE), _metrics(scored, "advantage")
        assert both[0][f"rollout_corr/{name}"] == pytest.approx(both[1][f"rollout_corr/{name}"], rel=1e-4)


def test_a_sampler_that_leaves_log_probs_out_unasked_is_named(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    silent = Completion(WRONG.token_ids, None, WRONG.text, "stop")
    for name, options in {"bypass": {}, "weighed": {**WEIGHED, BYPASS: False}}.items():
        with pytest.raises(DataError, match="rollout 000001/train-0000000, sample 1 has no sampler_log_probs"):
            _step(tmp_path / name, _config(tiny_model, problems, **options), RIGHT, silent)


def test_sampling_ahead_takes_the_policy_before_the_last(tmp_path: Path, tiny_model: Path) -> None:
    problems = write_problems(tmp_path / "problems.jsonl", 4)
    options = {"data.train_batch_size": 1, "trainer.total_training_steps": 4, "trainer.async_level": 1}
    config = tiny_config(tiny_model, problems, **options, **WEIGHED)
    with prepared(tmp_path, config) as session:
        run = session.store_run
        for step in range(1, 5):
            for stage in step_stages(config):
                run_stage(stage, run, config, step, session.residents)
    steps = range(1, 5)
    assert [run.require("rollout", step).content.policy_version for step in steps] == [0, 0, 1, 2]
    assert [run.require(POLICY_UPDATE, step).content.policy_version for step in steps] == [1, 2, 3, 4]
    for step, version in zip(steps, (0, 0, 1, 2), strict=True):
        rows = table_rows(run, "rollout", "rollouts", schemas.ROLLOUTS, step)
        assert {row["policy_version"] for row in rows} == {version}
        sampled_from = run.require("rollout", step).content.inputs["policy"]
        assert sampled_from == run.require(POLICY_UPDATE, version).content.outputs["policy"]
    # What was sampled from another policy than trains has other weights than 1.
    means = [run.require(POLICY_UPDATE, step).provenance.metrics["rollout_corr/rollout_is_mean"] for step in steps]
    assert means[0] == pytest.approx(1.0, abs=1e-4)
    assert abs(means[3] - 1.0) > 1e-4


def test_the_version_that_samples_a_step_is_never_below_0(tiny_model: Path, problems: Path) -> None:
    ahead = one_step_config(tiny_model, problems, **{"trainer.async_level": 1})
    usual = one_step_config(tiny_model, problems)
    assert [rollout_version(usual, step) for step in (1, 2, 3)] == [0, 1, 2]
    assert [rollout_version(ahead, step) for step in (1, 2, 3)] == [0, 0, 1]


def test_engines_are_told_what_the_config_says(tiny_model: Path, problems: Path) -> None:
    options = {
        **WEIGHED,
        "actor_rollout_ref.model.use_liger": False,
        "actor_rollout_ref.model.lora_rank": 4,
        "actor_rollout_ref.model.lora_alpha": 8,
        "actor_rollout_ref.model.target_modules": ["q_proj"],
        "actor_rollout_ref.actor.use_torch_compile": True,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.free_cache_engine": True,
        "actor_rollout_ref.rollout.sleep_level": 1,
    }
    config = one_step_config(tiny_model, problems, **options)
    settings = trainer_settings(config, 1)
    assert (settings.lora_rank, settings.lora_alpha, settings.lora_target_modules) == (4, 8, ("q_proj",))
    assert (settings.use_liger, settings.use_torch_compile, settings.importance_threshold) == (False, True, 1.5)
    found = sampler_settings(config, "cpu")
    assert (found["free_cache_engine"], found["sleep_level"]) == (True, 1)
    plain = trainer_settings(one_step_config(tiny_model, problems, **{BYPASS: False}, **WEIGHED), 1)
    assert (plain.lora_rank, plain.lora_target_modules, plain.importance_threshold) == (0, (), None)
