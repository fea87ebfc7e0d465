import importlib.util
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from ratchet.engines.engine_stream import EngineStream
from ratchet.engines.model import WeightLayout, decode
from ratchet.engines.sampler import Completion, SampleRequest, SamplingParams
from ratchet.engines.sampler_hf import HFSampler
from ratchet.engines.sampler_vllm import VLLMSampler, _decode_all
from ratchet.engines.vllm_engine import _model_runner_chosen, graph_settings, kv_bytes
from ratchet.errors import ConfigError, EngineError
from tests.tiny_models import make_tiny_model, tiny_tokenizer

END_IDS = {0, 2}
# Long enough to fill blocks of the prefix cache.
LONG = [1, *range(100, 400)]
Engine = tuple[Any, Path, bool]


def _expect_log_probs(
    model: Any, requests: list[SampleRequest], completions: list[Completion], temperature: float
) -> None:
    for request, completion in zip(requests, completions, strict=True):
        prompt = list(request.prompt_token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion.token_ids]), use_cache=False).logits[0]
        expected = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        chosen = expected[range(len(expected)), completion.token_ids].tolist()
        assert completion.log_probs == pytest.approx(chosen, abs=1e-4)


def _refuse(function: Any) -> Any:
    raise AssertionError("another Python was to be started")


def _reference_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _requests(count: int) -> list[SampleRequest]:
    return [SampleRequest(([1, 50, 60], LONG)[index % 2], seed=2**40 + index) for index in range(count)]


def test_a_missing_vllm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match="vLLM is not installed"):
        VLLMSampler(tmp_path, dtype="float32")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_broken_torchvision_is_named_before_vllm_stumbles_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineError, match=r"torchvision is installed but does not import \(operator torchvision::nms"):
        VLLMSampler(tmp_path, dtype="float32")


# Byte fragments of two characters, both special tokens, leading and trailing spaces, and nothing at all.
_AWKWARD = ["é", "日本", " leading", "trailing ", "  two  spaces", "\n\n", "don't , stop !", ""]


def test_texts_decoded_together_are_those_decoded_one_by_one() -> None:
    tokenizer = tiny_tokenizer()
    whole = [tokenizer(text).input_ids for text in _AWKWARD]
    broken = [token_ids[1:] for token_ids in whole] + [token_ids[:-1] for token_ids in whole]
    special = [[0, *token_ids, 2, 3, *token_ids[:1]] for token_ids in whole]
    generator = random.Random(0)
    anything = [[generator.randrange(len(tokenizer)) for _ in range(30)] for _ in range(50)]
    sequences = [*whole, *broken, *special, *anything]
    assert _decode_all(tokenizer, sequences) == [decode(tokenizer, token_ids) for token_ids in sequences]
    assert _decode_all(tokenizer, []) == []


def test_a_tokenizer_with_its_own_decoding_keeps_it() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super()._decode(*args, **kwargs)).upper()

    tokenizer = Shouting(tokenizer_object=tiny_tokenizer().backend_tokenizer)
    assert _decode_all(tokenizer, [tokenizer("loaves").input_ids]) == ["LOAVES"]


def test_the_cache_of_a_token_is_its_keys_and_values_in_every_layer() -> None:
    grouped = LlamaConfig(num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=576)
    assert kv_bytes(grouped, "bfloat16") == 2 * 30 * 3 * 64 * 2
    wide = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, hidden_size=64, head_dim=32)
    assert kv_bytes(wide, "float32") == 2 * 2 * 4 * 32 * 4


@pytest.mark.parametrize(
    ("version", "architecture", "platform", "chosen"),
    [
        ("0.24.0", "Qwen2ForCausalLM", "cuda", "1"),
        ("0.24.0", "Gemma2ForCausalLM", "cuda", None),
        ("0.24.0", "Qwen2ForCausalLM", "cpu", None),
        ("0.32.0", "Qwen2ForCausalLM", "cuda", None),
    ],
)
def test_the_faster_model_runner_is_chosen_for_dense_decoders_while_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch, version: str, architecture: str, platform: str, chosen: str | None
) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    config = Qwen2Config(architectures=[architecture])
    with _model_runner_chosen(version, config, platform):
        assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == chosen
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with _model_runner_chosen(version, config, platform):
        assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"


