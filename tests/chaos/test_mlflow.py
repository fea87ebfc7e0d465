"""A sample of what MLflow does to a run, the same at every run; `make chaos` runs the whole matrix."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ratchet.store.run import Run
from tests.chaos import mlflow_faults
from tests.chaos.bench import Broken, Workbench
from tests.chaos.case import Case

SAMPLE = ("refused, killed two stages later", "experiment deleted")
"""What the tracker's own tests do not do to a whole run."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def variables() -> Iterator[None]:
    """What the cases set is undone with this."""
    with pytest.MonkeyPatch.context() as patch:
        for name in mlflow_faults.VARIABLES:
            patch.setenv(name, "")
        yield


@pytest.fixture(scope="module")
def cases(bench: Workbench) -> list[Case]:
    return list(mlflow_faults.cases(bench, grains=("segment",), moments=("begun",)))


def test_every_fault_strikes_and_at_many_requests(cases: list[Case]) -> None:
    assert {case.fault for case in cases} == set(mlflow_faults.FAULTS)
    struck = {case.boundary for case in cases}
    assert len(struck) > len(cases) / 2
    assert any("experiments" in boundary for boundary in struck)
    assert sum("log-batch, step" in boundary for boundary in struck) > 5


def test_the_run_goes_on_and_every_point_is_there_once_in_the_end(bench: Workbench, cases: list[Case]) -> None:
    sample = [next(case for case in cases if case.fault == fault) for fault in SAMPLE]
    outcomes = {case.name: mlflow_faults.run(case, bench) for case in sample}
    assert {name: outcome.detail for name, outcome in outcomes.items() if not outcome.survived} == {}


def test_a_point_that_is_missing_or_twice_or_another_one_is_found(bench: Workbench, tmp_path: Path) -> None:
    root = str(tmp_path / "runs")
    mlflow_faults.new_experiment(bench)
    bench.fork(lambda: bench.train(root, "run", "segment", mlflow_faults.OVERRIDES) and None)
    run, database = Run(root, "run"), bench.folder / "mlflow" / "mlflow.db"
    mlflow_faults.compare(database, run)
    one = "key = 'actor/pg_loss' and step = 2 and run_uuid in (select run_uuid from tags where value = ?)"
    copied = "insert into metrics (key, value, timestamp, run_uuid, step, is_nan) select key, value, timestamp + 1,"
    for change, found in (
        (f"{copied} run_uuid, step, is_nan from metrics where {one}", "1 points are twice"),
        (f"delete from metrics where {one}", "1 points are missing in MLflow: .*'actor/pg_loss', 2"),
    ):
        with closing(sqlite3.connect(database, timeout=30)) as connection, connection:
            connection.execute(change, (run.uri,))
        with pytest.raises(Broken, match=found):
            mlflow_faults.compare(database, run)
