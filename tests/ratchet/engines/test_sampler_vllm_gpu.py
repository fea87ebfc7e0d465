"""vLLM on a GPU: weights from its memory, the fast scheduler with steps in flight, sleep."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ratchet.engines.fingerprint import fingerprint
from ratchet.engines.sampler import SampleRequest, SamplingParams
from ratchet.engines.sampler_vllm import VLLMSampler
from ratchet.errors import EngineError
from tests.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

PARAMS = SamplingParams(temperature=1.0, max_tokens=64)
REQUESTS = [SampleRequest([1, 50 + seed % 5, 60], seed, with_log_probs=seed % 3 > 0) for seed in range(40)]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return dict(model.to("cuda").named_parameters())


def test_the_scheduler_changes_no_completion_and_sleep_loses_nothing_but_what_it_says(tmp_path: Path) -> None:
    old, new = make_tiny_model(tmp_path / "old"), make_tiny_model(tmp_path / "new", seed=5)
    weights, answers = _weights(new), []
    for fast in (False, True):
        sampler: Any = VLLMSampler(
            old, dtype="bfloat16", max_num_seqs=16, enforce_eager=True, fast_scheduler=fast, free_cache_engine=True
        )
        assert sampler.fingerprint() == fingerprint(_weights(old).values())
        sampler.load_weights(weights.items())
        assert sampler.fingerprint() == fingerprint(weights.values())
        answers.append(sampler.sample(REQUESTS, PARAMS))
        sampler.sleep()
        with pytest.raises(EngineError, match="slept at level 2"):
            sampler.sample(REQUESTS, PARAMS)
        sampler.load_weights(weights.items())
        assert sampler.fingerprint() == fingerprint(weights.values())
        assert len(sampler.prompt_log_probs([1, 50, 60])) == 2
        answers.append(sampler.sample(REQUESTS, PARAMS))
        sampler.close()
    for other in answers[1:]:
        same = [one for one, two in zip(answers[0], other, strict=True) if one.token_ids == two.token_ids]
        # Batches of another shape may round otherwise, which moves a sample now and then.
        assert len(same) >= 0.9 * len(REQUESTS)
        assert [each.log_probs is None for each in other] == [seed % 3 == 0 for seed in range(len(REQUESTS))]


def test_another_thread_samples_the_same_while_this_one_keeps_the_gpu_busy(tmp_path: Path) -> None:
    sampler = VLLMSampler(make_tiny_model(tmp_path / "model"), dtype="bfloat16", max_num_seqs=64)
    # The engine's start has left this thread on its own stream.
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    quiet = [one.token_ids for one in sampler.sample(REQUESTS, PARAMS)]
    sizes = torch.randint(1, 1 << 22, (64,)).tolist()
    with ThreadPoolExecutor(1) as executor:
        under_way = executor.submit(lambda: [sampler.sample(REQUESTS, PARAMS) for _ in range(10)])
        rounds = 0
        while not under_way.done():
            # What this thread takes of freed memory is filled with ids that no token has.
            for size in sizes:
                torch.full((size,), 1 << 40, device="cuda")
            rounds += 1
        found = under_way.result()
    sampler.close()
    assert rounds > 1
    assert all([one.token_ids for one in each] == quiet for each in found)
