"""The scheduler against vLLM's own: in the engine, and with a runner played by hand, two steps in flight as on GPUs."""

import importlib.util
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ratchet.engines.sampler import Completion, SampleRequest, SamplingParams
from ratchet.engines.sampler_vllm import VLLMSampler
from ratchet.errors import EngineError
from tests.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

BLOCK = 16
STOP = 7
MAX_LEN = 128
SHORT = [1, 50, 60]
LONG = [1, *range(100, 400)]


def _token(name: str, place: int) -> int:
    """What the played model puts at `place` of request `name`: now and then the stop token."""
    number = (int(name) * 7919 + place * 104729) % 1009
    return STOP if number % 83 == 0 else 10 + number


@dataclass
class _Runner:
    """A model runner as the scheduler sees it: which tokens and blocks each request has, and what it must sample."""

    tokens: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)

    def execute(self, step: Any) -> Any:
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        for name in {*step.finished_req_ids, *(step.preempted_req_ids or ())}:
            self.tokens.pop(name, None)
            self.blocks.pop(name, None)
        computed = {}
        for new in step.scheduled_new_reqs:
            self.tokens[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids)
            self.blocks[new.req_id] = list(new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for name, count, block_ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if name in cached.resumed_req_ids:
                self.tokens[name], self.blocks[name] = len(cached.all_token_ids[name]), []
            self.blocks[name] += [] if block_ids is None else block_ids[0]
            computed[name] = count
        sampled, log_probs = [], []
        for name, scheduled in step.num_scheduled_tokens.items():
            place = computed[name] + scheduled
            assert len(self.blocks[name]) * BLOCK >= place, "a token was scheduled without a block for it"
            assert place <= self.tokens[name], "a token was scheduled that is not there yet"
            done = place == self.tokens[name]
            sampled.append([_token(name, place)] if done else [])
            log_probs.append(-float(place) - int(name) / 1024)
            self.tokens[name] += done
        ids = list(step.num_scheduled_tokens)
        column = np.array(log_probs, dtype=np.float64)[:, None]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: row for row, name in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=LogprobsLists(np.zeros_like(column, dtype=np.int64), column, column[:, 0]) if ids else None,
        )


@dataclass
class _Result:
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    reason: str = ""
    stop_reason: int | None = None
    outputs: int = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=3)


def _scheduler(folder: Path, *, fast: bool, v2: bool, num_blocks: int, caching: bool, max_num_seqs: int = 8) -> Any:
    from ratchet.engines.vllm_engine import import_vllm

    import_vllm()
    import torch
    from vllm import EngineArgs
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from ratchet.engines.vllm_scheduler import DecodeScheduler

    args = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8 * max_num_seqs,
        max_model_len=MAX_LEN, block_size=BLOCK, enable_prefix_caching=caching, enforce_eager=True,
    )  # fmt: skip
    config = args.create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.block_size = BLOCK
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    scheduler = (DecodeScheduler if fast else AsyncScheduler)(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )
    scheduler.use_v2_model_runner = v2
    return scheduler


def _request(name: str, num_prompt_tokens: int, max_tokens: int, with_log_probs: bool, caching: bool) -> Any:
    from vllm import SamplingParams as EngineParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    params = EngineParams(
        max_tokens=max_tokens,
        stop_token_ids=[STOP],
        logprobs=0 if with_log_probs else None,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    return Request(
        request_id=name,
        prompt_token_ids=[1000 + int(name), *range(100, 99 + num_prompt_tokens)],
        sampling_params=params,
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256) if caching else None,
    )


