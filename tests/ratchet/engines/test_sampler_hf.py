from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ratchet.engines.fingerprint import fingerprint
from ratchet.engines.open_sampler import open_sampler
from ratchet.engines.sampler import Completion, SampleRequest, SamplingParams
from ratchet.engines.sampler_hf import HFSampler
from ratchet.errors import ConfigError, EngineError
from tests.tiny_models import ARCHITECTURES, MAX_CONTEXT, make_tiny_model

END_IDS = {0, 2}
VOCAB_SIZE = 462
# Two prompts of unlike length, one of them longer than the sliding window of the models that have one.
SHORT = [1, 50, 60]
LONG = [1, *range(100, 140)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def sampler(tiny: Path) -> HFSampler:
    return HFSampler(tiny, dtype="float32")


def _requests(count: int) -> list[SampleRequest]:
    return [SampleRequest((SHORT, LONG, [7])[index % 3], seed=1000 + index) for index in range(count)]


def _reference_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def _logits(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Logits that each completion token was drawn from: one plain forward pass, no cache, no padding."""
    output: torch.Tensor = model(torch.tensor([prompt + completion]), use_cache=False).logits[0]
    return output[len(prompt) - 1 : -1]


def _expect_log_probs(
    model: Any, requests: list[SampleRequest], completions: list[Completion], temperature: float
) -> None:
    for request, completion in zip(requests, completions, strict=True):
        logits = _logits(model, list(request.prompt_token_ids), completion.token_ids)
        expected = (logits / temperature).log_softmax(-1)
        chosen = expected[range(len(expected)), completion.token_ids].tolist()
        assert completion.log_probs == pytest.approx(chosen, abs=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_log_probs_are_those_of_one_forward_pass_at_the_sampling_temperature(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    folder = make_tiny_model(tmp_path / "model", architecture=architecture, tied=tied, seed=3)
    requests = _requests(9)
    completions = HFSampler(folder, dtype="float32").sample(requests, SamplingParams(temperature=0.7, max_tokens=40))
    _expect_log_probs(_reference_model(folder), requests, completions, 0.7)


def test_log_probs_after_truncation_are_renormalised_over_the_tokens_kept(tiny: Path, sampler: HFSampler) -> None:
    requests = _requests(6)
    completions = sampler.sample(requests, SamplingParams(temperature=0.9, top_k=5, top_p=0.8, max_tokens=20))
    model = _reference_model(tiny)
    for request, completion in zip(requests, completions, strict=True):
        logits = _logits(model, list(request.prompt_token_ids), completion.token_ids) / 0.9
        assert completion.log_probs is not None
        for row, token_id, log_prob in zip(logits, completion.token_ids, completion.log_probs, strict=True):
            best = row.topk(5)
            probs = best.values.softmax(-1).tolist()
            num_kept = next(count for count in range(1, 6) if sum(probs[:count]) >= 0.8 or count == 5)
            kept = dict(zip(best.indices.tolist()[:num_kept], probs[:num_kept], strict=True))
            expected = torch.tensor(kept[token_id] / sum(kept.values())).log().item()
            assert log_prob == pytest.approx(expected, abs=5e-5)


def test_greedy_completions_follow_the_most_likely_token(tiny: Path, sampler: HFSampler) -> None:
    requests = _requests(3)
    completions = sampler.sample(requests, SamplingParams(temperature=0, max_tokens=12))
    model = _reference_model(tiny)
    for request, completion in zip(requests, completions, strict=True):
        logits = _logits(model, list(request.prompt_token_ids), completion.token_ids)
        assert completion.token_ids == logits.argmax(-1).tolist()
    _expect_log_probs(model, requests, completions, 1.0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_sample_does_not_depend_on_the_batch_that_it_is_drawn_in(tmp_path: Path, tied: bool) -> None:
    sampler = HFSampler(make_tiny_model(tmp_path / "model", tied=tied), dtype="float32")
    params = SamplingParams(temperature=1.0, max_tokens=48)
    requests = _requests(13)
    together = sampler.sample(requests, params)
    token_ids = [completion.token_ids for completion in together]

    assert [sampler.sample([request], params)[0].token_ids for request in requests] == token_ids
    assert [each.token_ids for each in sampler.sample(requests[::-1], params)] == token_ids[::-1]
    for max_num_seqs in (1, 4, 5):
        other = HFSampler(tmp_path / "model", dtype="float32", max_num_seqs=max_num_seqs)
        assert [completion.token_ids for completion in other.sample(requests, params)] == token_ids


def test_the_same_requests_give_bitwise_the_same_completions(sampler: HFSampler) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=30)
    assert sampler.sample(_requests(10), params) == sampler.sample(_requests(10), params)


def test_seeds_decide_and_the_global_generator_does_not(sampler: HFSampler) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20)
    requests = [SampleRequest(SHORT, seed) for seed in (1, 2, 1)]
    first, second, again = sampler.sample(requests, params)
    # A row's place in the batch may move the last bits of its log-probs, never its tokens.
    assert first.token_ids == again.token_ids
    assert first.log_probs == pytest.approx(again.log_probs, abs=1e-5)
    assert first.token_ids != second.token_ids
    before = torch.random.get_rng_state()
    torch.manual_seed(99)
    assert sampler.sample(requests, params) == [first, second, again]
    torch.random.set_rng_state(before)


def test_completions_end_at_an_end_token_or_at_max_tokens(sampler: HFSampler) -> None:
    completions = sampler.sample(_requests(60), SamplingParams(temperature=1.0, max_tokens=100))
    for completion in completions:
        assert completion.log_probs is not None
        assert len(completion.log_probs) == len(completion.token_ids)
        assert not END_IDS & set(completion.token_ids[:-1])
        if completion.finish_reason == "stop":
            assert completion.token_ids[-1] in END_IDS
        else:
            assert len(completion.token_ids) == 100
            assert completion.token_ids[-1] not in END_IDS
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    assert {completion.token_ids[-1] for completion in completions if completion.finish_reason == "stop"} == END_IDS


def test_an_end_token_at_the_last_place_still_stops(sampler: HFSampler) -> None:
    requests = _requests(60)
    completions = sampler.sample(requests, SamplingParams(temperature=1.0, max_tokens=100))
    index, stopped = next(
        (index, completion) for index, completion in enumerate(completions) if completion.finish_reason == "stop"
    )
    exact = SamplingParams(temperature=1.0, max_tokens=len(stopped.token_ids))
    assert sampler.sample([requests[index]], exact)[0].finish_reason == "stop"


def test_ignoring_end_tokens_samples_on_past_them(sampler: HFSampler) -> None:
    requests = _requests(30)
    stopping = sampler.sample(requests, SamplingParams(temperature=1.0, max_tokens=100))
    going_on = sampler.sample(requests, SamplingParams(temperature=1.0, max_tokens=100, ignore_eos=True))
    for stopped, full in zip(stopping, going_on, strict=True):
        assert len(full.token_ids) == 100
        assert full.finish_reason == "length"
        assert full.token_ids[: len(stopped.token_ids)] == stopped.token_ids
    assert any(END_IDS & set(full.token_ids) for full in going_on)


def test_log_probs_are_none_when_they_are_not_wanted(sampler: HFSampler) -> None:
    requests = _requests(4)
    silent = sampler.sample(requests, SamplingParams(temperature=1.0, max_tokens=8, with_log_probs=False))
    spoken = sampler.sample(requests, SamplingParams(temperature=1.0, max_tokens=8))
    assert [completion.log_probs for completion in silent] == [None] * 4
    assert [each.token_ids for each in silent] == [each.token_ids for each in spoken]


def test_log_probs_are_reported_for_the_requests_that_want_them(sampler: HFSampler) -> None:
    requests, params = _requests(5), SamplingParams(temperature=1.0, max_tokens=6)
    mixed = [replace(request, with_log_probs=index % 2 == 0) for index, request in enumerate(requests)]
    expected = [
        completion if index % 2 == 0 else replace(completion, log_probs=None)
        for index, completion in enumerate(sampler.sample(requests, params))
    ]
    assert sampler.sample(mixed, params) == expected
    silent = SamplingParams(temperature=1.0, max_tokens=6, with_log_probs=False)
    assert all(completion.log_probs is None for completion in sampler.sample(requests, silent))


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_log_probs_of_a_prompt_are_those_of_one_forward_pass(tmp_path: Path, architecture: str) -> None:
    folder = make_tiny_model(tmp_path / "model", architecture=architecture, seed=3)
    sampler = HFSampler(folder, dtype="float32")
    logits = _logits(_reference_model(folder), LONG[:1], LONG[1:])
    expected = logits.log_softmax(-1)[range(len(LONG) - 1), LONG[1:]].tolist()
    assert sampler.prompt_log_probs(LONG) == pytest.approx(expected, abs=1e-4)
    assert sampler.prompt_log_probs([7]) == []


def test_a_prompt_that_cannot_be_scored_is_refused(sampler: HFSampler) -> None:
    with pytest.raises(EngineError, match="empty prompt"):
        sampler.prompt_log_probs([])
    with pytest.raises(EngineError, match=f"exceeds the model's context of {MAX_CONTEXT}"):
        sampler.prompt_log_probs([5] * MAX_CONTEXT)


@pytest.mark.parametrize("tied", [True, False])
def test_the_fingerprint_is_that_of_the_weights_sent(tmp_path: Path, tied: bool) -> None:
    sampler = HFSampler(make_tiny_model(tmp_path / "old", tied=tied), dtype="bfloat16")
    before = sampler.fingerprint()
    new = _reference_model(make_tiny_model(tmp_path / "new", tied=tied, seed=5)).to(torch.bfloat16)
    weights = dict(new.named_parameters())
    sampler.load_weights(weights.items())
    assert sampler.fingerprint() == fingerprint(weights.values()) != before
    sampler.sleep()
    assert sampler.fingerprint() == fingerprint(weights.values())


def test_no_requests_give_no_completions(sampler: HFSampler) -> None:
    assert sampler.sample([], SamplingParams(temperature=1.0, max_tokens=8)) == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (SampleRequest([], 0), "request 1 has an empty prompt"),
        (SampleRequest([1, VOCAB_SIZE], 0), "request 1 has token ids from 1 to 462, expected 0 to 461"),
        (SampleRequest([5] * (MAX_CONTEXT - 7), 0), "request 1 has 505 prompt tokens; with max_tokens 8 that exceeds"),
        (SampleRequest([1], -1), "request 1 has seed -1"),
        (SampleRequest([1], 1 << 63), "request 1 has seed"),
    ],
)
def test_a_request_that_cannot_be_sampled_is_named(sampler: HFSampler, bad: SampleRequest, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        sampler.sample([SampleRequest([1], 0), bad], SamplingParams(temperature=1.0, max_tokens=8))


def test_a_request_that_just_fits_the_context_is_sampled(sampler: HFSampler) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    assert len(sampler.sample([SampleRequest([5] * (MAX_CONTEXT - 8), 0)], params)[0].token_ids) == 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": 0},
        {"max_tokens": 0},
    ],
)
def test_sampling_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(wrong.values())))):
        SamplingParams(**({"temperature": 1.0, "max_tokens": 8} | wrong))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head_sent", [True, False])
def test_completions_follow_new_weights(tmp_path: Path, tied: bool, head_sent: bool) -> None:
    sampler = HFSampler(make_tiny_model(tmp_path / "old", tied=tied), dtype="float32")
    new = _reference_model(make_tiny_model(tmp_path / "new", tied=tied, seed=5))
    weights = new.state_dict()
    if tied and not head_sent:
        del weights["lm_head.weight"]
    requests, params = _requests(5), SamplingParams(temperature=0.8, max_tokens=16)
    before = sampler.sample(requests, params)
    sampler.load_weights(weights.items())
    after = sampler.sample(requests, params)
    assert [each.token_ids for each in before] != [each.token_ids for each in after]
    _expect_log_probs(new, requests, after, 0.8)


def test_weights_that_do_not_fit_leave_the_old_ones_in_place(tiny: Path, tmp_path: Path) -> None:
    sampler = HFSampler(tiny, dtype="float32")
    params = SamplingParams(temperature=1.0, max_tokens=8)
    before = sampler.sample(_requests(3), params)
    weights = _reference_model(make_tiny_model(tmp_path / "new", seed=5)).state_dict()
    norm = weights.pop("model.norm.weight")
    with pytest.raises(EngineError, match=r"missing: model\.norm\.weight"):
        sampler.load_weights(weights.items())
    with pytest.raises(EngineError, match=r"model\.norm\.weight' has shape \(2,\)"):
        sampler.load_weights([*weights.items(), ("model.norm.weight", norm[:2])])
    with pytest.raises(EngineError, match=r"unknown weight 'norm\.weight'"):
        sampler.load_weights([*weights.items(), ("norm.weight", norm)])
    assert sampler.sample(_requests(3), params) == before


def test_bfloat16_is_near_float32(tiny: Path) -> None:
    requests = [SampleRequest(LONG, seed) for seed in range(4)]
    completions = HFSampler(tiny, dtype="bfloat16").sample(requests, SamplingParams(temperature=1.0, max_tokens=24))
    model = _reference_model(tiny)
    errors = []
    for request, completion in zip(requests, completions, strict=True):
        expected = _logits(model, list(request.prompt_token_ids), completion.token_ids).log_softmax(-1)
        chosen = expected[range(len(expected)), completion.token_ids]
        errors += (chosen - torch.tensor(completion.log_probs)).abs().tolist()
    assert sum(errors) / len(errors) < 0.05


def test_samplers_are_opened_by_name(tiny: Path) -> None:
    sampler = open_sampler("hf", tiny, dtype="float32", device="cpu", max_num_seqs=2)
    assert len(sampler.sample(_requests(3), SamplingParams(temperature=1.0, max_tokens=2))) == 3
    sampler.close()
    with pytest.raises(ConfigError, match="got 'sglang'"):
        open_sampler("sglang", tiny)


def test_a_closed_sampler_says_so(tiny: Path) -> None:
    sampler = HFSampler(tiny, dtype="float32")
    sampler.close()
    with pytest.raises(EngineError, match="closed"):
        sampler.sample(_requests(1), SamplingParams(temperature=1.0, max_tokens=2))
