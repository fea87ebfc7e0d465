"""Runs over a server in trouble: a sample of the cases that `python -m tests.chaos` runs, and outages in a segment."""

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

import pytest

from ratchet.store import s3_client, writer
from tests.chaos import storage_faults
from tests.chaos.bench import BUCKET, Workbench
from tests.chaos.s3_requests import FOREVER, KINDS, Fault, Request, Rule
from tests.chaos.storage_faults import OVERRIDES, RUN_ID, Seen, work

pytestmark = pytest.mark.slow

Value = TypeVar("Value")


class InProcess(Workbench):
    """A bench that works in this process, which has threads and has imported everything."""

    def _import_ahead(self) -> None:
        """What is imported here stays."""

    def fork(self, work: Callable[[], Value], *, seconds: float = 0.0) -> Value:
        environment = dict(os.environ)
        with pytest.MonkeyPatch.context() as patch:
            # What the work changes is as it was afterwards.
            patch.setattr(s3_client, "READ_SECONDS", s3_client.READ_SECONDS)
            patch.setattr(writer, "_LONGEST_PAUSE", writer._LONGEST_PAUSE)
            try:
                return work()
            finally:
                os.environ.clear()
                os.environ |= environment


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, s3_server: Any) -> Iterator[InProcess]:
    made = InProcess(tmp_path_factory.mktemp("bench"))
    s3_server.create_bucket(BUCKET)
    made._s3 = s3_server
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**s3_server.env(), "AWS_CONFIG_FILE": "/dev/null"}.items():
            patch.setenv(name, value)
        yield made
    made.close()


def _work(bench: InProcess, grain: str, rules: list[Rule], overrides: dict[str, Any] = OVERRIDES) -> tuple[str, Seen]:
    root = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    seen = bench.fork(lambda: work(bench, root, grain, overrides, rules))
    storage_faults.expect_honest(seen, bench.config(grain, **overrides).trainer.commit_lag)
    return root, seen


def _finishes(bench: InProcess, root: str, grain: str, overrides: dict[str, Any] = OVERRIDES) -> None:
    outcome = bench.check(root, RUN_ID, grain, **overrides)
    assert outcome.survived, outcome.detail


def _rule(fault: Fault, kind: str, **options: Any) -> Rule:
    method, target = KINDS[kind]
    return Rule(fault=fault, method=method, target=target, **options)


@pytest.mark.parametrize("grain", ["segment", "stage"])
def test_a_run_goes_on_through_every_fault_that_passes(bench: InProcess, grain: str) -> None:
    """All of them in one run, each at another kind of request."""
    rules = [
        _rule("500", "PUT of run.json"),
        _rule("500", "PUT of a claim", is_after=True),
        _rule("503 SlowDown", "listing"),
        _rule("timeout", "HEAD of a claim"),
        _rule("timeout", "PUT of a manifest", nth=3, is_after=True),
        _rule("latency", "GET of a manifest", seconds=0.2),
        _rule("reset", "PUT of weights", nth=2),
        _rule("reset", "PUT of a manifest", nth=8, is_after=True),
        _rule("reset mid-request", "PUT of a table", nth=2),
        _rule("request truncated", "PUT of a trainer state"),
        _rule("request flipped", "PUT of a table", nth=5),
        _rule("answer truncated", "GET of a table"),
        _rule("answer headless", "listing", nth=3),
        _rule("answer flipped", "GET of weights"),
        Rule(fault="outage", method="PUT", target=r"step-000002/reward/manifest", seconds=0.05),
    ]
    root, seen = _work(bench, grain, rules)
    assert seen.error == ""
    assert [rule for rule in rules if rule.done != 1] == []
    assert {rule.fault for rule in rules} | {"create-only ignored"} == set(get_args(Fault))
    _finishes(bench, root, grain)


@pytest.mark.parametrize(
    ("grain", "kind", "fault"),
    [
        ("segment", "PUT of a manifest", "request flipped"),
        ("step", "GET of weights", "answer flipped"),
    ],
)
def test_a_fault_that_lasts_ends_the_run_with_a_message_and_the_next_submission_finishes_it(
    bench: InProcess, grain: str, kind: str, fault: Fault
) -> None:
    root, seen = _work(bench, grain, [_rule(fault, kind, nth=4 if kind.startswith("PUT") else 1, times=FOREVER)])
    assert seen.error.startswith(("StoreUnavailableError", "StoreError"))
    assert root in seen.error
    assert ("policy_update/" in seen.error) == (fault == "answer flipped")
    _finishes(bench, root, grain)


