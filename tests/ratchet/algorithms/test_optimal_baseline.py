"""The optimal token baseline against hand-worked numbers and its definition written out row by row."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ratchet.algorithms.batch import AdvantageBatch, AdvantageOptions
from ratchet.algorithms.optimal_baseline import optimal_token_baseline, tir_optimal_token_baseline

NAN = float("nan")
FORMS = [optimal_token_baseline, tir_optimal_token_baseline]
OURS, VERLS = AdvantageOptions(), AdvantageOptions(compat="verl")


def make_batch(token_rewards: Tensor, mask: Tensor, groups: Any, energy: Tensor, weights: Any = None) -> AdvantageBatch:
    """Tokens of probability 1/2, so that each's energy is its sum of squared probabilities."""
    return AdvantageBatch(
        token_rewards=token_rewards,
        mask=mask.bool(),
        group_index=torch.as_tensor(groups),
        rewards=torch.where(mask.bool(), token_rewards, 0).double().sum(1),
        log_probs=torch.where(mask.bool(), torch.full_like(token_rewards, 0.5).log(), NAN),
        sum_pi_squared=energy,
        importance_weights=weights,
    )


def random_batch(seed: int, rows: int, tokens: int, *, with_holes: bool) -> AdvantageBatch:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(tokens) < torch.randint(0, tokens + 1, (rows, 1), generator=generator)
    if with_holes:
        mask &= torch.rand(rows, tokens, generator=generator) > 0.3
    rewards, energy, weights = (
        torch.where(mask, torch.rand(rows, tokens, generator=generator, dtype=torch.float64), NAN) for _ in range(3)
    )
    return make_batch(rewards, mask, torch.randint(0, 3, (rows,), generator=generator), energy, weights)


def slow(batch: AdvantageBatch, *, is_compact: bool) -> Tensor:
    """The definition, one row and one token at a time."""
    assert batch.sum_pi_squared is not None
    assert batch.importance_weights is not None
    found = torch.zeros_like(batch.token_rewards)
    cells: dict[tuple[int, int], list[tuple[int, int, float, float]]] = {}
    sizes = torch.bincount(batch.group_index)
    for row, group in enumerate(batch.group_index.tolist()):
        places = batch.mask[row].nonzero()[:, 0].tolist()
        energy = 0.0
        for order, place in enumerate(places):
            weight = batch.importance_weights[row, place].item()
            energy += batch.sum_pi_squared[row, place].item() * weight**2
            to_go = sum(batch.token_rewards[row, later].item() for later in places[order:])
            cells.setdefault((group, order if is_compact else place), []).append((row, place, to_go, energy))
    for (group, _), members in cells.items():
        total = sum(energy for _, _, _, energy in members) + 1e-8
        baseline = sum(to_go * energy for _, _, to_go, energy in members) / total
        for row, place, to_go, _ in members:
            if sizes[group] > 1:
                found[row, place] = to_go - (baseline if len(members) > 1 else 0.0)
    return found


def test_each_token_is_compared_with_the_returns_weighted_by_energy() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    batch = make_batch(rewards, torch.ones(2, 2), [0, 0], torch.tensor([[0.5, 0.5], [0.25, 0.0]]))
    # Energies so far 0.5 and 1; 0.25 and 0.25. Baselines 0.5 / 0.75 and 1 / 1.25.
    for form in FORMS:
        advantages, returns = form(batch, OURS)
        torch.testing.assert_close(advantages, torch.tensor([[1 / 3, 0.2], [-2 / 3, -0.8]]))
        assert returns.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_importance_weights_enter_squared() -> None:
    rewards, energy = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.5], [0.5]])
    batch = make_batch(rewards, torch.ones(2, 1), [0, 0], energy, torch.tensor([[2.0], [1.0]]))
    # 1 * (0.5 * 4) / (0.5 * 4 + 0.5)
    for form in FORMS:
        torch.testing.assert_close(form(batch, OURS)[0], torch.tensor([[0.2], [-0.8]]))


def test_where_one_row_alone_has_a_token_its_return_stands() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.5, NAN, NAN]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    batch = make_batch(rewards, mask, [0, 0], torch.full((2, 3), 0.5))
    for form in FORMS:
        torch.testing.assert_close(form(batch, OURS)[0], torch.tensor([[0.25, 1.0, 1.0], [-0.25, 0.0, 0.0]]))


