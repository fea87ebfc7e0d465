import json
import math
import posixpath
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.tracking.metrics import mlflow_names, step_line, summary


def test_a_summary_has_the_mean_the_largest_and_the_smallest() -> None:
    assert summary("critic/score", [1.0, 0.0, 0.5]) == {
        "critic/score/mean": 0.5,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
    }


def test_a_summary_of_nothing_is_empty() -> None:
    assert summary("critic/score", []) == {}


def test_one_nan_is_seen_in_every_number_of_a_summary() -> None:
    for values in ([1.0, math.nan], [math.nan, 1.0]):
        assert all(math.isnan(value) for value in summary("critic/score", values).values())


def test_a_step_is_one_line_with_sensible_digits() -> None:
    metrics = {
        "actor/pg_loss": -0.008,
        "actor/lr": 1e-6,
        "response_length/mean": 287.33333,
        "perf/throughput": 24123.456,
        "perf/total_num_tokens": 1234567.0,
        "critic/score/mean": 0.123456,
    }
    assert step_line(287, metrics) == (
        "step: 287 | actor/pg_loss: -0.008 | actor/lr: 1e-06 | response_length/mean: 287.3 | "
        "perf/throughput: 24123.5 | perf/total_num_tokens: 1234567 | critic/score/mean: 0.1235"
    )


def test_a_line_shows_what_is_not_finite() -> None:
    assert step_line(1, {"a": math.nan, "b": math.inf}) == "step: 1 | a: nan | b: inf"


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("actor/pg_loss", "actor/pg_loss"),
        ("val-core/openai/gsm8k/reward/mean@8", "val-core/openai/gsm8k/reward/mean_at_8"),
        ("timing(s)/gen", "timing_s_/gen"),
        ("critic//score", "critic/score"),
        ("critic///score", "critic/score"),
        ("/lead", "lead"),
        ("tail/", "tail"),
        ("a/../b", "a/__/b"),
        ("./a", "_/a"),
        ("..a", "__a"),
        ("kl=0.1", "kl_0.1"),
        ("line\n", "line_"),
        ("", "_"),
        ("//", "_"),
    ],
)
def test_a_name_is_rewritten_as_verl_does(name: str, stored: str) -> None:
    assert mlflow_names([name]) == {name: stored}


def test_real_names_arrive_whole_and_apart(shared: Path) -> None:
    names = json.loads((shared / "fixtures/r5_metric_names.json").read_text())
    stored = mlflow_names(names)
    assert stored["val-core/openai/gsm8k/reward/mean_at_1"] == "val-core/openai/gsm8k/reward/mean_at_1"
    assert re.fullmatch(r"val-core/openai/gsm8k/reward/mean_at_1_[0-9a-f]{8}", stored[names[0]])
    assert mlflow_names(reversed(names)) == stored
    assert len(set(stored.values())) == len(names)


def test_names_over_the_limit_stay_apart() -> None:
    stored = mlflow_names(["x" * 251, "x" * 252, "x" * 250])
    assert [len(name) for name in stored.values()] == [250, 250, 250]
    assert len(set(stored.values())) == 3


def test_a_name_keeps_what_it_got_at_an_earlier_step() -> None:
    known = mlflow_names(["mean@1"])
    later = mlflow_names(["mean_at_1", "mean@1"], known)
    assert later["mean@1"] == "mean_at_1"
    assert later["mean_at_1"].startswith("mean_at_1_")


@given(st.lists(st.text(alphabet=st.sampled_from("ab@/._-: (=\n\u00fc"), max_size=12) | st.text(max_size=300)))
def test_every_name_becomes_a_legal_one_of_its_own(names: list[str]) -> None:
    stored = mlflow_names(names)
    assert set(stored) == set(names)
    assert len(set(stored.values())) == len(stored)
    for name in stored.values():
        assert 0 < len(name) <= 250
        assert re.fullmatch(r"[/\w.\- :]+", name)
        assert posixpath.normpath(name) == name
        assert not name.startswith(("/", ".."))
        assert name != "."