def test_storage_without_create_only_puts_is_refused(bench: InProcess) -> None:
    root, seen = _work(bench, "segment", [Rule(fault="create-only ignored", times=FOREVER)])
    assert "this storage ignores create-only puts" in seen.error
    assert seen.committed == []
    _finishes(bench, root, "segment")


LONG = {
    "trainer.total_training_steps": 8,
    "trainer.steps_per_segment": 8,
    "trainer.commit_lag": 3,
    "trainer.trainer_state_freq": 2,
    "trainer.test_freq": -1,
}
"""A segment of more steps than may be under way."""


def _outage(seconds: float) -> Rule:
    """The server is out from the commit of step 1 on."""
    return Rule(fault="outage", method="PUT", target="step-000002/rollout/manifest", seconds=seconds)


def test_training_goes_on_in_an_outage_while_there_is_room_and_catches_up_afterwards(bench: InProcess) -> None:
    outage = _outage(1.5)
    # A client gives up while an old trainer state is deleted, after the commit that made it superfluous was told.
    deleting = _rule("500", "DELETE of a trainer state", times=storage_faults.ATTEMPTS)
    root, seen = _work(bench, "segment", [outage, deleting], LONG)
    assert seen.error == ""
    assert (outage.done, deleting.done) == (1, storage_faults.ATTEMPTS)
    # The queue was full, and no fuller.
    assert seen.lag == 3
    assert sorted(seen.told) == sorted(seen.committed)
    _finishes(bench, root, "segment", LONG)


def test_an_outage_without_end_ends_a_segment_with_a_run_that_resumes(
    bench: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_faults, "OUTAGE_SECONDS", 1.0)
    root, seen = _work(bench, "segment", [_outage(FOREVER)], LONG)
    assert seen.error.startswith("StoreUnavailableError: cannot ")
    assert root in seen.error
    # Step 1 was reported and is there; of the three that were made meanwhile, none was reported.
    assert seen.lag == 3
    assert [place for place in seen.told if place.endswith("policy_update")] == [
        "step-000000/policy_update",
        "step-000001/policy_update",
    ]
    assert [line.split(" | ")[0] for line in seen.lines] == ["step: 0", "step: 1"]
    _finishes(bench, root, "segment", LONG)


def _request(method: str, target: str) -> Request:
    return Request(method, target, 100 if method == "PUT" else 0, answered=100 if method == "GET" else 0)


def test_cases_are_made_for_every_kind_of_request_and_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["r/run.json", "r/owner/0001.json", "r/step-000001/rollout/manifest.json", "r/step-000001/x/1/t/p.parquet"]
    requests = [_request(method, key) for method in ("PUT", "GET", "HEAD") for key in keys for _ in range(5)]
    parts = "r/step-000001/policy_update/1/policy/m.safetensors"
    in_parts = [_request("POST", f"{parts}?uploads="), _request("PUT", f"{parts}?uploadId=1&partNumber=1")]

    def recorded(bench: Any, grain: str, *, wide: bool) -> list[Request]:
        return in_parts if wide else requests

    monkeypatch.setattr(storage_faults, "record", recorded)
    monkeypatch.setattr(storage_faults, "_workbench", lambda bench: bench)
    found = list(storage_faults.cases(Path()))  # type: ignore[arg-type]
    assert len({case.name for case in found}) == len(found)
    pairs = {(dict(case.params)["kind"], case.fault) for case in found}
    objects = ("run.json", "a claim", "a manifest", "a table")
    writes = {f"PUT of {name}" for name in objects}
    reads = {f"{verb} of {name}" for verb in ("GET", "HEAD") for name in objects}
    assert pairs >= {(kind, fault) for kind in writes | reads for fault in ("500", "timeout", "reset", "latency")}
    assert pairs >= {(kind, fault) for kind in writes for fault in ("reset, work done", "request flipped")}
    assert pairs >= {(kind, "answer headless") for kind in reads}
    assert pairs >= {("PUT a part of weights", "request truncated"), ("begin in parts of weights", "500, work done")}
    assert not pairs & {(kind, "request truncated") for kind in reads}
    assert {case.grain for case in found} == {"segment", "step", "stage"}
    lasting = {dict(case.params)["kind"] for case in found if dict(case.params)["times"] == FOREVER}
    assert writes | reads <= lasting
    assert {case.fault for case in found if dict(case.params)["kind"] == ""} == {"outage", "create-only ignored"}
    words = {case.boundary.rpartition(", ")[2] for case in found}
    assert {"first", "middle", "last"} <= words
