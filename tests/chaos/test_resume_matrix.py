"""A sample of runs that go on otherwise than they were begun; `make chaos` runs the whole matrix."""

import pytest

from tests.chaos import resume_faults
from tests.chaos.bench import Workbench
from tests.chaos.case import Case

KINDS = (
    resume_faults.OTHER_GRAIN,
    resume_faults.EPOCH,
    resume_faults.LONGER,
    resume_faults.FINISHED,
    resume_faults.PROMOTED,
    resume_faults.SEMANTIC,
    resume_faults.OPERATIONAL,
)
"""Those that take a second or two; another number of processes takes half a minute."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cases(bench: Workbench) -> list[Case]:
    return list(resume_faults.cases(bench))


def test_every_pair_of_grains_and_every_key_is_there(cases: list[Case]) -> None:
    assert {case.fault for case in cases} == {*KINDS, resume_faults.SAME_GRAIN, *resume_faults.WORLD}
    assert len({case.name for case in cases}) == len(cases)
    pairs = {(case.grain, dict(case.params)["then"]) for case in cases if "goes on at" in case.fault}
    assert pairs == {(first, then) for first in resume_faults.GRAINS for then in resume_faults.GRAINS}
    keys = {fault: {case.boundary for case in cases if case.fault == fault} for fault in KINDS}
    assert {"actor_rollout_ref.actor.optim.lr", "trainer.seed", "algorithm.gamma"} <= keys[resume_faults.SEMANTIC]
    assert {"trainer.commit_lag", "trainer.save_freq", "promotion.name"} <= keys[resume_faults.OPERATIONAL]


def test_what_is_the_same_goes_on_and_what_is_not_is_refused(bench: Workbench, cases: list[Case]) -> None:
    sample = []
    for number, fault in enumerate(KINDS):
        if fault == resume_faults.EPOCH:
            # Step 2 is the end of an epoch without it, too.
            continue
        found = [case for case in cases if case.fault == fault]
        sample.append(found[(number * 7 + 5) % len(found)])
    outcomes = {case.name: resume_faults.run(case, bench) for case in sample}
    assert {name: outcome.detail for name, outcome in outcomes.items() if not outcome.survived} == {}
