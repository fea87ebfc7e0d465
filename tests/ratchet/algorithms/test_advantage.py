"""Group-relative advantages against hand-worked numbers, properties and numbers computed by verl."""

import json
from fractions import Fraction
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratchet.algorithms.advantage import group_statistics, grpo_advantages


def test_two_groups_get_the_numbers_worked_by_hand() -> None:
    rewards = torch.tensor([1.0, 2.0, 3.0, 0.0, 4.0])
    group = torch.tensor([7, 7, 7, 3, 3])
    mean, std, size = group_statistics(rewards, group)
    assert mean.tolist() == [2.0, 2.0, 2.0, 2.0, 2.0]
    # Squares 1 + 0 + 1 over 2, and 4 + 4 over 1.
    assert std.tolist() == pytest.approx([1.0, 1.0, 1.0, 8**0.5, 8**0.5], abs=1e-15)
    assert size.tolist() == [3, 3, 3, 2, 2]
    expected = [-1 / 1.000001, 0.0, 1 / 1.000001, -2 / (8**0.5 + 1e-6), 2 / (8**0.5 + 1e-6)]
    assert grpo_advantages(rewards, group).tolist() == pytest.approx(expected, abs=1e-15)
    assert grpo_advantages(rewards, group, norm_by_std=False).tolist() == [-1.0, 0.0, 1.0, -2.0, 2.0]


def test_a_larger_epsilon_shrinks_the_advantages() -> None:
    rewards = torch.tensor([0.0, 2.0])
    advantages = grpo_advantages(rewards, torch.tensor([0, 0]), epsilon=2.0 - 2**0.5)
    assert advantages.tolist() == pytest.approx([-0.5, 0.5], abs=1e-15)


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_a_lone_rollout_gets_zero(norm_by_std: bool) -> None:
    rewards = torch.tensor([5.0, 1.0, 0.0])
    advantages = grpo_advantages(rewards, torch.tensor([0, 1, 1]), norm_by_std=norm_by_std)
    assert advantages[0].item() == 0.0
    assert advantages[1].item() > 0.0


@pytest.mark.parametrize("reward", [0.3, 0.7, 0.9, -1e-9, 1e30])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_group_gets_zero_even_where_its_reward_is_inexact(
    reward: float, size: int, dtype: torch.dtype
) -> None:
    rewards = torch.full((size,), reward, dtype=dtype)
    group = torch.zeros(size, dtype=torch.long)
    assert grpo_advantages(rewards, group).tolist() == [0.0] * size
    assert grpo_advantages(rewards, group, norm_by_std=False).tolist() == [0.0] * size
    mean, std, _ = group_statistics(rewards, group)
    assert mean.tolist() == rewards.double().tolist()
    assert std.tolist() == [0.0] * size


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_refused_with_its_row(bad: float) -> None:
    with pytest.raises(ValueError, match="row 2"):
        grpo_advantages(torch.tensor([0.0, 1.0, bad, bad]), torch.tensor([0, 0, 1, 1]))


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[3\] and \[2\]"):
        grpo_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.long))


def test_no_rollouts_give_no_advantages() -> None:
    assert grpo_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long)).tolist() == []


GROUPS = st.lists(st.tuples(st.integers(-100, 100), st.integers(0, 3)), min_size=1, max_size=20)


@given(GROUPS)
def test_the_advantages_of_each_group_sum_to_zero_and_match_exact_arithmetic(rows: list[tuple[int, int]]) -> None:
    rewards = torch.tensor([reward / 7 for reward, _ in rows], dtype=torch.float64)
    group = torch.tensor([index for _, index in rows])
    advantages = grpo_advantages(rewards, group)
    for wanted in set(group.tolist()):
        members = [row for row, index in enumerate(group.tolist()) if index == wanted]
        assert sum(advantages[members].tolist()) == pytest.approx(0.0, abs=1e-9)
        exact = [Fraction(rewards[row].item()) for row in members]
        mean = sum(exact) / len(exact)
        variance = sum((value - mean) ** 2 for value in exact) / max(len(exact) - 1, 1)
        slow = [float(value - mean) / (float(variance) ** 0.5 + 1e-6) for value in exact]
        if len(set(exact)) > 1:
            assert advantages[members].tolist() == pytest.approx(slow, abs=1e-9)


@given(GROUPS, st.integers(-1000, 1000), st.integers(1, 50))
def test_shifting_rewards_changes_nothing_and_scaling_scales(
    rows: list[tuple[int, int]], shift: int, scale: int
) -> None:
    rewards = torch.tensor([float(reward) for reward, _ in rows], dtype=torch.float64)
    group = torch.tensor([index for _, index in rows])
    plain = grpo_advantages(rewards, group, norm_by_std=False)
    moved = grpo_advantages(rewards * scale + shift, group, norm_by_std=False)
    assert moved.tolist() == pytest.approx((plain * scale).tolist(), abs=1e-8)
    tiny = 1e-300
    assert grpo_advantages(rewards * scale + shift, group, epsilon=tiny).tolist() == pytest.approx(
        grpo_advantages(rewards, group, epsilon=tiny).tolist(), abs=1e-8
    )


@given(GROUPS, st.randoms(use_true_random=False))
def test_rollouts_belong_to_a_group_by_its_id_and_never_by_position(
    rows: list[tuple[int, int]], random: Random
) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)
    rewards = torch.tensor([float(reward) for reward, _ in rows], dtype=torch.float64)
    group = torch.tensor([index for _, index in rows])
    shuffled = grpo_advantages(rewards[order], group[order])
    assert shuffled.tolist() == pytest.approx(grpo_advantages(rewards, group)[order].tolist(), abs=1e-12)


def test_golden_grpo_advantages_agree_with_verl(shared: Path) -> None:
    cases = json.loads((shared / "golden/verl_0_9_1.json").read_text())["cases"]
    arrays = np.load(shared / "golden/verl_0_9_1.npz")
    compared = 0
    for name, case in cases.items():
        if case["fn"] not in ("grpo", "grpo_vectorized"):
            continue
        mask = torch.from_numpy(arrays[case["args"]["response_mask"]])
        rewards = torch.from_numpy(arrays[case["args"]["token_level_rewards"]]).sum(-1)
        names = arrays[case["args"]["index"]].tolist()
        group = torch.tensor([sorted(set(names)).index(prompt) for prompt in names])
        golden = torch.from_numpy(arrays[case["out"][0]])
        norm = case["kwargs"]["norm_adv_by_std_in_grpo"]
        ours = grpo_advantages(rewards, group, norm_by_std=norm)[:, None] * mask
        _, std, size = group_statistics(rewards, group)
        # Where we differ on purpose: verl gives a lone rollout its raw reward, and a constant group its rounding.
        kept = (size > 1) & (std > 0)
        torch.testing.assert_close(ours[kept].float(), golden[kept], atol=2e-6, rtol=1e-5, msg=name)
        assert not ours[~kept].any()
        compared += int(kept.sum())
    assert compared > 50
