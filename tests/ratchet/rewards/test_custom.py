"""Rewards of the user's own: what may be called, what may be returned, and how faults are told."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ratchet.errors import ConfigError, DataError, NumericsError
from ratchet.rewards.custom import CustomReward
from ratchet.rewards.data_proto import DataProto, GradeRow
from ratchet.rewards.registry import rule_for
from ratchet.rewards.results import RewardResult
from tests.pages import code_blocks, run_blocks

ROOT = Path(__file__).parents[3]
ROWS = [
    GradeRow(
        where=f"rollout {index}",
        data_source="mine",
        completion=text,
        ground_truth="72",
        extra_info={"index": index},
        completion_token_ids=list(range(index + 1)),
    )
    for index, text in enumerate(["72", "so 72", "73"])
]


def _rewards(reward: Any, **kwargs: Any) -> list[float]:
    return [result.reward for result in CustomReward(reward, kwargs).score(ROWS)]


def test_verl_s_hook_gets_its_arguments_by_name_in_whatever_order_it_has_them() -> None:
    def usual(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        return float(solution_str == ground_truth and data_source == "mine") + extra_info["index"]

    def other_order(solution_str: str, ground_truth: str, method: str = "strict") -> bool:
        return ground_truth in solution_str if method == "within" else solution_str == ground_truth

    def anything(**given: Any) -> int:
        assert sorted(given) == ["data_source", "extra_info", "ground_truth", "solution_str"]
        return int(given["solution_str"] == given["ground_truth"])

    assert _rewards(usual) == [1.0, 1.0, 2.0]
    assert _rewards(other_order) == [1.0, 0.0, 0.0]
    assert _rewards(other_order, method="within") == [1.0, 1.0, 0.0]
    assert _rewards(anything) == [1.0, 0.0, 0.0]
    assert _rewards(lambda a, b, c, d: float(b == c)) == [1.0, 0.0, 0.0]


def test_a_dict_s_other_numbers_are_kept() -> None:
    def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> dict[str, Any]:
        return {"score": 0.5, "acc": solution_str == "72", "words": np.int64(2), "pred": "72", "note": "kept out"}

    assert CustomReward(reward).score(ROWS[:1]) == [RewardResult(0.5, {"acc": 1.0, "words": 2.0}, "72")]


class Lengths:
    """A batch reward with an argument."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, data: DataProto) -> Any:
        return [self.scale * len(item.completion) for item in data]


def test_a_class_is_made_with_its_arguments_and_an_object_is_called_as_it_is() -> None:
    assert _rewards(Lengths, scale=2.0) == [4.0, 10.0, 4.0]
    assert _rewards(Lengths(3.0)) == [6.0, 15.0, 6.0]


@pytest.mark.parametrize(
    "returned",
    [
        [1, 2.5, True],
        (1, 2.5, 1),
        torch.tensor([1.0, 2.5, 1.0], requires_grad=True),
        torch.tensor([1.0, 2.5, 1.0], dtype=torch.bfloat16),
        np.array([1, 2.5, 1]),
        [torch.tensor(1.0), np.float32(2.5), {"score": 1.0}],
        {"reward_tensor": torch.tensor([1.0, 2.5, 1.0]), "reward_extra_info": {"acc": [0, 1, 0]}},
    ],
)
def test_one_number_a_row_may_come_as_list_tensor_or_array(returned: Any) -> None:
    assert _rewards(lambda data: returned) == [1.0, 2.5, 1.0]


def test_a_reward_manager_s_extra_columns_go_to_the_breakdown() -> None:
    returned = {"reward_tensor": [1.0, 0.0, 0.0], "reward_extra_info": {"acc": [1, 0, 0], "pred": ["72", "?", "73"]}}
    results = CustomReward(lambda data: returned).score(ROWS)
    assert [result.breakdown for result in results] == [{"acc": 1.0}, {"acc": 0.0}, {"acc": 0.0}]


