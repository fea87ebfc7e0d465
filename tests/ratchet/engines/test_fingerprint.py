import pytest
import torch

from ratchet.engines.fingerprint import fingerprint

WORD = (1 << 63) - 1


def _by_hand(bits: list[int]) -> int:
    """Two rounds of multiply and xor-shift in 63 bits, in integers that do not wrap."""
    total = 0
    for word in bits:
        for factor in (0x1E3779B97F4A7C15, 0x14D049BB133111EB):
            word = (word * factor) & WORD
            word ^= word >> 32
        total += word
    return total & WORD


def test_the_number_is_the_sum_of_the_hashes_of_the_bits() -> None:
    # bfloat16 1.0 is 0x3f80, and -2.0 is 0xc000, negative as a signed word of 16 bits.
    assert fingerprint([torch.tensor([1.0, -2.0, 0.0], dtype=torch.bfloat16)]) == _by_hand([0x3F80, 0xC000 - 0x10000])
    assert fingerprint([torch.tensor([1.0, -1.0])]) == _by_hand([0x3F800000, 0xBF800000 - (1 << 32)])
    # float64 1.0 is 0x3ff0000000000000: its two halves.
    assert fingerprint([torch.tensor([1.0], dtype=torch.float64)]) == _by_hand([0x3FF00000])


def test_no_weights_and_zeros_give_zero() -> None:
    assert fingerprint([]) == 0
    assert fingerprint([torch.zeros(3, 4), torch.empty(0), torch.zeros((), dtype=torch.bfloat16)]) == 0


def test_sums_of_many_elements_wrap_and_stay_in_63_bits() -> None:
    assert fingerprint([torch.full((100_000,), 3.5)]) == _by_hand([0x40600000]) * 100_000 & WORD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_order_fusing_splitting_padding_and_strides_do_not_matter(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(rows, 300, generator=generator).to(dtype) for rows in (300, 5, 7))
    expected = fingerprint([query, key, value])
    assert 0 < expected <= WORD
    assert fingerprint([value, query, key]) == expected
    assert fingerprint([torch.cat([query, key, value])]) == expected
    assert fingerprint(iter([*query.split(7), key.T, value.T.contiguous()])) == expected
    assert fingerprint([torch.nn.functional.pad(query, (0, 3, 0, 9)), key, value]) == expected
    swapped = query.clone()
    swapped[3, 4], swapped[5, 6] = query[5, 6], query[3, 4]
    assert fingerprint([swapped, key, value]) == expected


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, torch.int32), (torch.bfloat16, torch.int16)])
def test_any_single_bit_changes_the_number(dtype: torch.dtype, bits: torch.dtype) -> None:
    weights = torch.randn(70_000, generator=torch.Generator().manual_seed(1)).to(dtype)
    numbers = {fingerprint([weights])}
    for bit in range(torch.iinfo(bits).bits):
        for place in (0, 69_999):
            other = weights.clone()
            flipped = int(other.view(bits)[place]) ^ (1 << bit)
            other.view(bits)[place] = torch.tensor(flipped, dtype=torch.int64).to(bits)
            assert not torch.equal(other.view(bits), weights.view(bits))
            numbers.add(fingerprint([other]))
    assert len(numbers) == 1 + 2 * torch.iinfo(bits).bits


def test_parameters_of_a_model_are_left_alone() -> None:
    layer = torch.nn.Linear(4, 4)
    before = layer.weight.detach().clone()
    assert fingerprint(layer.parameters()) == fingerprint([before, layer.bias.detach()])
    assert torch.equal(layer.weight, before)
    assert layer.weight.requires_grad
