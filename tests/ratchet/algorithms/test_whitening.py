"""Masked mean, variance and whitening, against numpy in float64 and hand-worked numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ratchet.algorithms.whitening import masked_mean, masked_var, masked_whiten

NAN = float("nan")


def random_case(seed: int, *, rows: int = 7, tokens: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, tokens, generator=generator)
    return values, torch.rand(rows, tokens, generator=generator) > 0.4


def test_three_values_are_whitened_to_the_numbers_worked_by_hand() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, NAN]])
    mask = torch.tensor([[True, True], [True, False]])
    assert masked_mean(values, mask).item() == 2.0
    assert masked_var(values, mask).item() == 1.0
    assert masked_whiten(values, mask).tolist() == [[pytest.approx(-1.0), 0.0], [pytest.approx(1.0), 0.0]]
    kept = masked_whiten(values, mask, shift_mean=False)
    assert kept.tolist() == [[pytest.approx(1.0), 2.0], [pytest.approx(3.0), 0.0]]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_statistics_are_those_of_numpy(seed: int, dtype: torch.dtype) -> None:
    values, mask = random_case(seed)
    values = values.to(dtype)
    inside = values[mask].double().numpy()
    assert masked_mean(values, mask).item() == pytest.approx(inside.mean(), rel=1e-5, abs=1e-7)
    assert masked_var(values, mask).item() == pytest.approx(inside.var(ddof=1), rel=1e-5)
    whitened = masked_whiten(values, mask)
    assert whitened.dtype == dtype
    expected = (inside - inside.mean()) / np.sqrt(inside.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(whitened[mask].numpy(), expected, rtol=1e-4, atol=1e-5)
    assert not whitened[~mask].any()


def test_a_batch_of_many_blocks_is_whitened_as_one() -> None:
    values, mask = random_case(3, rows=700, tokens=1000)
    whitened = masked_whiten(values * 3 + 5, mask)
    assert masked_mean(whitened, mask).item() == pytest.approx(0.0, abs=1e-5)
    assert masked_var(whitened, mask).item() == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("value", [0.9, 0.3, -1e-9, 1e30])
def test_equal_values_become_zero_even_where_float32_cannot_hold_them(value: float) -> None:
    values, mask = torch.full((5, 7), value), torch.ones(5, 7, dtype=torch.bool)
    mask[2, 3] = False
    assert masked_var(values, mask).item() == 0.0
    assert not masked_whiten(values, mask).any()
    assert masked_whiten(values, mask, shift_mean=False)[mask].unique().tolist() == pytest.approx([value], rel=1e-6)


def test_one_value_and_none_are_zero() -> None:
    values, mask = torch.tensor([[4.0, NAN]]), torch.tensor([[True, False]])
    assert masked_whiten(values, mask).tolist() == [[0.0, 0.0]]
    assert masked_whiten(values, torch.zeros_like(mask)).tolist() == [[0.0, 0.0]]
    assert masked_mean(values, torch.zeros_like(mask)).item() == 0.0
    assert masked_var(values, mask).item() == 0.0


@pytest.mark.parametrize("count", [0, 1])
def test_verls_arithmetic_refuses_fewer_than_two_values(count: int) -> None:
    mask = torch.arange(3)[None] < count
    with pytest.raises(ValueError, match="two values"):
        masked_whiten(torch.ones(1, 3), mask, compat="verl")


def test_verls_arithmetic_leaves_numbers_outside_the_mask_and_agrees_inside() -> None:
    values, mask = random_case(1)
    theirs, ours = masked_whiten(values, mask, compat="verl"), masked_whiten(values, mask)
    torch.testing.assert_close(theirs[mask], ours[mask], atol=1e-6, rtol=1e-5)
    assert bool(theirs[~mask].all())


@given(st.integers(0, 10**6), st.integers(1, 5))
def test_padding_changes_nothing(seed: int, columns: int) -> None:
    values, mask = random_case(seed, rows=3, tokens=4)
    wide = torch.cat([values, torch.full((3, columns), NAN)], 1)
    wide_mask = torch.cat([mask, torch.zeros(3, columns, dtype=torch.bool)], 1)
    whitened = masked_whiten(wide, wide_mask)
    torch.testing.assert_close(whitened[:, :4], masked_whiten(values, mask), atol=1e-6, rtol=1e-5)
    assert not whitened[:, 4:].any()
