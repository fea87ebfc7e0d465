"""MLflow in trouble while a run trains: unreachable, slow, answering nonsense, its run or experiment deleted by a user.

The server is a real one, behind a gateway. What must hold: training ends as if nothing had happened, and the next
session brings every point of every step exactly once. Every case has an experiment of its own.

Which MLflow run that is: the oldest active one in the experiment that carries the run's place. Where a user deleted it,
a new one is made and gets the whole curve; where the experiment was deleted, in an experiment `<name>-2`.
"""

import json
import os
import shutil
import signal
import sqlite3
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from ratchet.grains import loop
from ratchet.grains.session import Listener, open_session, submit
from ratchet.store.run import Run
from tests.chaos.bench import Broken, Died, Workbench
from tests.chaos.case import Case, Outcome
from tests.mlflow_gateway import Gateway
from tests.runs import Stopped, manifests

KIND = "mlflow"
GRAINS = ("segment", "step", "stage")
OVERRIDES: dict[str, Any] = {"trainer.logger": ["mlflow"], "trainer.system_metrics": False}
"""Metrics of the machine come at times of their own, and are no part of the chain."""
EXPERIMENT = "ratchet"
STOPPED_AFTER = "step-000002/reward"
"""Where the first session ends in cases of a resume: in the middle of a step."""

OUTAGES = ("refused", "500", "drop", "lost", "hang", "page")
USERS = ("run deleted", "run deleted, restored later", "experiment deleted", "experiment deleted, restored later")
FAULTS = (
    *(f"{mode}, {length}" for mode in OUTAGES for length in ("once", "from there on")),
    # Once it would be a lie that nobody can tell from the truth: MLflow says no more than this of a success.
    "empty, from there on",
    "slow, from there on",
    "refused, killed two stages later",
    *USERS,
)
BOUNDARIES_OF_A_FAULT = 2

_CLIENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "NO_PROXY": "127.0.0.1,localhost",
}
VARIABLES = ("MLFLOW_TRACKING_URI", *_CLIENT)
"""Of the environment, which are set here for the whole process."""


def cases(
    bench: Workbench, grains: Sequence[str] = GRAINS, moments: Sequence[str] = ("begun", "resumed")
) -> Iterator[Case]:
    """Yield each fault at requests spread over a session, of a run that begins and of one that resumes."""
    for number, grain in enumerate(grains):
        for moment in moments:
            # Here and not in the fork, which would start a server of its own.
            new_experiment(bench)
            boundaries = bench.fork(lambda grain=grain, moment=moment: _recorded(bench, grain, moment))
            for index, fault in enumerate(FAULTS):
                if moment == "resumed" and index % len(grains) != number:
                    continue
                # Prime strides, so that over the faults every request is hit.
                first, apart = index * 7 + number * 11, len(boundaries) // BOUNDARIES_OF_A_FAULT
                for nth in range(BOUNDARIES_OF_A_FAULT if moment == "begun" else 1):
                    boundary = boundaries[(first + nth * apart) % len(boundaries)]
                    yield Case(
                        kind=KIND,
                        fault=fault,
                        grain=grain,
                        boundary=f"{boundary} of a run {moment}",
                        params=(("request", boundary), ("moment", moment)),
                    )