def _serve(scheduler: Any, requests: list[Any], *, in_flight: int, at_once: bool = False) -> dict[str, _Result]:
    """Play an engine that keeps up to `in_flight` steps under way; half of the requests come later, or none."""
    runner, queue, results = _Runner(), deque[Any](), {request.request_id: _Result() for request in requests}
    prompts = {request.request_id: request.num_prompt_tokens for request in requests}
    num_first = len(requests) if at_once else len(requests) // 2
    late = deque(requests[num_first:])
    for request in requests[:num_first]:
        scheduler.add_request(request)
    for turn in range(5000):
        if late and turn % 12 == 11:
            scheduler.add_request(late.popleft())
        if scheduler.has_requests():
            step = scheduler.schedule()
            queue.append((step, runner.execute(step)))
            if len(queue) < in_flight and step.total_num_scheduled_tokens:
                continue
        elif not queue and not late:
            break
        if not queue:
            continue
        for outputs in scheduler.update_from_output(*queue.popleft()).values():
            for output in outputs.outputs:
                result = results[output.request_id]
                result.token_ids += output.new_token_ids
                if output.new_logprobs is not None:
                    result.log_probs += output.new_logprobs.logprobs[:, 0].tolist()
                if output.kv_transfer_params is not None:
                    result.log_probs += output.kv_transfer_params["log_probs"] or []
                result.outputs += 1
                if output.finish_reason is not None:
                    result.reason, result.stop_reason = str(output.finish_reason), output.stop_reason
    else:
        raise AssertionError("the scheduler never came to an end")
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == scheduler.kv_cache_config.num_blocks - 1
    assert not scheduler.requests
    for name, result in results.items():
        expected = [_token(name, prompts[name] + place) for place in range(len(result.token_ids))]
        assert result.token_ids == expected
    return results


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "prefix-cache"])
@pytest.mark.parametrize("num_blocks", [100, 12], ids=["roomy", "tight"])
@pytest.mark.parametrize(("in_flight", "v2"), [(1, False), (2, False), (2, True)], ids=["sync", "async", "async-v2"])
def test_results_are_those_of_the_parent(
    folder: Path, in_flight: int, v2: bool, num_blocks: int, caching: bool
) -> None:
    results = []
    for fast in (False, True):
        scheduler = _scheduler(folder, fast=fast, v2=v2, num_blocks=num_blocks, caching=caching)
        preempted: list[str] = []
        preempt = scheduler._preempt_request

        def count(request: Any, *args: Any, preempt: Any = preempt, names: list[str] = preempted, **kwargs: Any) -> Any:
            names.append(request.request_id)
            return preempt(request, *args, **kwargs)

        scheduler._preempt_request = count
        lengths = [(3, 40), (70, 40), (16, 1), (15, 17), (100, 60), (1, 1), (5, 60), (33, 2), (2, 50), (90, 90)]
        requests = [_request(str(name), *lengths[name % len(lengths)], name % 3 != 0, caching) for name in range(24)]
        results.append(_serve(scheduler, requests, in_flight=in_flight))
        assert bool(preempted) == (num_blocks == 12)
        if fast:
            assert scheduler.num_short_steps > 30
            assert not scheduler._lanes
            assert {result.outputs for result in results[-1].values()} == {1}
    slow, fast_ones = results
    for name, result in slow.items():
        other = fast_ones[name]
        assert (other.token_ids, other.log_probs) == (result.token_ids, result.log_probs)
        assert (other.reason, other.stop_reason) == (result.reason, result.stop_reason)
        assert len(result.log_probs) == (len(result.token_ids) if int(name) % 3 != 0 else 0)
    assert {result.reason for result in slow.values()} == {"stop", "length"}


def test_most_steps_are_short_while_others_wait(folder: Path) -> None:
    scheduler = _scheduler(folder, fast=True, v2=False, num_blocks=800, caching=False, max_num_seqs=64)
    running: list[int] = []
    schedule = scheduler.schedule

    def count(*args: Any) -> Any:
        step = schedule(*args)
        if scheduler.get_request_counts()[1]:
            running.append(len(scheduler.running))
        return step

    scheduler.schedule = count
    # An eighth of the slots is eight: every eighth end lets eight in.
    requests = [_request(str(name), 3, 20 + name % 41, False, False) for name in range(640)]
    _serve(scheduler, requests, in_flight=2, at_once=True)
    assert scheduler.num_short_steps > 0.75 * scheduler.current_step
    assert sum(running) / len(running) > 0.9 * 64


def test_blocks_of_prompts_are_offered_to_others_after_short_steps(folder: Path) -> None:
    scheduler = _scheduler(folder, fast=True, v2=False, num_blocks=100, caching=True)
    _serve(scheduler, [_request("1", 40, 60, True, True)] * 1 + [_request("2", 40, 60, True, True)], in_flight=2)
    again = _request("1", 40, 60, True, True)
    assert scheduler.kv_cache_manager.get_computed_blocks(again)[1] == 32
    assert scheduler.reset_prefix_cache()
    assert scheduler.kv_cache_manager.get_computed_blocks(again)[1] == 0