def test_the_two_forms_differ_in_what_a_place_is() -> None:
    rewards = torch.tensor([[0.0, NAN, 1.0], [0.0, 0.0, 0.0]])
    batch = make_batch(rewards, torch.tensor([[1, 0, 1], [1, 1, 1]]), [0, 0], torch.full((2, 3), 0.5))
    by_place, by_order = (form(batch, OURS)[0] for form in FORMS)
    # Energies 1/2 and 1; 1/2, 1 and 3/2.
    torch.testing.assert_close(by_place, torch.tensor([[0.5, 0.0, 0.6], [-0.5, 0.0, -0.4]]))
    torch.testing.assert_close(by_order, torch.tensor([[0.5, 0.0, 0.5], [-0.5, -0.5, 0.0]]))


@pytest.mark.parametrize("form", FORMS)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 7), st.booleans())
def test_the_baseline_is_the_one_of_the_definition(
    form: Any, seed: int, rows: int, tokens: int, with_holes: bool
) -> None:
    batch = random_batch(seed, rows, tokens, with_holes=with_holes)
    advantages, returns = form(batch, OURS)
    expected = slow(batch, is_compact=form is tir_optimal_token_baseline)
    torch.testing.assert_close(advantages, expected, atol=1e-7, rtol=1e-6)
    assert not returns[~batch.mask].any()


@pytest.mark.parametrize("form", FORMS)
@given(st.integers(0, 10**6), st.booleans())
def test_order_and_padding_change_nothing(form: Any, seed: int, with_holes: bool) -> None:
    batch = random_batch(seed, 6, 5, with_holes=with_holes)
    assert batch.sum_pi_squared is not None
    assert batch.importance_weights is not None
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    pad = torch.full((6, 2), NAN, dtype=torch.float64)
    rewards, energy, weights = (
        torch.cat([field, pad], 1)[order]
        for field in (batch.token_rewards, batch.sum_pi_squared, batch.importance_weights)
    )
    mask = torch.cat([batch.mask, torch.zeros(6, 2, dtype=torch.bool)], 1)[order]
    moved = form(make_batch(rewards, mask, batch.group_index[order], energy, weights), OURS)
    for found, expected in zip(moved, form(batch, OURS), strict=True):
        torch.testing.assert_close(found[:, :5], expected[order], atol=1e-9, rtol=1e-9)
        assert not found[:, 5:].any()


def test_a_batch_of_many_blocks_agrees_with_its_groups_alone() -> None:
    batch = random_batch(3, 400, 1500, with_holes=True)
    assert batch.sum_pi_squared is not None
    assert batch.importance_weights is not None
    rows = batch.group_index == 1
    fields = (batch.token_rewards, batch.mask, batch.group_index, batch.sum_pi_squared, batch.importance_weights)
    alone = make_batch(*(field[rows] for field in fields))
    for form in FORMS:
        torch.testing.assert_close(form(batch, OURS)[0][rows], form(alone, OURS)[0])


@pytest.mark.parametrize("form", FORMS)
def test_a_lone_rollout_gets_zero_and_keeps_its_return_in_verls_arithmetic(form: Any) -> None:
    batch = make_batch(torch.tensor([[0.0, 2.0]]), torch.ones(1, 2), [0], torch.full((1, 2), 0.5))
    assert form(batch, OURS)[0].tolist() == [[0.0, 0.0]]
    assert form(batch, OURS)[1].tolist() == [[2.0, 2.0]]
    assert form(batch, VERLS)[0].tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["token_rewards", "sum_pi_squared", "importance_weights"])
def test_what_is_not_finite_inside_the_mask_is_refused_with_its_row(form: Any, name: str) -> None:
    batch = random_batch(0, 6, 5, with_holes=True)
    row = int(batch.mask.any(1).nonzero()[-1])
    getattr(batch, name)[row, int(batch.mask[row].nonzero()[0])] = NAN
    # A lone row is not weighed, so its energy is not read.
    batch.group_index[:] = 0
    with pytest.raises(ValueError, match=f"{name} inside the mask, got nan in row {row}"):
        form(batch, OURS)


@pytest.mark.parametrize("form", FORMS)
def test_batches_without_a_token_give_zeros_and_a_missing_field_is_named(form: Any) -> None:
    zeros = torch.zeros(3, 2)
    assert not form(make_batch(zeros, zeros, [0, 0, 1], zeros), OURS)[0].any()
    bare = AdvantageBatch(
        token_rewards=zeros, mask=zeros.bool(), group_index=torch.zeros(3).long(), rewards=torch.zeros(3).double()
    )
    with pytest.raises(ValueError, match="no log_probs"):
        form(bare, OURS)
