"""GAE, REINFORCE++ and ReMax against hand-worked numbers, the definitions written out in float64, and properties."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ratchet.algorithms.advantage_token import gae, reinforce_plus_plus, remax
from ratchet.algorithms.batch import AdvantageBatch, AdvantageOptions

NAN = float("nan")
ESTIMATORS = [gae, reinforce_plus_plus, remax]


def make_batch(token_rewards: Any, mask: Any, values: Any = None, greedy: Any = None) -> AdvantageBatch:
    """A batch of which each row is a group of its own."""
    rewards, found = torch.as_tensor(token_rewards), torch.as_tensor(mask).bool()
    return AdvantageBatch(
        token_rewards=rewards,
        mask=found,
        group_index=torch.arange(len(rewards)),
        rewards=torch.where(found, rewards, 0).double().sum(1),
        values=torch.zeros_like(rewards) if values is None else torch.as_tensor(values),
        greedy_rewards=torch.zeros(len(rewards)) if greedy is None else torch.as_tensor(greedy),
    )


def random_batch(seed: int, rows: int, tokens: int, *, with_holes: bool, dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, tokens + 1, (rows, 1), generator=generator)
    mask = torch.arange(tokens) < lengths
    if with_holes:
        mask &= torch.rand(rows, tokens, generator=generator) > 0.3
    rewards = torch.randn(rows, tokens, generator=generator, dtype=dtype)
    values = torch.randn(rows, tokens, generator=generator, dtype=dtype)
    greedy = torch.randn(rows, generator=generator, dtype=dtype)
    return make_batch(torch.where(mask, rewards, NAN), mask, torch.where(mask, values, NAN), greedy)


def inside(values: Tensor, batch: AdvantageBatch) -> list[list[float]]:
    """Each row's numbers inside the mask."""
    return [row[mask].tolist() for row, mask in zip(values, batch.mask, strict=True)]


def test_gae_is_the_number_worked_by_hand() -> None:
    batch = make_batch([[0.0, 1.0, 0.0]], [[1, 1, 0]], [[0.5, 0.25, NAN]])
    advantages, returns = gae(batch, AdvantageOptions(gamma=0.5, lam=0.5))
    # delta_1 = 1 - 0.25; delta_0 = 0.5 * 0.25 - 0.5 = -0.375; A_0 = -0.375 + 0.25 * 0.75
    assert advantages.tolist() == [[-0.1875, 0.75, 0.0]]
    assert returns.tolist() == [[0.3125, 1.0, 0.0]]


def test_a_tools_token_is_no_step_of_gae() -> None:
    options = AdvantageOptions(gamma=0.5, lam=0.5)
    holes = make_batch([[0.0, 9.0, 9.0, 1.0]], [[1, 0, 0, 1]], [[0.5, NAN, 7.0, 0.25]])
    advantages, returns = gae(holes, options)
    assert advantages.tolist() == [[-0.1875, 0.0, 0.0, 0.75]]
    assert returns.tolist() == [[0.3125, 0.0, 0.0, 1.0]]


def test_reinforce_plus_plus_discounts_and_whitens() -> None:
    batch = make_batch([[0.0, 0.0, 1.0], [0.0, 3.0, 0.0]], [[1, 1, 1], [1, 0, 0]])
    advantages, returns = reinforce_plus_plus(batch, AdvantageOptions(gamma=0.5))
    assert returns.tolist() == [[0.25, 0.5, 1.0], [0.0, 0.0, 0.0]]
    # Mean 7/16 of four; squares (9 + 1 + 81 + 49) / 256 over 3.
    deviation = (140 / 256 / 3) ** 0.5
    expected = [(value - 7 / 16) / deviation for value in (0.25, 0.5, 1.0, 0.0)]
    assert [*advantages[0].tolist(), advantages[1, 0].item()] == pytest.approx(expected, rel=1e-5)
    assert not advantages[1, 1:].any()


def test_remax_compares_with_the_greedy_completion() -> None:
    batch = make_batch([[0.5, 0.0, 1.0], [1.0, 4.0, 0.0]], [[1, 0, 1], [1, 0, 0]], greedy=[1.0, 0.25])
    advantages, returns = remax(batch, AdvantageOptions(gamma=0.5))
    assert returns.tolist() == [[1.5, 0.0, 1.0], [1.0, 0.0, 0.0]]
    assert advantages.tolist() == [[0.5, 0.0, 0.0], [0.75, 0.0, 0.0]]