def test_a_request_that_wants_every_token_gets_it_and_the_others_still_come_once(folder: Path) -> None:
    from vllm.sampling_params import RequestOutputKind

    scheduler = _scheduler(folder, fast=True, v2=False, num_blocks=100, caching=False)
    requests = [_request(str(name), 5, 30, True, False) for name in (1, 2)]
    requests[0].sampling_params.output_kind = RequestOutputKind.DELTA
    results = _serve(scheduler, requests, in_flight=2)
    assert results["1"].outputs == len(results["1"].token_ids)
    assert results["2"].outputs == 1


def test_aborted_requests_leave_nothing_behind(folder: Path) -> None:
    from vllm.v1.request import RequestStatus

    scheduler = _scheduler(folder, fast=True, v2=False, num_blocks=100, caching=False)
    runner = _Runner()
    for name in ("2", "7"):
        scheduler.add_request(_request(name, 5, 60, True, False))
    for _ in range(5):
        step = scheduler.schedule()
        scheduler.update_from_output(step, runner.execute(step))
    assert scheduler.num_short_steps == 4
    assert list(scheduler.requests) == ["2", "7"]
    scheduler.finish_requests(["7"], RequestStatus.FINISHED_ABORTED)
    assert list(scheduler._lanes) == list(scheduler.requests) == ["2"]
    step = scheduler.schedule()
    assert list(step.num_scheduled_tokens) == ["2"]
    assert step.finished_req_ids == {"7"}


# What follows runs the engine.

Answers = dict[str, list[Completion]]


def _answers(folder: Path, other: Path, *, fast: bool) -> tuple[Answers, int, int]:
    """Completions of every scenario, the number of short steps, and of preemptions."""
    from transformers import AutoModelForCausalLM

    # 32 blocks of 32 tokens: three long prompts fit, and not what is sampled after them.
    sampler: Any = VLLMSampler(
        folder, dtype="float32", max_num_seqs=8, block_size=32, num_gpu_blocks_override=32, fast_scheduler=fast
    )
    scheduler = sampler._llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def count(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = count
    params = SamplingParams(temperature=1.0, max_tokens=40)
    many = [SampleRequest(SHORT, seed, with_log_probs=seed % 3 > 0) for seed in range(30)]
    answers = {
        "many": sampler.sample(many, params),
        "one token": sampler.sample(many[:4], SamplingParams(temperature=1.0, max_tokens=1)),
        "tight": sampler.sample(
            [SampleRequest(LONG, seed) for seed in range(6)],
            SamplingParams(temperature=1.0, max_tokens=100, ignore_eos=True),
        ),
        "silent": sampler.sample(many[:8], SamplingParams(temperature=0.7, max_tokens=40, with_log_probs=False)),
    }
    new = AutoModelForCausalLM.from_pretrained(other)
    sampler.load_weights(new.named_parameters())
    answers["new weights"] = sampler.sample(many[:8], params)
    steps = getattr(scheduler, "num_short_steps", 0)
    sampler.close()
    return answers, steps, len(preempted)


def test_the_engine_gives_the_same_completions_with_and_without(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", seed=5)
    slow, no_steps, slow_preempted = _answers(folder, other, fast=False)
    fast, steps, fast_preempted = _answers(folder, other, fast=True)
    assert (no_steps, steps > 100) == (0, True)
    assert slow_preempted > 0
    assert fast_preempted > 0
    assert {completion.finish_reason for completion in fast["many"]} == {"stop", "length"}
    for name, completions in slow.items():
        for one, two in zip(completions, fast[name], strict=True):
            assert (two.token_ids, two.text, two.finish_reason) == (one.token_ids, one.text, one.finish_reason)
            # A preempted request is computed again in another batch, which may round otherwise.
            assert two.log_probs == pytest.approx(one.log_probs, abs=1e-4)
    assert [completion.log_probs is None for completion in fast["many"]] == [seed % 3 == 0 for seed in range(30)]
    assert all(completion.log_probs is None for completion in fast["silent"])


def test_another_version_of_vllm_keeps_its_own_scheduler(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import vllm

    from ratchet.engines.vllm_engine import _scheduler as chosen

    assert chosen("0.40.1", True, None) is None
    assert "vLLM 0.40.1 is not one that it was written against" in caplog.text
    assert chosen("0.24.0", False, None) is None
    assert chosen("0.24.0", True, False) is None
    assert chosen("0.24.0", True, None) == "ratchet.engines.vllm_scheduler.DecodeScheduler"
    monkeypatch.setattr(vllm, "__version__", "0.40.1")
    with pytest.raises(EngineError, match=r"fast_scheduler cannot be used: vLLM 0\.40\.1"):
        VLLMSampler(folder, dtype="float32", fast_scheduler=True)
