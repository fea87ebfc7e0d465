"""The generated word problems: right, distinct, reproducible, and without leaks between splits."""

import ast
import operator
import re
from fractions import Fraction

import pytest

from ratchet.data.word_problems import LEVELS, generate, problem
from ratchet.errors import DataError
from ratchet.rewards.gsm8k import grade

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def evaluate(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Expression):
        return evaluate(node.body)
    if isinstance(node, ast.BinOp):
        return Fraction(OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right)))
    assert isinstance(node, ast.Constant)
    return Fraction(str(node.value))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_annotation_is_right_and_the_last_one_is_the_answer(level: int, split: str) -> None:
    for row in generate(level=level, size=400, seed=1, split=split):
        *steps, last = row["answer"].split("\n")
        results = []
        for step in steps:
            (expression, result, shown) = re.findall(r"<<([^=<>]+)=(\d+)>>(\d+)", step)[0]
            assert evaluate(ast.parse(expression, mode="eval")) == int(result) == int(shown)
            results.append(result)
        assert last == f"#### {results[-1]}"


@pytest.mark.parametrize("level", LEVELS)
def test_every_number_of_a_step_is_given_or_was_computed_before(level: int) -> None:
    for row in generate(level=level, size=400, seed=2, split="train"):
        known = {*re.findall(r"\d+", row["question"]), "2", "100"}  # "half", "twice" and "%" say these
        for expression, result in re.findall(r"<<([^=<>]+)=(\d+)>>", row["answer"]):
            assert set(re.findall(r"\d+", expression)) <= known, row
            known.add(result)


@pytest.mark.parametrize(("level", "num_steps"), [(1, {1}), (2, {2}), (3, {3}), (4, {3, 4}), (5, {4, 5})])
def test_a_level_has_its_number_of_steps(level: int, num_steps: set[int]) -> None:
    rows = generate(level=level, size=300, seed=0, split="train")
    assert {row["answer"].count("<<") for row in rows} == num_steps


def test_level_1_is_one_small_sum_in_few_words() -> None:
    for row in generate(level=1, size=1000, seed=0, split="train"):
        first, second = sorted(map(int, re.findall(r"\d+", row["question"])), reverse=True)
        answer = int(row["answer"].split("#### ")[1])
        assert answer in (first + second, first - second)
        assert 1 <= answer <= 23
        assert len(row["question"].split()) <= 24


@pytest.mark.parametrize("level", LEVELS)
def test_a_perfect_completion_scores_one(level: int) -> None:
    for row in generate(level=level, size=200, seed=0, split="test"):
        truth = row["answer"].split("#### ")[1]
        assert grade(row["answer"], truth).reward == 1.0
        assert grade(row["answer"], truth, "strict").reward == 1.0


@pytest.mark.parametrize("level", LEVELS)
def test_rows_are_distinct_and_splits_disjoint_whatever_the_seeds(level: int) -> None:
    train = [row["question"] for row in generate(level=level, size=9000, seed=0, split="train")]
    test = [row["question"] for row in generate(level=level, size=2400, seed=7, split="test")]
    assert len(set(train)) == len(train)
    assert len(set(test)) == len(test)
    beginnings = [{re.split(r"(?<=[.?]) ", question)[0] for question in part} for part in (train, test)]
    assert not set(train) & set(test)
    assert level == 1 or not beginnings[0] & beginnings[1]


def test_a_row_depends_on_seed_level_split_and_index_alone() -> None:
    long, short = generate(level=3, size=50, seed=4, split="train"), generate(level=3, size=5, seed=4, split="train")
    assert long[:5] == short
    assert problem(4, 3, "train", 17) == long[17]
    assert generate(level=3, size=50, seed=5, split="train") != long


def test_one_row_is_pinned() -> None:
    # Runs are reproduced from their seed: these rows must never change.
    assert (
        problem(0, 1, "train", 0)["question"]
        == "Leo finds 6 shells. Tom finds 3 shells. How many do they find together?"
    )


def test_wrong_arguments_are_refused() -> None:
    for arguments in ((0, 0, "train"), (0, 6, "train"), (0, 1, "dev")):
        with pytest.raises(DataError, match="word problems"):
            problem(*arguments, 0)
    with pytest.raises(DataError, match="at least 1, got 0"):
        generate(level=1, size=0, seed=0, split="train")


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_rejected_has_another_result_and_nothing_else_is_different(level: int) -> None:
    plain = generate(level=level, size=40, seed=3, split="train")
    pairs = generate(level=level, size=40, seed=3, split="train", rejected=1)
    assert [{"question": row["question"], "answer": row["answer"]} for row in pairs] == plain
    for row in pairs:
        (*steps, result), (*wrong_steps, wrong) = (row[name].split("\n") for name in ("answer", "rejected"))
        assert steps[:-1] == wrong_steps[:-1]
        assert 1 <= int(wrong.removeprefix("#### ")) - int(result.removeprefix("#### ")) <= 9
        # The last step comes to what is said behind it.
        assert f"={wrong.removeprefix('#### ')}>>" in wrong_steps[-1]
    with pytest.raises(DataError, match="expected rejected=1 or 0, got 2"):
        generate(level=level, size=1, seed=0, split="train", rejected=2)
