"""Samplers in processes of their own answer as one in this process does, follow its weights, and fail loudly."""

import os
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ratchet.data.packing import even_runs
from ratchet.engines.dedicated_samplers import DedicatedSamplers, _gpus
from ratchet.engines.fingerprint import fingerprint
from ratchet.engines.open_sampler import open_sampler
from ratchet.engines.sampler import Completion, SampleRequest, SamplingParams
from ratchet.errors import ConfigError, EngineError
from ratchet.store.run import Run
from tests.runs import tiny_config, train_tiny, write_problems
from tests.tiny_models import make_tiny_model

PARAMS = SamplingParams(temperature=1.0, max_tokens=8)
REQUESTS = [SampleRequest([1, 50 + index % 3, 60], seed=1000 + index) for index in range(7)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def samplers(tiny: Path) -> Iterator[DedicatedSamplers]:
    made: Any = open_sampler("hf", tiny, dedicated_gpus=2, dtype="float32", device="cpu")
    yield made
    made.close()


@pytest.mark.parametrize("count", range(1, 5))
@pytest.mark.parametrize("length", [0, 1, 3, 8])
def test_runs_of_nearly_equal_length_in_order(count: int, length: int) -> None:
    dealt = even_runs(list(range(length)), count)
    assert [item for part in dealt for item in part] == list(range(length))
    sizes = [len(part) for part in dealt]
    assert len(dealt) == count
    assert max(sizes) - min(sizes) <= 1


def test_gpus_come_after_those_that_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-b,6")
    assert _gpus(2, 1) == ["GPU-b", "6"]
    with pytest.raises(ConfigError, match=r"dedicated_gpus is 2 beside 2 that train: expected 4 GPUs, .* sees 3"):
        _gpus(2, 2)


def _expect_same(found: list[Completion], expected: list[Completion]) -> None:
    """Tokens exactly; a batch of another size rounds log-probs otherwise."""
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


@pytest.mark.slow
def test_they_answer_as_one_and_hold_the_weights_that_they_are_sent(
    samplers: DedicatedSamplers, tiny: Path, tmp_path: Path
) -> None:
    own = open_sampler("hf", tiny, dtype="float32", device="cpu")
    _expect_same(samplers.sample(REQUESTS, PARAMS), own.sample(REQUESTS, PARAMS))
    _expect_same(samplers.sample(REQUESTS[:1], PARAMS), own.sample(REQUESTS[:1], PARAMS))
    auto: Any = AutoModelForCausalLM
    new = auto.from_pretrained(make_tiny_model(tmp_path / "new", seed=5), dtype=torch.float32)
    weights = {name: tensor.detach() for name, tensor in new.named_parameters()}
    for sampler in (samplers, own):
        sampler.load_weights(weights.items())
    _expect_same(samplers.sample(REQUESTS, PARAMS), own.sample(REQUESTS, PARAMS))
    assert samplers.fingerprint() == own.fingerprint() == fingerprint(weights.values())
    prompt = [1, 50, 60, 70]
    assert samplers.prompt_log_probs(prompt) == pytest.approx(own.prompt_log_probs(prompt), abs=1e-6)
    wrong = {**weights, "model.norm.weight": torch.zeros(3)}
    with pytest.raises(EngineError, match=r"model\.norm\.weight"):
        samplers.load_weights(wrong.items())
    with pytest.raises(EngineError, match="closed"):
        samplers.sample(REQUESTS, PARAMS)


@pytest.mark.slow
def test_a_process_that_is_killed_is_named_and_nobody_waits_for_it(samplers: DedicatedSamplers, tiny: Path) -> None:
    os.kill(samplers._processes[1].pid, signal.SIGKILL)
    auto: Any = AutoModelForCausalLM
    weights = dict(auto.from_pretrained(tiny, dtype=torch.float32).named_parameters())
    with pytest.raises(EngineError, match=r"sampler process 1 ended with code -9|ended before load_weights"):
        samplers.load_weights(weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("async_level", [0, 1])
def test_a_run_is_the_same_whoever_samples(tiny: Path, tmp_path: Path, async_level: int) -> None:
    problems = write_problems(tmp_path / "problems.jsonl")
    runs: list[Run] = []
    for dedicated in (0, 1):
        overrides: dict[str, Any] = {
            "actor_rollout_ref.rollout.dedicated_gpus": dedicated,
            "trainer.total_training_steps": 3,
            "trainer.async_level": async_level,
        }
        runs.append(train_tiny(tmp_path / "runs", f"run{dedicated}", tiny_config(tiny, problems, **overrides)))
    for step in range(4):
        one, two = ({item.stage: item.content_digest for item in run.step_manifests(step)} for run in runs)
        assert one == two
    policies = [runs[0].require("policy_update", step).output("policy").digest for step in range(4)]
    assert all(old != new for old, new in pairwise(policies))
