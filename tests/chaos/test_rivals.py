"""A sample of several processes at work on one run, the same at every run; `make chaos` runs the whole matrix."""

import pytest

from tests.chaos import rival_faults
from tests.chaos.bench import Workbench
from tests.chaos.case import Case

SAMPLE = (
    "woken after its successor finished, whose clock is 5 h behind",
    "woken while its successor is at work",
    "response lost, noticed after a successor finished",
    "storage without create-only puts, run that exists",
)
BEFORE_THE_CLAIM = ("run.json", "code/", "owner/")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cases(bench: Workbench) -> list[Case]:
    return list(rival_faults.cases(bench, grains=("segment",)))


def test_every_fault_strikes_before_puts_of_every_kind(cases: list[Case]) -> None:
    every = {*rival_faults.WOKEN, *rival_faults.BOTH_ALIVE, *rival_faults.AT_ONCE, *rival_faults.LOST}
    assert {case.fault for case in cases} == every | {rival_faults.ONE_SUBMISSION, *rival_faults.NO_CREATE_ONLY}
    assert len({case.name for case in cases}) == len(cases) > 50
    woken = " ".join(case.boundary for case in cases if case.fault in rival_faults.WOKEN)
    for put in ("run.json", "owner/", "submissions/", "rollouts/part-", "rollout/manifest.json", "safetensors.delta"):
        assert put in woken


def test_one_wins_the_others_name_it_and_nothing_published_is_touched(bench: Workbench, cases: list[Case]) -> None:
    sample = []
    for number, fault in enumerate(SAMPLE):
        # Before its claim, a process that wakes has nothing to lose.
        found = [case for case in cases if case.fault == fault and not case.boundary.startswith(BEFORE_THE_CLAIM)]
        sample.append(found[(number * 5 + 3) % len(found)])
    outcomes = {case.name: rival_faults.run(case, bench) for case in sample}
    assert {name: outcome.detail for name, outcome in outcomes.items() if not outcome.survived} == {}
    said = " ".join(outcome.detail for outcome in outcomes.values())
    assert "lost it to epoch 2" in said
    assert "ignores create-only puts" in said
