"""A sample of what a machine does to a process, the same at every run; `make chaos` runs the whole matrix.

And the harness itself: it must find what it looks for.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from ratchet.store import artifacts
from ratchet.store.local import LocalStore
from ratchet.store.run import Run
from tests.chaos import process_faults
from tests.chaos.__main__ import sampled
from tests.chaos.bench import Workbench
from tests.chaos.case import Case
from tests.chaos.forks import Died
from tests.chaos.holds import Broken, check_chain, committed

SAMPLE = 10

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cases(bench: Workbench) -> list[Case]:
    return list(process_faults.cases(bench))


def test_every_fault_strikes_every_stage_at_every_grain(cases: list[Case]) -> None:
    assert len({case.name for case in cases}) == len(cases) > 500
    struck = {(case.fault, stage) for case in cases for stage in case.boundary.split("/")}
    for fault in process_faults.FAULTS:
        for stage in ("rollout", "reward", "advantage", "values", "critic_update", "policy_update", "evaluate"):
            assert (fault, stage) in struck
    assert {(case.fault, case.grain) for case in cases} == {
        (fault, grain) for fault in process_faults.FAULTS for grain in ("segment", "step", "stage")
    }
    killed = {(case.grain, case.boundary) for case in cases if case.fault == process_faults.SIGKILL}
    for boundary in (
        "step-000002/policy_update/ATTEMPT/policy/model.safetensors.delta, half written",
        "step-000001/rollout/manifest.json, created and not yet tidied",
        "step-000004/advantage/manifest.json, before",
        "checkpoint's index, before (3)",
        "submissions/0001.json, half written",
    ):
        assert ("segment", boundary) in killed


def test_the_same_run_comes_out_of_every_fault(bench: Workbench, cases: list[Case]) -> None:
    sample = sampled(cases, SAMPLE)
    assert {case.fault for case in sample} == set(process_faults.FAULTS)
    outcomes = {case.name: process_faults.run(case, bench) for case in sample}
    assert {name: outcome.detail for name, outcome in outcomes.items() if not outcome.survived} == {}
    # Something was struck, and made again.
    assert sum(outcome.redone_stages for outcome in outcomes.values()) > 0


def test_boundaries_between_which_nothing_happens_are_one() -> None:
    seen = [
        ("MainThread", "run.json, before"),
        ("MainThread", "run.json, after"),
        ("MainThread", "step-000001/rollout, begun"),
        ("MainThread", "step-000001/rollout, ended"),
        ("writer_0", "step-000001/rollout/manifest.json, before"),
        ("MainThread", "step-000002/rollout, begun"),
        ("writer_0", "step-000001/rollout/manifest.json, after"),
        ("writer_0", "step-000001/rollout, committed"),
        ("writer_0", "step-000002/rollout/manifest.json, before"),
        ("MainThread", "step-000002/rollout, ended"),
        ("writer_0", "step-000002/rollout/manifest.json, after"),
    ]
    assert process_faults.thinned(seen) == {
        "run.json, before": "run.json, before",
        "step-K/rollout, begun": "step-000002/rollout, begun",
        "step-K/rollout/manifest.json, before": "step-000002/rollout/manifest.json, before",
        "step-K/rollout, ended": "step-000002/rollout, ended",
        "step-K/rollout/manifest.json, after": "step-000002/rollout/manifest.json, after",
    }
    assert process_faults.thinned(seen, takes_first=True)["step-K/rollout, begun"] == "step-000001/rollout, begun"


@pytest.mark.parametrize(
    ("label", "kind"),
    [
        ("step-000003/reward, begun", "step-K/reward, begun"),
        ("step-000000/evaluate, begun", "step-K/evaluate, begun"),
        ("step-000000/policy_update, begun", "step-000000/policy_update, begun"),
        ("step-000012/policy_update/ATTEMPT/policy/a.json, after", "step-K/policy_update/ATTEMPT/policy/FILE, after"),
        (
            "step-000002/critic_update/ATTEMPT/critic/model.safetensors.delta, before",
            "step-K/critic_update/ATTEMPT/critic/FILE.delta, before",
        ),
        ("checkpoint's index, before (3)", "checkpoint's index, before"),
        ("data/val/manifest.json, before", "data/SPLIT/manifest.json, before"),
        ("status/SUBMISSION/segment-000001.json, half written (2)", "status, half written"),
    ],
)
def test_the_kind_of_a_boundary_leaves_out_the_step_and_the_file(label: str, kind: str) -> None:
    assert process_faults.kind_of(label) == kind


def test_what_does_not_hold_is_found(bench: Workbench, tmp_path: Path) -> None:
    expected = bench.reference("segment")
    bench.fork(lambda: bench.train(str(tmp_path), "run", "segment", {}) and None)
    run = Run(str(tmp_path), "run")
    bench.fork(lambda: check_chain(run, expected))
    assert bench.check(str(tmp_path), "run", "segment").survived

    with pytest.raises(Broken, match="not what an uninterrupted run commits: 4/rollout"):
        bench.fork(lambda: check_chain(run, expected | {"4/rollout": "0" * 64}))
    rollouts = committed(run)["step-000004/rollout"].output("rollouts")
    path = Path(run.uri) / rollouts.folder / rollouts.files[0].path
    body = path.read_bytes()
    path.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(Broken, match="ratchet verify: step-000004/rollout/"):
        bench.fork(lambda: check_chain(run, expected))
    outcome = bench.check(str(tmp_path), "run", "segment")
    assert (outcome.survived, "ratchet verify: step-000004/rollout/" in outcome.detail) == (False, True)
    path.write_bytes(body)

    artifacts.delete(run.store, committed(run)["step-000004/checkpoint_export"].output("export"))
    assert "export" in bench.check(str(tmp_path), "run", "segment").detail


def test_what_is_begun_twice_is_counted_as_redone(bench: Workbench, tmp_path: Path) -> None:
    bench.fork(lambda: bench.train(str(tmp_path), "run", "stage", {}) and None)
    store = LocalStore(tmp_path / "run")
    for stage in ("evaluate", "checkpoint_export"):
        store.delete(f"step-000004/{stage}/manifest.json")
    outcome = bench.check(str(tmp_path), "run", "stage")
    assert (outcome.survived, outcome.redone_stages) == (True, 2)
    assert outcome.detail == "step-000004/checkpoint_export, step-000004/evaluate"
    assert outcome.redone_seconds > 0


def test_a_fork_that_dies_or_hangs_says_so(bench: Workbench) -> None:
    with pytest.raises(Died, match="ended with status -9"):
        bench.fork(lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(Died, match="hung for 0 s"):
        bench.fork(lambda: time.sleep(60), seconds=0.05)
    with pytest.raises(ZeroDivisionError):
        bench.fork(lambda: 1 // 0)