@pytest.mark.parametrize(
    "returned",
    [
        [[1.0], [0.5, 0.5], [0.0, 0.25, -1.0]],
        torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.25, -1.0]]),
    ],
)
def test_token_rewards_have_an_entry_a_token_with_or_without_padding(returned: Any) -> None:
    results = CustomReward(lambda data: returned).score(ROWS)
    assert [result.token_rewards for result in results] == [[1.0], [0.5, 0.5], [0.0, 0.25, -1.0]]
    assert [result.reward for result in results] == [1.0, 1.0, -0.75]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (1.0, r"3 rows, rollout 0 to rollout 2: the reward .*expected one reward per row, got float"),
        (None, "expected one reward per row, got NoneType"),
        ([1.0, 2.0], r"expected one reward per row \(3\), got 2"),
        (torch.zeros(4), r"expected one reward per row \(3\), got 4"),
        ([1.0, "2", 3.0], "rollout 1: .*expected a number as reward, got str '2'"),
        ([1.0, None, 3.0], "rollout 1: .*got NoneType"),
        ([1.0, 2.0, {"acc": 1.0}], "rollout 2: .*expected a dict with the key score, got acc"),
        ([[1.0], [0.5], [0.0, 0.0, 1.0]], r"rollout 1: .*one reward per completion token \(2, or 3 with.*got 1"),
        (torch.ones(3, 3), r"rollout 0: .*has 1 tokens, but position 1, which is padding, .* position 0"),
        (torch.ones(3, 2), "rollout 0: .*expected one reward per completion token"),
        ({"rewards": [1.0]}, "or a dict with reward_tensor, got the keys rewards"),
        ({"reward_tensor": [1, 1, 1], "reward_extra_info": {"acc": [1]}}, r"acc: expected one reward per row \(3\)"),
    ],
)
def test_what_a_batch_reward_must_not_return_is_told_by_row(returned: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        CustomReward(lambda data: returned).score(ROWS)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), torch.tensor(float("nan")), 10**400])
def test_a_reward_that_is_not_finite_names_its_row(value: Any) -> None:
    with pytest.raises(NumericsError, match=r"rollout 1: .*expected a finite number"):
        CustomReward(lambda data: [0.0, value, 0.0]).score(ROWS)
    with pytest.raises(NumericsError, match=r"rollout 0: the reward .*score: .*expected a finite number"):
        CustomReward(lambda solution_str: {"score": value}).score(ROWS)
    with pytest.raises(NumericsError, match=r"rollout 1: .*token 1: .*expected a finite number"):
        CustomReward(lambda data: [[0.0], [0.0, value], [0.0, 0.0, 0.0]]).score(ROWS)


def test_what_the_user_s_code_raises_is_told_with_row_and_function_and_chained() -> None:
    def broken(data_source: str, solution_str: str, ground_truth: str) -> float:
        return float({"72": 1.0}[solution_str])

    with pytest.raises(DataError, match=r"rollout 1: the reward .*broken raised KeyError: 'so 72'") as caught:
        CustomReward(broken).score(ROWS)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(DataError, match=r"3 rows, rollout 0 to rollout 2: the reward .*lambda> raised ZeroDivisionE"):
        CustomReward(lambda data: 1 / 0).score(ROWS)


async def _later(data: DataProto) -> list[float]:
    return []


@pytest.mark.parametrize(
    ("reward", "kwargs", "message"),
    [
        (_later, {}, "_later is a coroutine"),
        (lambda: 1.0, {}, r"expected \(data_source, solution_str, .*got \(\)"),
        (lambda a, b: 1.0, {}, r"got \(a, b\)"),
        (lambda completions, **kwargs: [1.0], {}, r"\(data: DataProto\), got \(completions, \*\*kwargs\)"),
        ("text", {}, "expected a function or an object with __call__, got 'text'"),
        (lambda solution_str, tokenizer: 1.0, {}, "needs the argument tokenizer: .*reward_kwargs"),
        (lambda solution_str: 1.0, {"scale": 2}, "takes no argument scale; it takes solution_str"),
        (lambda data: 1.0, {"scale": 2}, "reward_kwargs: .*scale"),
        (Lengths, {"size": 2}, r"Lengths: cannot be made with .*\(size\): TypeError"),
    ],
)
def test_what_cannot_be_a_reward_is_refused_before_anything_is_graded(
    reward: Any, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CustomReward(reward, kwargs)


def test_the_example_of_the_docs_grades() -> None:
    from ratchet.config import RunConfig
    from ratchet.rewards.graders import open_grader

    path = ROOT / "examples" / "custom_reward.py"
    custom = {"path": str(path), "name": "ShownWork", "reward_kwargs": {"bonus": 0.25}}
    grader = open_grader(
        RunConfig.model_validate({"reward_model": {"type": "custom"}, "custom_reward_function": custom})
    )
    completions = ["48 + 24 = 72\n#### 72", "#### 72", "48 + 24 = 73\n#### 73"]
    rows = [GradeRow(data_source="mine", completion=text, ground_truth="72") for text in completions]
    assert [result.reward for result in grader.grade(rows)] == [1.25, 1.0, 0.0]


def test_the_page_on_rewards_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = code_blocks("docs/rewards.md")
    monkeypatch.chdir(tmp_path)
    run_blocks("docs/rewards.md", blocks)
    assert capsys.readouterr().out == "[1.5]\n"
    assert rule_for("my-org/capitals").function("Paris.", "Paris") == 1.0
    example = (ROOT / "examples" / "custom_reward.py").read_text(encoding="utf-8")
    assert any(block.strip() and example.endswith(block) for block in blocks)