DISCOUNTS = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])
SHAPES = (st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 8), st.booleans())


@given(*SHAPES, DISCOUNTS, DISCOUNTS)
def test_gae_is_the_double_sum_of_its_definition(
    seed: int, rows: int, tokens: int, with_holes: bool, gamma: float, lam: float
) -> None:
    batch = random_batch(seed, rows, tokens, with_holes=with_holes)
    assert batch.values is not None
    advantages, returns = gae(batch, AdvantageOptions(gamma=gamma, lam=lam))
    rewards, values = inside(batch.token_rewards, batch), inside(batch.values, batch)
    for row, (reward, value) in enumerate(zip(rewards, values, strict=True)):
        deltas = [r + gamma * v_next - v for r, v, v_next in zip(reward, value, [*value[1:], 0.0], strict=False)]
        expected = [
            sum((gamma * lam) ** later * delta for later, delta in enumerate(deltas[place:]))
            for place in range(len(deltas))
        ]
        assert advantages[row][batch.mask[row]].tolist() == pytest.approx(expected, abs=1e-9)
        summed = [a + v for a, v in zip(expected, value, strict=True)]
        assert returns[row][batch.mask[row]].tolist() == pytest.approx(summed, abs=1e-9)
    assert not advantages[~batch.mask].any()
    assert not returns[~batch.mask].any()


@given(*SHAPES, DISCOUNTS)
def test_with_lam_one_gae_is_the_discounted_return_minus_the_value(
    seed: int, rows: int, tokens: int, with_holes: bool, gamma: float
) -> None:
    batch = random_batch(seed, rows, tokens, with_holes=with_holes)
    assert batch.values is not None
    _, returns = gae(batch, AdvantageOptions(gamma=gamma, lam=1.0))
    _, discounted = reinforce_plus_plus(batch, AdvantageOptions(gamma=gamma))
    torch.testing.assert_close(returns, discounted, atol=1e-9, rtol=0)


@given(*SHAPES, DISCOUNTS)
def test_a_return_is_the_discounted_sum_of_the_rewards_from_there_on(
    seed: int, rows: int, tokens: int, with_holes: bool, gamma: float
) -> None:
    batch = random_batch(seed, rows, tokens, with_holes=with_holes)
    _, returns = reinforce_plus_plus(batch, AdvantageOptions(gamma=gamma))
    for row, reward in enumerate(inside(batch.token_rewards, batch)):
        expected = [sum(gamma**k * later for k, later in enumerate(reward[place:])) for place in range(len(reward))]
        assert returns[row][batch.mask[row]].tolist() == pytest.approx(expected, abs=1e-9)
    assert not returns[~batch.mask].any()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(*SHAPES, DISCOUNTS)
def test_rows_do_not_depend_on_their_order_and_padding_changes_nothing(
    estimator: Any, seed: int, rows: int, tokens: int, with_holes: bool, gamma: float
) -> None:
    batch = random_batch(seed, rows, tokens, with_holes=with_holes)
    assert batch.values is not None
    assert batch.greedy_rewards is not None
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    pad = torch.full((rows, 3), NAN, dtype=torch.float64)
    moved = make_batch(
        torch.cat([batch.token_rewards, pad], 1)[order],
        torch.cat([batch.mask, torch.zeros(rows, 3, dtype=torch.bool)], 1)[order],
        torch.cat([batch.values, pad], 1)[order],
        batch.greedy_rewards[order],
    )
    options = AdvantageOptions(gamma=gamma, lam=0.9)
    for found, expected in zip(estimator(moved, options), estimator(batch, options), strict=True):
        torch.testing.assert_close(found[:, :tokens], expected[order], atol=1e-9, rtol=1e-9)
        assert not found[:, tokens:].any()


