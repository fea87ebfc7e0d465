"""Sampling ahead: the same content as one step after another, and really at the same time."""

import threading
from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.engines.sampler_hf import HFSampler
from ratchet.engines.trainer import Trainer
from ratchet.errors import EngineError
from tests.runs import Stopped, content_digests, stop_at, table_rows, tiny_config, train_tiny, write_problems

STEPS = 4


def _config(tmp_path: Path, model: Path, **overrides: Any) -> RunConfig:
    problems = write_problems(tmp_path / "problems.jsonl", 8)
    values = {"trainer.async_level": 1, "trainer.total_training_steps": STEPS, "trainer.test_freq": 2, **overrides}
    return tiny_config(model, problems, **{"data.val_files": str(problems), **values})


def test_sampling_ahead_has_the_content_of_one_step_after_another(tmp_path: Path, tiny_model: Path) -> None:
    ahead = train_tiny(tmp_path, "segment", _config(tmp_path, tiny_model))
    one_by_one = train_tiny(tmp_path, "stage", _config(tmp_path, tiny_model, **{"trainer.grain": "stage"}))
    assert content_digests(ahead) == content_digests(one_by_one)
    versions = {
        step: {row["policy_version"] for row in table_rows(ahead, "rollout", "rollouts", schemas.ROLLOUTS, step)}
        for step in range(1, STEPS + 1)
    }
    assert versions == {1: {0}, 2: {0}, 3: {1}, 4: {2}}


def test_a_run_stopped_while_it_samples_ahead_resumes_to_the_same_content(tmp_path: Path, tiny_model: Path) -> None:
    config = _config(tmp_path, tiny_model)
    whole = content_digests(train_tiny(tmp_path, "whole", config))
    for place in ("step-000003/rollout", "step-000002/policy_update", "step-000003/advantage"):
        name = place.replace("/", "-")
        with pytest.raises(Stopped):
            train_tiny(tmp_path, name, config, stop_at(place, is_committed=False))
        assert content_digests(train_tiny(tmp_path, name, config)) == whole


def test_the_next_step_is_sampled_while_this_one_trains(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each waits for the other: one after another, neither would ever go on.
    sampling, training = threading.Event(), threading.Event()
    sample, update, calls = HFSampler.sample, Trainer.update, []

    def sample_while_training(self: HFSampler, *arguments: Any) -> Any:
        calls.append("sample")
        if len(calls) == 2:
            sampling.set()
            assert training.wait(60)
        return sample(self, *arguments)

    def update_while_sampling(self: Trainer, rows: Any, *, step: int, **options: Any) -> Any:
        if step == 1:
            training.set()
            assert sampling.wait(60)
        return update(self, rows, step=step, **options)

    monkeypatch.setattr(HFSampler, "sample", sample_while_training)
    monkeypatch.setattr(Trainer, "update", update_while_sampling)
    train_tiny(tmp_path, "run", _config(tmp_path, tiny_model, **{"trainer.val_before_train": False}))


def test_what_goes_wrong_ahead_ends_the_run(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = HFSampler.sample

    def fail_ahead(self: HFSampler, *arguments: Any) -> Any:
        if threading.current_thread().name.startswith("sampler"):
            raise EngineError("out of memory")
        return sample(self, *arguments)

    monkeypatch.setattr(HFSampler, "sample", fail_ahead)
    with pytest.raises(EngineError, match="out of memory"):
        train_tiny(tmp_path, "run", _config(tmp_path, tiny_model))


def test_a_sampler_that_samples_ahead_is_not_sent_to_sleep(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[int] = []
    monkeypatch.setattr(HFSampler, "sleep", lambda self: slept.append(1))
    values = {"actor_rollout_ref.rollout.free_cache_engine": True, "trainer.total_training_steps": 2}
    train_tiny(tmp_path, "ahead", _config(tmp_path, tiny_model, **values))
    assert slept == []
    train_tiny(tmp_path, "in-turn", _config(tmp_path, tiny_model, **values, **{"trainer.async_level": 0}))
    assert slept
