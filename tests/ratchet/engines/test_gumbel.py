import math

import pytest
import torch

from ratchet.engines.gumbel import gumbel_noise, sample_tokens

WORD = (1 << 64) - 1
EULER_GAMMA = 0.5772156649015329


def _finalise(word: int) -> int:
    """SplitMix64's finaliser in plain integers."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def _reference_noise(seed: int, position: int, token_id: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = _finalise((_finalise((seed * golden) & WORD) + position * golden) & WORD)
    word = _finalise((key + (token_id + 1) * golden) & WORD)
    return -math.log(-math.log1p(-((word >> 11) + 0.5) / 2**53))


def _noise(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    return gumbel_noise(torch.tensor([seed]), torch.tensor([position]), vocab_size)[0]


def test_the_finaliser_here_gives_splitmix64s_published_first_outputs() -> None:
    golden = 0x9E3779B97F4A7C15
    assert _finalise((1234567 + golden) & WORD) == 6457827717110365317
    assert _finalise((1234567 + 2 * golden) & WORD) == 3203168211198807973


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 0), (0, 1), (2**63 - 1, 511), (77123, 3)])
def test_noise_equals_a_reference_in_plain_integers(seed: int, position: int) -> None:
    noise = _noise(seed, position, 70_000)
    # The ends, and both sides of where the work is cut into pieces.
    for token_id in (0, 1, 32_767, 32_768, 65_535, 65_536, 69_999):
        assert noise[token_id].item() == pytest.approx(_reference_noise(seed, position, token_id), rel=1e-5, abs=1e-5)


def test_noise_of_a_token_depends_on_neither_the_batch_nor_the_vocabulary() -> None:
    seeds, positions = torch.tensor([5, 9, 5]), torch.tensor([0, 4, 7])
    together = gumbel_noise(seeds, positions, 50_000)
    for row in range(3):
        assert torch.equal(together[row, :300], _noise(int(seeds[row]), int(positions[row]), 300))


def test_noise_has_the_moments_and_the_distribution_of_a_standard_gumbel() -> None:
    noise = gumbel_noise(torch.arange(40), torch.arange(40) * 3, 25_000).double().flatten()
    count = len(noise)
    assert noise.isfinite().all()
    # Five standard errors each; the fourth central moment of a Gumbel is 5.4 variances squared.
    variance = math.pi**2 / 6
    assert abs(noise.mean().item() - EULER_GAMMA) < 5 * math.sqrt(variance / count)
    assert abs(noise.var().item() - variance) < 5 * variance * math.sqrt(4.4 / count)
    uniform = torch.exp(-torch.exp(-noise)).sort().values
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = max((uniform - steps[:-1]).abs().max().item(), (uniform - steps[1:]).abs().max().item())
    # The Kolmogorov-Smirnov statistic exceeds 1.95 / sqrt(n) once in a thousand.
    assert distance < 1.95 / math.sqrt(count)


def test_noise_of_neighbouring_tokens_positions_and_seeds_is_uncorrelated() -> None:
    width = 100_000
    base = _noise(11, 20, width)
    others = {
        "next token": base.roll(1),
        "next position": _noise(11, 21, width),
        "next seed": _noise(12, 20, width),
        "seed up, position down": _noise(12, 19, width),
        "seed's high bit": _noise(11 + 2**62, 20, width),
        "swapped": _noise(20, 11, width),
    }
    for name, other in others.items():
        correlation = torch.corrcoef(torch.stack([base, other]))[0, 1].item()
        assert abs(correlation) < 5 / math.sqrt(width), name
        assert not torch.equal(base, other), name


def test_large_noise_is_as_frequent_as_it_should_be() -> None:
    noise = gumbel_noise(torch.arange(100), torch.zeros(100, dtype=torch.long), 50_000)
    for threshold in (8.0, 10.0, 12.0):
        expected = noise.numel() * -math.expm1(-math.exp(-threshold))
        assert abs((noise > threshold).sum().item() - expected) < 5 * math.sqrt(expected)


def test_sampled_tokens_have_the_frequencies_of_the_softmax() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0])
    count = 40_000
    token_ids, log_probs = sample_tokens(
        logits.expand(count, 4), torch.arange(count), torch.zeros(count, dtype=torch.long), temperature=0.5
    )
    probs = (logits / 0.5).softmax(-1)
    frequencies = token_ids.bincount(minlength=4) / count
    errors = (probs * (1 - probs) / count).sqrt()
    assert ((frequencies - probs).abs() < 5 * errors).all()
    assert log_probs is not None
    assert torch.allclose(log_probs, probs.log()[token_ids], atol=1e-6)


def test_log_probs_are_renormalised_over_what_top_k_then_top_p_keep() -> None:
    # Probabilities 0.5, 0.25, 0.125, 0.125: top-k 3 leaves 4/7, 2/7, 1/7, of which 4/7 + 2/7 reach top-p 0.6.
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().flip(0)
    logits[0] -= 0.01
    count = 500
    token_ids, log_probs = sample_tokens(
        logits.expand(count, 4),
        torch.arange(count),
        torch.zeros(count, dtype=torch.long),
        temperature=1.0,
        top_p=0.6,
        top_k=3,
    )
    assert log_probs is not None
    assert set(token_ids.tolist()) == {2, 3}
    expected = {3: math.log(2 / 3), 2: math.log(1 / 3)}
    for token_id, log_prob in zip(token_ids.tolist(), log_probs.tolist(), strict=True):
        assert log_prob == pytest.approx(expected[token_id], abs=1e-5)


def test_the_most_likely_token_is_kept_however_small_top_p_is() -> None:
    token_ids, log_probs = sample_tokens(
        torch.tensor([[0.0, 5.0, 1.0]]), torch.tensor([3]), torch.tensor([0]), temperature=1.0, top_p=1e-6
    )
    assert log_probs is not None
    assert token_ids.tolist() == [1]
    assert log_probs.tolist() == pytest.approx([0.0])


def test_temperature_zero_takes_the_most_likely_token_with_its_log_prob_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, math.log(3.0), 0.0]])
    token_ids, log_probs = sample_tokens(logits, torch.tensor([3]), torch.tensor([0]), temperature=0.0, top_k=1)
    assert log_probs is not None
    assert token_ids.tolist() == [1]
    assert log_probs.tolist() == pytest.approx([math.log(0.6)])


def test_log_probs_are_left_out_when_they_are_not_wanted() -> None:
    _, log_probs = sample_tokens(
        torch.zeros(1, 4), torch.tensor([0]), torch.tensor([0]), temperature=1.0, with_log_probs=False
    )
    assert log_probs is None