@pytest.mark.parametrize("with_holes", [False, True])
def test_many_blocks_of_rows_give_what_each_row_gives_alone(with_holes: bool) -> None:
    batch = random_batch(5, 9000, 600, with_holes=with_holes, dtype=torch.float32)
    assert batch.values is not None
    options = AdvantageOptions(gamma=0.99, lam=0.95)
    advantages, returns = gae(batch, options)
    for row in (0, 437, 4368, 6990, 8999):
        alone = make_batch(*(field[row : row + 1] for field in (batch.token_rewards, batch.mask, batch.values)))
        ours, theirs = gae(alone, options)
        torch.testing.assert_close(advantages[row : row + 1], ours, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(returns[row : row + 1], theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("with_holes", [False, True])
def test_nothing_that_is_given_is_written_to(with_holes: bool) -> None:
    batch = random_batch(1, 1, 9, with_holes=with_holes)
    assert batch.values is not None
    before = batch.token_rewards.clone(), batch.values.clone()
    for estimator in ESTIMATORS:
        estimator(batch, AdvantageOptions(gamma=0.9, lam=0.9))
    torch.testing.assert_close((batch.token_rewards, batch.values), before, equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf")])
def test_what_is_not_finite_inside_the_mask_is_refused_with_its_row(bad: float) -> None:
    good, wrong, mask = [[1.0, 0.0]] * 3, [[1.0, 0.0], [0.0, 0.0], [bad, 0.0]], [[1, 1]] * 3
    for estimator in ESTIMATORS:
        with pytest.raises(ValueError, match=r"token_rewards inside the mask, got .* in row 2"):
            estimator(make_batch(wrong, mask), AdvantageOptions())
    with pytest.raises(ValueError, match=r"values inside the mask, got .* in row 2"):
        gae(make_batch(good, mask, wrong), AdvantageOptions())
    with pytest.raises(ValueError, match=r"greedy_rewards, got .* in row 1"):
        remax(make_batch(good, mask, greedy=[0.0, bad, 0.0]), AdvantageOptions())


def test_large_finite_rewards_are_not_refused() -> None:
    batch = make_batch([[3e38], [3e38]], [[1], [1]])
    assert remax(batch, AdvantageOptions())[0].tolist() == batch.token_rewards.tolist()


def test_an_estimator_says_what_it_lacks() -> None:
    zeros, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    batch = AdvantageBatch(
        token_rewards=zeros, mask=mask, group_index=torch.zeros(1).long(), rewards=torch.zeros(1).double()
    )
    with pytest.raises(ValueError, match="no values; gae needs them"):
        gae(batch, AdvantageOptions())
    with pytest.raises(ValueError, match="no greedy_rewards; remax needs them"):
        remax(batch, AdvantageOptions())


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(("rows", "tokens"), [(0, 3), (2, 0), (2, 1), (3, 3)])
def test_batches_without_a_token_give_zeros(estimator: Any, rows: int, tokens: int) -> None:
    batch = make_batch(torch.full((rows, tokens), NAN), torch.zeros(rows, tokens))
    for found in estimator(batch, AdvantageOptions(gamma=0.9, lam=0.9)):
        assert found.shape == (rows, tokens)
        assert not found.any()


def test_equal_returns_are_whitened_to_zero_and_to_rounding_by_verls_arithmetic() -> None:
    batch = make_batch(torch.full((8, 1), 0.9), torch.ones(8, 1))
    assert not reinforce_plus_plus(batch, AdvantageOptions())[0].any()


def test_verls_gae_whitens_reaches_outside_the_mask_and_is_poisoned_from_there() -> None:
    rewards, mask, values = [[1.0, 0.0], [0.0, 0.0]], [[1, 0], [1, 0]], [[0.0, 5.0], [0.0, 5.0]]
    options = AdvantageOptions(compat="verl")
    advantages, returns = gae(make_batch(rewards, mask, values), options)
    # 1 and 0 are whitened with mean 1/2 and variance 1/2; what is outside, 0, likewise.
    root = 0.5**0.5
    torch.testing.assert_close(advantages, torch.tensor([[root, -root], [-root, -root]]))
    assert returns.tolist() == [[1.0, 5.0], [0.0, 5.0]]
    poisoned, _ = gae(make_batch(rewards, mask, [[0.0, NAN], [0.0, 5.0]]), options)
    assert bool(poisoned.isnan().all())
    with pytest.raises(ValueError, match="two values"):
        gae(make_batch([[1.0]], [[1]], [[0.0]]), options)
