"""Estimators of one reward a completion, against hand-worked numbers, exact arithmetic and properties."""

from collections.abc import Sequence
from fractions import Fraction
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ratchet.algorithms import advantage
from ratchet.algorithms.advantage import group_statistics
from ratchet.algorithms.batch import AdvantageBatch, AdvantageOptions
from ratchet.algorithms.catalog import ADVANTAGES
from tests.pages import code_blocks, run_blocks

RELATIVE = ["grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "grpo_passk", "opo", "gpg"]
ALL = [*RELATIVE, "gdpo", "reinforce_plus_plus_baseline"]


def make_batch(
    rewards: Sequence[float], groups: Sequence[int], lengths: Sequence[int] | None = None, **fields: Any
) -> AdvantageBatch:
    """Rows of the given lengths (1 unless said), each with its reward on its last token."""
    found = torch.tensor(lengths if lengths is not None else [1] * len(rewards))
    width = int(found.max()) if len(found) else 1
    totals = torch.tensor(rewards, dtype=torch.float64)
    mask = torch.arange(width) < found[:, None]
    token_rewards = torch.zeros(len(rewards), width)
    for row, length in enumerate(found.tolist()):
        if length:
            token_rewards[row, length - 1] = totals[row].float()
    fields = {"reward_parts": {"all": totals}, **fields}
    return AdvantageBatch(
        token_rewards=token_rewards, mask=mask, group_index=torch.tensor(groups), rewards=totals, **fields
    )


def of(name: str, batch: AdvantageBatch, **options: Any) -> Tensor:
    """Advantages [B, T] of an estimator."""
    advantages, returns = getattr(advantage, name)(batch, AdvantageOptions(**options))
    assert advantages.shape == returns.shape == batch.mask.shape
    result: Tensor = advantages
    return result


def scalars(name: str, batch: AdvantageBatch, **options: Any) -> list[float]:
    """The advantage of each row, on its first token."""
    found: list[float] = of(name, batch, **options)[:, 0].tolist()
    return found


FIVE = make_batch([1.0, 2.0, 3.0, 0.0, 4.0], [7, 7, 7, 3, 3])


def test_the_statistics_of_two_groups_are_the_numbers_worked_by_hand() -> None:
    mean, std, size = group_statistics(FIVE.rewards, FIVE.group_index)
    assert mean.tolist() == [2.0] * 5
    # Squares 1 + 0 + 1 over 2, and 4 + 4 over 1.
    assert std.tolist() == pytest.approx([1.0, 1.0, 1.0, 8**0.5, 8**0.5], abs=1e-15)
    assert size.tolist() == [3, 3, 3, 2, 2]


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized"])
def test_grpo_divides_by_the_groups_deviation_and_dr_grpo_does_not(name: str) -> None:
    root = 8**0.5
    assert scalars(name, FIVE) == pytest.approx([-1.0, 0.0, 1.0, -2 / root, 2 / root], rel=2e-6)
    assert scalars(name, FIVE, norm_by_std=False) == [-1.0, 0.0, 1.0, -2.0, 2.0]


@pytest.mark.parametrize("name", ["rloo", "rloo_vectorized"])
def test_rloo_subtracts_the_mean_of_the_others(name: str) -> None:
    # 1 - (2 + 3) / 2, 2 - (1 + 3) / 2, 3 - (1 + 2) / 2, and 0 - 4, 4 - 0.
    assert scalars(name, FIVE) == [-1.5, 0.0, 1.5, -4.0, 4.0]


def test_pass_at_k_reinforces_the_best_by_its_lead() -> None:
    assert scalars("grpo_passk", FIVE, norm_by_std=False) == [0.0, 0.0, 1.0, 0.0, 4.0]
    assert scalars("grpo_passk", FIVE) == pytest.approx([0.0, 0.0, 1.0, 0.0, 4 / 8**0.5], rel=2e-6)
    assert scalars("grpo_passk", make_batch([1.0, 1.0, 0.0], [0, 0, 0])) == [0.0, 0.0, 0.0]


def test_opos_baseline_weighs_rewards_by_length() -> None:
    batch = make_batch([1.0, 0.0, 2.0], [0, 0, 0], [1, 2, 3])
    # (1 * 1 + 2 * 0 + 3 * 2) / 6 = 7 / 6
    assert scalars("opo", batch) == pytest.approx([-1 / 6, -7 / 6, 5 / 6])


def test_opo_counts_tokens_inside_the_mask_alone() -> None:
    batch = make_batch([1.0, 0.0], [0, 0], [3, 2])
    batch.mask[0, 1] = False
    assert of("opo", batch).tolist() == [[0.5, 0.0, 0.5], [-0.5, -0.5, 0.0]]


def test_gpg_makes_up_for_the_groups_that_teach_nothing() -> None:
    # 3 of 6 rollouts are in the group whose rewards differ, so alpha is 2; its mean is 1.
    rewards, groups = [0.0, 1.0, 2.0, 1.0, 1.0, 5.0], [0, 0, 0, 1, 1, 2]
    assert scalars("gpg", make_batch(rewards, groups)) == [-2.0, 0.0, 2.0, 0.0, 0.0, 0.0]
    moved = make_batch([reward + 3 for reward in rewards], groups)
    assert scalars("gpg", moved) == [-2.0, 0.0, 2.0, 0.0, 0.0, 0.0]
    # In verl 5 of 6 rewards are not 0: alpha 6 / 5, and the lone rollout keeps 5.
    theirs = scalars("gpg", make_batch(rewards, groups), compat="verl")
    assert theirs == pytest.approx([-1.2, 0.0, 1.2, 0.0, 0.0, 6.0])


def test_reinforce_plus_plus_baseline_whitens_over_tokens() -> None:
    batch = make_batch([0.0, 2.0], [0, 0], [1, 3])
    # Tokens -1, 1, 1, 1: mean 1/2, squares 9/4 + 3/4 over 3 = 1.
    expected = torch.tensor([[-1.5, 0.0, 0.0], [0.5, 0.5, 0.5]])
    torch.testing.assert_close(of("reinforce_plus_plus_baseline", batch), expected)


def test_gdpo_normalises_each_part_before_they_are_added() -> None:
    parts = {
        "correct": torch.tensor([0.0, 1.0], dtype=torch.float64),
        "format": torch.tensor([1000.0, 0.0], dtype=torch.float64),
    }
    batch = make_batch([0.0, 0.0], [0, 0], reward_parts=parts)
    # Each part alone is -1/sqrt(2), 1/sqrt(2), or the reverse, whatever its scale.
    assert scalars("gdpo", batch) == pytest.approx([0.0, 0.0], abs=1e-1)
    weighted = scalars("gdpo", batch, part_weights={"correct": 3.0, "format": 1.0})
    # (-2, 2) / sqrt(2) before whitening: mean 0, variance 4.
    assert weighted == pytest.approx([-1 / 2**0.5, 1 / 2**0.5], rel=1e-5)
    assert scalars("gdpo", batch, part_weights={"format": 1.0}) == pytest.approx([1 / 2**0.5, -1 / 2**0.5], rel=1e-5)


def test_gdpo_names_the_part_that_is_missing() -> None:
    with pytest.raises(ValueError, match="'style' is missing"):
        of("gdpo", FIVE, part_weights={"all": 1.0, "style": 1.0})
    with pytest.raises(ValueError, match="got none"):
        of("gdpo", make_batch([1.0, 0.0], [0, 0], reward_parts={}))


@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.parametrize("norm_by_std", [True, False])
def test_a_lone_rollout_gets_zero(name: str, norm_by_std: bool) -> None:
    found = scalars(name, make_batch([5.0, 1.0, 0.0], [0, 1, 1]), norm_by_std=norm_by_std)
    assert found[0] == 0.0
    assert found[1] > 0.0


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("reward", [0.3, 0.7, 0.9, -1e-9, 1e30])
@pytest.mark.parametrize("size", [2, 7, 8])
def test_a_constant_group_gets_zero_even_where_its_reward_is_inexact(name: str, reward: float, size: int) -> None:
    batch = make_batch([float(torch.tensor(reward))] * size, [0] * size, list(range(1, size + 1)))
    assert not of(name, batch).any()
    mean, std, _ = group_statistics(batch.rewards, batch.group_index)
    assert mean.tolist() == batch.rewards.tolist()
    assert not std.any()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_refused_with_its_row(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match="row 2"):
        of(name, make_batch([0.0, 1.0, bad, bad], [0, 0, 1, 1]))


@pytest.mark.parametrize("name", ALL)
def test_an_empty_completion_counts_in_its_group_and_gets_nothing(name: str) -> None:
    found = of(name, make_batch([0.0, 0.5, 1.0, 0.2], [0, 0, 1, 1], [0, 2, 2, 1]))
    assert not found[0].any()
    assert found[1, 0].item() != 0.0 or name == "opo"


def test_an_empty_completions_reward_is_in_the_mean_of_the_others() -> None:
    batch = make_batch([0.0, 1.0], [0, 0], [0, 1])
    assert of("grpo", batch, norm_by_std=False).tolist() == [[0.0], [0.5]]


@pytest.mark.parametrize("name", ALL)
def test_a_batch_of_empty_completions_is_zero(name: str) -> None:
    batch = make_batch([1.0, 0.0], [0, 0], [1, 1])
    batch.mask[:] = False
    assert not of(name, batch).any()


@pytest.mark.parametrize("name", ALL)
def test_no_rollouts_give_no_advantages(name: str) -> None:
    batch = AdvantageBatch(
        token_rewards=torch.zeros(0, 3),
        mask=torch.zeros(0, 3, dtype=torch.bool),
        group_index=torch.zeros(0, dtype=torch.long),
        rewards=torch.zeros(0, dtype=torch.float64),
        reward_parts={"all": torch.zeros(0, dtype=torch.float64)},
    )
    assert of(name, batch).shape == (0, 3)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_result_is_float32_unless_the_rewards_are_float64(name: str, dtype: torch.dtype) -> None:
    batch = make_batch([0.0, 1.0], [0, 0])
    wide = AdvantageBatch(
        token_rewards=batch.token_rewards.to(dtype),
        mask=batch.mask,
        group_index=batch.group_index,
        rewards=batch.rewards,
        reward_parts=batch.reward_parts,
    )
    assert of(name, wide).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[3\] and \[2\]"):
        group_statistics(torch.zeros(3), torch.zeros(2, dtype=torch.long))


GROUPS = st.lists(st.tuples(st.integers(-100, 100), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=20)
Rows = list[tuple[int, int, int]]


def batch_of(rows: Rows) -> AdvantageBatch:
    rewards, groups, lengths = zip(*rows, strict=True)
    return make_batch([reward / 7 for reward in rewards], groups, lengths)


@given(GROUPS)
def test_a_groups_advantages_sum_to_zero_and_match_exact_arithmetic(rows: Rows) -> None:
    rewards = torch.tensor([reward / 7 for reward, _, _ in rows], dtype=torch.float64)
    group = [index for _, index, _ in rows]
    batch = make_batch(rewards.tolist(), group)
    grpo, rloo = scalars("grpo", batch), scalars("rloo", batch)
    for wanted in set(group):
        members = [row for row, index in enumerate(group) if index == wanted]
        exact = [Fraction(rewards[row].item()) for row in members]
        mean = sum(exact) / len(exact)
        variance = sum((value - mean) ** 2 for value in exact) / max(len(exact) - 1, 1)
        assert sum(grpo[row] for row in members) == pytest.approx(0.0, abs=1e-5)
        for row, value in zip(members, exact, strict=True):
            assert grpo[row] == pytest.approx(float(value - mean) / (float(variance) ** 0.5 + 1e-6), abs=1e-5)
            others = [rewards[other].item() for other in members if other != row]
            left_out = float(value) - sum(others) / len(others) if others else 0.0
            assert rloo[row] == pytest.approx(left_out, rel=1e-6, abs=1e-5)


@given(GROUPS, st.integers(-1000, 1000))
def test_a_constant_added_to_all_rewards_changes_nothing(rows: Rows, shift: int) -> None:
    moved = [(reward + 7 * shift, group, length) for reward, group, length in rows]
    for name in ALL:
        torch.testing.assert_close(of(name, batch_of(moved)), of(name, batch_of(rows)), atol=1e-4, rtol=1e-4)


@given(GROUPS, st.randoms(use_true_random=False))
def test_rollouts_belong_to_a_group_by_its_number_and_never_by_position(rows: Rows, random: Random) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)
    for name in ALL:
        if name == "grpo_passk":
            continue  # which of two equal winners has the 0 is all the same, and so is which comes first
        torch.testing.assert_close(
            of(name, batch_of([rows[row] for row in order])), of(name, batch_of(rows))[order], atol=1e-5, rtol=1e-5
        )


@given(GROUPS, st.integers(1, 4))
def test_padding_changes_nothing_even_if_it_is_nan(rows: Rows, columns: int) -> None:
    batch = batch_of(rows)
    size, width = batch.mask.shape
    wide = AdvantageBatch(
        token_rewards=torch.cat([batch.token_rewards, torch.full((size, columns), float("nan"))], 1),
        mask=torch.cat([batch.mask, torch.zeros(size, columns, dtype=torch.bool)], 1),
        group_index=batch.group_index,
        rewards=batch.rewards,
        reward_parts=batch.reward_parts,
    )
    for name in ALL:
        found = of(name, wide)
        assert torch.equal(found[:, :width], of(name, batch))
        assert not found[:, width:].any()


def test_verls_arithmetic_repeats_its_accidents() -> None:
    lone, eight = make_batch([5.0], [0]), make_batch([0.9] * 8, [0] * 8)
    assert scalars("grpo", lone, compat="verl") == pytest.approx([5.0], rel=2e-6)
    assert scalars("grpo", eight, compat="verl") == pytest.approx([-0.056] * 8, abs=5e-4)
    assert scalars("rloo", lone, compat="verl") == [5.0]
    assert scalars("rloo_vectorized", lone, compat="verl") == [0.0]
    assert scalars("opo", lone, compat="verl") == [5.0]
    with pytest.raises(ValueError, match="row 0"):
        of("grpo_passk", lone, compat="verl")
    for name in ("gdpo", "reinforce_plus_plus_baseline"):
        with pytest.raises(ValueError, match="two values"):
            of(name, lone, compat="verl")


@given(GROUPS)
def test_verls_arithmetic_is_ours_where_no_accident_happens(rows: Rows) -> None:
    batch = batch_of(rows)
    _, std, size = group_statistics(batch.rewards, batch.group_index)
    ordinary = (size > 1) & (std > 1e-3)
    for name in ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized"):
        ours, theirs = of(name, batch), of(name, batch, compat="verl")
        torch.testing.assert_close(theirs[ordinary], ours[ordinary], atol=1e-4, rtol=1e-4)


def test_the_estimator_of_the_documentation_runs() -> None:
    run_blocks("docs/algorithms.md", code_blocks("docs/algorithms.md"))
    batch = make_batch([1.0, 2.0, -3.0], [5, 5, 9], [2, 1, 2])
    advantages, _ = ADVANTAGES.get("best_of_group").function()(batch, AdvantageOptions())
    assert advantages.tolist() == [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