def run(case: Case, bench: Workbench) -> Outcome:
    """Train with the fault, bring MLflow back, submit again, and compare MLflow with the chain."""
    told = dict(case.params)
    server = new_experiment(bench)
    root = str(bench.folder / f"{case.name}-{uuid.uuid4().hex[:8]}")
    try:
        if told["moment"] == "resumed":
            bench.fork(lambda: _until_stopped(bench, root, case.grain))
        is_killed = "killed" in case.fault
        fork = bench.start(lambda: _train(bench, root, case.grain, Script(case.fault, told["request"], root=root)))
        try:
            struck = fork.result()
        except Died:
            if not is_killed or fork.wait() != -signal.SIGKILL:
                raise
            struck = True
        if not struck:
            raise Broken(f"the session ended before its {told['request']}: the fault never struck")
        if not is_killed and _digests(root) != (expected := bench.reference(case.grain, **OVERRIDES)):
            other = [place for place in expected if _digests(root).get(place) != expected[place]]
            raise Broken(f"the session with the fault ended, but not as one without: {', '.join(other)}")
        if case.fault.endswith("restored later"):
            bench.fork(lambda: _restore(server, case.fault))
        outcome = bench.check(root, "run", case.grain, **OVERRIDES)
        if outcome.survived:
            compare(bench.folder / "mlflow" / "mlflow.db", Run(root, "run"), case.fault)
        return outcome
    except Exception as error:
        return Outcome(survived=False, redone_seconds=0.0, redone_stages=0, detail=f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(root, ignore_errors=True)


# -- a session with a fault --------------------------------------------------------------------------------------------


@dataclass
class Script:
    """What happens to MLflow, and at which request of the session."""

    fault: str
    request: str
    root: str = ""
    seen: list[str] = field(default_factory=list)
    """What each request of the session was, in order."""
    struck: bool = False
    stages_left: int = 2
    """Until the process is killed, where it is."""

    def before(self, gateway: Gateway, method: str, path: str, body: bytes) -> None:
        """Do what is due before this request is answered."""
        is_over = self.struck and self.fault.endswith("once")
        if is_over:
            gateway.mode = "ok"
        self.seen.append(_name(method, path, body, self.seen))
        if self.struck or self.seen[-1] != self.request:
            return
        self.struck = True
        mode = self.fault.partition(",")[0]
        if mode == "refused":
            gateway.stop()
        elif mode == "slow":
            gateway.delay = 1.2
        elif mode in USERS or self.fault in USERS:
            _delete(gateway.target, self.root, "experiment" if "experiment" in self.fault else "run")
        else:
            gateway.mode = mode

    def listener(self, gateway: Gateway, inner: Listener) -> Listener:
        """Return what a session tells of its stages, with what happens between two of them."""

        def listen(place: str, is_committed: bool) -> None:
            inner(place, is_committed)
            if not self.struck or not is_committed:
                return
            if self.fault == "refused, once" and not gateway.is_listening:
                gateway.start()
            if "killed" in self.fault:
                self.stages_left -= 1
                if self.stages_left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        return listen


def _train(bench: Workbench, root: str, grain: str, script: Script) -> bool:
    """Train with MLflow behind a gateway that follows the script; return whether the fault struck."""
    with _gateway(script) as gateway:
        config = bench.config(grain, **OVERRIDES)
        run = submit(root, "run", config)
        listener = script.listener(gateway, bench.journal(root, "run").listener())
        with open_session(run, config, listener) as session:
            loop.train(session)
    return script.struck


def _recorded(bench: Workbench, grain: str, moment: str) -> list[str]:
    """Return what an undisturbed session asks of MLflow, request by request."""
    script, root = Script("", ""), str(bench.folder / f"recorded-{uuid.uuid4().hex}")
    if moment == "resumed":
        _until_stopped(bench, root, grain)
    _train(bench, root, grain, script)
    return script.seen


def _until_stopped(bench: Workbench, root: str, grain: str) -> None:
    """Train as far as the middle of step 2, with MLflow as it should be."""
    config = bench.config(grain, **OVERRIDES)
    journal = bench.journal(root, "run").listener()

    def listen(place: str, is_committed: bool) -> None:
        journal(place, is_committed)
        if place == STOPPED_AFTER and is_committed:
            raise Stopped(place)

    try:
        with open_session(submit(root, "run", config), config, listen) as session:
            loop.train(session)
    except Stopped:
        return
    raise Broken(f"the session did not stop after {STOPPED_AFTER}")


@contextmanager
def _gateway(script: Script) -> Iterator[Gateway]:
    """Put a gateway before the server, and let the tracker's pauses fit runs of a second."""
    from ratchet.tracking import mlflow_tracker

    gateway = Gateway(os.environ["MLFLOW_TRACKING_URI"])
    gateway.before = partial(script.before, gateway)
    gateway.start()
    os.environ["MLFLOW_TRACKING_URI"] = gateway.uri
    # What is not part of the fault must not depend on how busy this machine is.
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "1" if "hang" in script.fault else "60"
    slow = 1.0 if "slow" in script.fault else 3600.0
    mlflow_tracker.Pauses = partial(mlflow_tracker.Pauses, shortest=0.02, longest=0.3, slow=slow)  # type: ignore
    try:
        yield gateway
    finally:
        gateway.close()


def _name(method: str, path: str, body: bytes, earlier: list[str]) -> str:
    """Say in words what a request asks: the method and its path, of metrics the step, and the how-manieth it is."""
    what = f"{method} {path.partition('?')[0].removeprefix('/api/2.0/')}"
    if "artifacts" in what:
        what = f"{method} {path.rpartition('/')[2].partition('?')[0]}"
    elif body:
        told = json.loads(body)
        steps = sorted({int(metric["step"]) for metric in told.get("metrics", [])})
        what += "".join(f", step {step}" for step in steps[-1:]) + (", params" if told.get("params") else "")
    return next(name for nth in count(1) if (name := f"{what}, {nth}") not in earlier)


# -- the server --------------------------------------------------------------------------------------------------------


def new_experiment(bench: Workbench) -> str:
    """Return the address of the bench's MLflow server, where a new experiment waits for the case."""
    # Before MLflow is imported, here and not in each fork.
    os.environ.update(_CLIENT)
    import sqlalchemy.exc  # noqa: F401
    from mlflow import MlflowClient

    uri = bench.mlflow().uri
    os.environ["MLFLOW_TRACKING_URI"] = uri
    MlflowClient(tracking_uri=uri).search_experiments()
    with closing(sqlite3.connect(bench.folder / "mlflow" / "mlflow.db", timeout=30)) as database, database:
        database.execute("update experiments set name = 'of case ' || experiment_id || ' ' || name where experiment_id")
    return uri


def _delete(uri: str, root: str, what: str) -> None:
    """Do as a user who deletes the run or the experiment in MLflow's own pages, if there is one yet."""
    client, experiment = _found(uri)
    if experiment is None:
        return
    if what == "experiment":
        client.delete_experiment(experiment.experiment_id)
        return
    for found in client.search_runs([experiment.experiment_id]):
        client.delete_run(found.info.run_id)


def _restore(uri: str, fault: str) -> None:
    from mlflow.entities import ViewType

    client, experiment = _found(uri)
    if experiment is None:
        return
    if "experiment" in fault:
        if experiment.lifecycle_stage == "deleted":
            client.restore_experiment(experiment.experiment_id)
        return
    for found in client.search_runs([experiment.experiment_id], run_view_type=ViewType.DELETED_ONLY):
        client.restore_run(found.info.run_id)


def _found(uri: str) -> tuple[Any, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    return client, client.get_experiment_by_name(EXPERIMENT)


# -- what MLflow must have ---------------------------------------------------------------------------------------------


def compare(database: Path, run: Run, fault: str = "") -> None:
    """Raise Broken unless MLflow has the points of the whole chain exactly once, in the run where they belong."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
        tracked = connection.execute(
            "select r.run_uuid, r.lifecycle_stage, r.status, e.name from runs r join tags t using (run_uuid)"
            " join experiments e using (experiment_id) where t.key = 'ratchet.root' and t.value = ?"
            " and e.name not like 'of case%' order by e.name, r.start_time, r.run_uuid",
            (run.uri,),
        ).fetchall()
        active = [one for one in tracked if one[1] == "active"]
        if not active:
            raise Broken(f"MLflow has no active run of {run.uri}, of {tracked}")
        if fault not in USERS and len(tracked) != 1:
            raise Broken(f"MLflow has several runs of {run.uri}: {tracked}")
        current, _, status, _ = active[0]
        if status != "FINISHED":
            raise Broken(f"the run in MLflow is {status}")
        expected = _points(manifests(run))
        for uuid, *_ in active:
            rows = connection.execute("select key, step, value, timestamp from metrics where run_uuid = ?", (uuid,))
            found = rows.fetchall()
            _compare_points(expected, found, is_whole=uuid == current)


def _points(chain: Mapping[str, Any]) -> dict[tuple[str, int], tuple[float, int]]:
    """Metric as MLflow names it, and step -> value, and milliseconds."""
    return {
        (name.replace("@", "_at_"), item.step or 0): (value, int(item.provenance.ended * 1000))
        for item in chain.values()
        for name, value in item.metrics.items()
    }


def _compare_points(expected: Mapping[Any, Any], found: list[Any], *, is_whole: bool) -> None:
    points = {(key, step): (value, timestamp) for key, step, value, timestamp in found}
    if len(points) != len(found):
        raise Broken(f"{len(found) - len(points)} points are twice in MLflow")
    other = sorted(point for point in points if points[point] != expected.get(point))
    if other:
        raise Broken(f"points in MLflow that the chain has not: {other[:5]}")
    missing = sorted(expected.keys() - points.keys(), key=str)
    if is_whole and missing:
        raise Broken(f"{len(missing)} points are missing in MLflow: {missing[:5]}")


def _digests(root: str) -> dict[str, str]:
    return {place: item.content_digest for place, item in manifests(Run(root, "run")).items()}