class _Recorder:
    """A vLLM engine that writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sleep(self, *, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, *, tags: list[str]) -> None:
        self.calls += [f"wake {tag}" for tag in tags]

    def collective_rpc(self, method: str, **kwargs: Any) -> list[int]:
        self.calls.append(method)
        return [17]

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True


def _sleeper(level: int) -> Any:
    """A sampler whose engine sleeps as on a GPU, without one."""
    sampler: Any = object.__new__(VLLMSampler)
    sampler._llm = _Recorder()
    sampler._sleeps, sampler._sleep_level, sampler._asleep, sampler._weights_lost = True, level, set(), False
    sampler._stream = EngineStream(is_on_gpu=False)
    sampler._passes_tensors, sampler._packs_weights = True, False
    sampler._layout = WeightLayout({"weight": (2,)}, {})
    sampler._vocab_size, sampler._context, sampler._end_ids = 10, 10, [2]
    return sampler


def test_graphs_are_captured_for_as_many_sequences_as_may_decode_together() -> None:
    compiled = [graph_settings(count, use_torch_compile=True) for count in (1, 512, 513, 528, 1024)]
    assert compiled == [{}, {}, *({"max_cudagraph_capture_size": size} for size in (528, 528, 1024))]
    plain = graph_settings(1024, use_torch_compile=False)
    assert plain.pop("compilation_config") == {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert plain == {"max_cudagraph_capture_size": 1024}


def test_weights_that_sleep_has_dropped_must_come_before_the_next_sample_and_the_cache_after_them() -> None:
    sampler = _sleeper(2)
    sampler.sleep()
    sampler.sleep()
    assert sampler._llm.calls == ["sleep 2"]
    for call in (
        lambda: sampler.sample([SampleRequest([1], 0)], SamplingParams(temperature=1.0, max_tokens=1)),
        lambda: sampler.prompt_log_probs([1, 2]),
        sampler.fingerprint,
    ):
        with pytest.raises(EngineError, match="slept at level 2 and has no weights"):
            call()
    with pytest.raises(EngineError, match="missing: weight"):
        sampler.load_weights([])
    assert sampler._llm.calls == ["sleep 2"]
    sampler.load_weights([("weight", torch.zeros(2))])
    assert sampler._llm.calls == ["sleep 2", "wake weights", "ratchet_load_weights", "wake kv_cache", "reset"]
    assert sampler.fingerprint() == 17
    sampler.sleep()
    assert sampler._llm.calls[-2:] == ["ratchet_fingerprint", "sleep 2"]


def test_weights_that_sleep_has_kept_wake_with_the_next_call() -> None:
    sampler = _sleeper(1)
    sampler.sleep()
    assert sampler.fingerprint() == 17
    assert sampler._llm.calls == ["sleep 1", "wake weights", "wake kv_cache", "ratchet_fingerprint"]


# What follows runs the engine.


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A running engine, the folder of its first weights, and whether its embeddings are tied."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", tied=request.param)
    # The untied engine starts beside a trainer's process group, which must outlive it.
    owns_group = not request.param and not torch.distributed.is_initialized()
    if owns_group:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    had_process_group = torch.distributed.is_initialized()
    # The engine seeds the global generators; nobody else in the process may notice.
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with pytest.MonkeyPatch.context() as patch:
        # No process before has left what it found about the model's class, and none is started to look.
        patch.setenv("VLLM_CACHE_ROOT", str(folder.parent / "cache"))
        patch.setattr("vllm.model_executor.models.registry._run_in_subprocess", _refuse)
        sampler = VLLMSampler(folder, dtype="float32", max_num_seqs=16, free_cache_engine=True)
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    yield sampler, folder, request.param
    sampler.close()
    assert torch.distributed.is_initialized() == had_process_group
    if owns_group:
        torch.distributed.destroy_process_group()


@pytest.fixture
def sampler(engine: Engine) -> Any:
    """The engine with its first weights, whatever the test before has loaded."""
    sampler, folder, _ = engine
    sampler.load_weights(_reference_model(folder).named_parameters())
    return sampler


def _vllm(test: Any) -> Any:
    """Mark a test that runs vLLM, whose imports warn of what it and PyTorch have deprecated."""
    for category in ("DeprecationWarning", "FutureWarning"):
        test = pytest.mark.filterwarnings(f"ignore::{category}")(test)
    return pytest.mark.vllm(test)


@_vllm
@pytest.mark.parametrize(
    "truncation", [{}, {"top_p": 0.8}, {"top_k": 5}, {"top_k": 8, "top_p": 0.7}], ids=["none", "top-p", "top-k", "both"]
)
def test_log_probs_mean_the_same_in_both_samplers(engine: Engine, sampler: Any, truncation: dict[str, Any]) -> None:
    requests, params = _requests(6), SamplingParams(temperature=0.7, max_tokens=24, **truncation)
    completions = sampler.sample(requests, params)
    if not truncation:
        _expect_log_probs(_reference_model(engine[1]), requests, completions, 0.7)
    model = _reference_model(engine[1])
    for request, completion in zip(requests, completions, strict=True):
        expected = _truncated_log_probs(model, request, completion, params)
        assert completion.log_probs == pytest.approx(expected, abs=1e-4)


def _truncated_log_probs(
    model: Any, request: SampleRequest, completion: Completion, params: SamplingParams
) -> list[float]:
    """Log-prob of each token, renormalised over the fewest most likely tokens that top-k, then top-p, keep."""
    prompt = list(request.prompt_token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion.token_ids]), use_cache=False).logits[0]
    log_probs = []
    for row, token_id in zip(logits[len(prompt) - 1 : -1] / params.temperature, completion.token_ids, strict=True):
        best = row.topk(params.top_k or len(row))
        probs = best.values.softmax(-1)
        kept = probs[probs.cumsum(0) - probs < params.top_p]
        place = best.indices.tolist().index(token_id)
        assert place < len(kept)
        log_probs.append((kept[place] / kept.sum()).log().item())
    return log_probs


@_vllm
def test_log_probs_follow_every_update_of_the_weights(engine: Engine, sampler: Any) -> None:
    model = _reference_model(engine[1])
    requests, params = _requests(6), SamplingParams(temperature=1.0, max_tokens=16)
    generator = torch.Generator().manual_seed(1)
    for passes_tensors in (True, True, False):
        _expect_log_probs(model, requests, sampler.sample(requests, params), 1.0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator)
        # As tensors in this process, or through files as for workers in other processes.
        sampler._passes_tensors = passes_tensors
        # With a tied head's copy, and without.
        sampler.load_weights(model.state_dict().items() if passes_tensors else model.named_parameters())
        _expect_log_probs(model, requests, sampler.sample(requests, params), 1.0)
    sampler._passes_tensors = True
    assert model.config.tie_word_embeddings == engine[2]


@_vllm
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(engine: Engine, sampler: Any) -> None:
    weights = dict(_reference_model(engine[1]).named_parameters())
    requests, params = _requests(2), SamplingParams(temperature=1.0, max_tokens=8)
    with pytest.raises(EngineError, match="unknown weight 'extra'"):
        sampler.load_weights([*weights.items(), ("extra", torch.zeros(1))])
    norm = weights.pop("model.norm.weight")
    with pytest.raises(EngineError, match=r"missing: model\.norm\.weight"):
        sampler.load_weights(weights.items())
    with pytest.raises(EngineError, match=r"has shape \(2,\)"):
        sampler.load_weights([*weights.items(), ("model.norm.weight", norm[:2])])
    _expect_log_probs(_reference_model(engine[1]), requests, sampler.sample(requests, params), 1.0)


@_vllm
def test_a_seed_gives_the_same_completion_alone_and_in_a_batch(sampler: Any) -> None:
    requests, params = _requests(10), SamplingParams(temperature=1.0, max_tokens=24)
    together = [completion.token_ids for completion in sampler.sample(requests, params)]
    assert [sampler.sample([request], params)[0].token_ids for request in requests] == together
    assert [completion.token_ids for completion in sampler.sample(requests[::-1], params)] == together[::-1]
    assert len({tuple(token_ids) for token_ids in together}) == len(together)


@_vllm
def test_completions_end_at_an_end_token_or_at_max_tokens_or_go_on_past_it(engine: Engine, sampler: Any) -> None:
    requests = _requests(60)
    completions = sampler.sample(requests, SamplingParams(temperature=1.0, max_tokens=60))
    going_on = sampler.sample(requests, SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True))
    for completion, full in zip(completions, going_on, strict=True):
        assert not END_IDS & set(completion.token_ids[:-1])
        assert (completion.token_ids[-1] in END_IDS) == (completion.finish_reason == "stop")
        assert completion.log_probs is not None
        assert len(completion.log_probs) == len(completion.token_ids)
        assert full.finish_reason == "length"
        assert len(full.token_ids) == 60
        assert full.token_ids[: len(completion.token_ids)] == completion.token_ids
    assert {each.token_ids[-1] for each in completions if each.finish_reason == "stop"} == END_IDS
    assert any(each.finish_reason == "length" for each in completions)


@_vllm
def test_greedy_completions_and_texts_are_those_of_the_other_sampler(engine: Engine, sampler: Any) -> None:
    requests, params = _requests(4), SamplingParams(temperature=0, max_tokens=16)
    ours = HFSampler(engine[1], dtype="float32").sample(requests, params)
    theirs = sampler.sample(requests, params)
    assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]
    assert [each.text for each in ours] == [each.text for each in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


@_vllm
def test_log_probs_are_none_when_they_are_not_wanted_and_requests_are_checked(sampler: Any) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=4, with_log_probs=False)
    assert sampler.sample(_requests(1), params)[0].log_probs is None
    assert sampler.sample([], params) == []
    with pytest.raises(EngineError, match="request 0 has an empty prompt"):
        sampler.sample([SampleRequest([], 0)], params)
    with pytest.raises(EngineError, match="exceeds the model's context of 512"):
        sampler.sample([SampleRequest([5] * 509, 0)], params)


@_vllm
def test_log_probs_are_reported_for_the_requests_that_want_them(sampler: Any) -> None:
    requests, params = _requests(5), SamplingParams(temperature=1.0, max_tokens=6)
    mixed = [replace(request, with_log_probs=index % 2 == 0) for index, request in enumerate(requests)]
    all_of_them, some = sampler.sample(requests, params), sampler.sample(mixed, params)
    assert [each.token_ids for each in some] == [each.token_ids for each in all_of_them]
    assert [each.log_probs is None for each in some] == [False, True, False, True, False]
    assert some[2].log_probs == pytest.approx(all_of_them[2].log_probs, abs=1e-5)


@_vllm
def test_log_probs_of_a_prompt_are_those_of_one_forward_pass(engine: Engine, sampler: Any) -> None:
    with torch.no_grad():
        expected = _reference_model(engine[1])(torch.tensor([LONG])).logits[0, :-1].log_softmax(-1)
    # Twice: the second time the prompt lies in the prefix cache.
    for _ in range(2):
        given = sampler.prompt_log_probs(LONG)
        assert given == pytest.approx(expected[range(300), LONG[1:]].tolist(), abs=1e-4)
    assert sampler.prompt_log_probs([5]) == []
    with pytest.raises(EngineError, match="empty prompt"):
        sampler.prompt_log_probs([])
    with pytest.raises(EngineError, match="exceeds the model's context of 512"):
        sampler.prompt_log_probs([5] * 512)


@_vllm
def test_on_cpu_the_engine_cannot_tell_its_weights_and_has_no_sleep(engine: Engine, sampler: Any) -> None:
    assert sampler.fingerprint() is None
    sampler.sleep()
    assert len(sampler.sample(_requests(1), SamplingParams(temperature=1.0, max_tokens=2))) == 1
    with pytest.raises(ConfigError, match="expected a sleep level of 1 or 2, got 3"):
        VLLMSampler(engine[1], dtype="float32", sleep_level=3)


@_vllm
def test_an_unknown_engine_argument_is_an_error_that_names_the_nearest(engine: Engine) -> None:
    with pytest.raises(EngineError, match="no argument 'max_num_seq_s'; the nearest is 'max_num_seqs'"):
        VLLMSampler(engine[1], dtype="float32", max_num_seq_s=4)
    with pytest.raises(EngineError, match="'enable_sleep_mode' is set by the sampler"):
        VLLMSampler(engine[1], dtype="float32", enable_sleep_mode=True)
