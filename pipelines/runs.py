"""Runs of pipelines on an endpoint: found by what they work on, started, watched, ended.

Traps: only what Ratchet submits is called like its run; what a schedule starts has a name of the server's, so that a
run is found by its parameters too. A listing's filter is decoded twice by the server. A run that was retried in the UI
may never end, terminated or not; deleting it is what helps, and takes nothing from object storage.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from pipelines.api import Api, ConflictError, MissingError
from pipelines.packages import Package
from ratchet.errors import ClusterError, ConfigError, NotAllowedError

logger = logging.getLogger(__name__)

ACTIVE = ("PENDING", "RUNNING", "CANCELING", "PAUSED")
"""States of a pipeline run that has not ended."""

RUN_DATE = {
    "{date}": "{{workflow.creationTimestamp.Y}}{{workflow.creationTimestamp.m}}{{workflow.creationTimestamp.d}}",
    "{time}": "{{workflow.creationTimestamp.H}}{{workflow.creationTimestamp.M}}{{workflow.creationTimestamp.S}}",
}
"""What stands in a scheduled run id -> what Argo fills in when a pipeline run is created. The server's own [[...]] is
not filled in for recurring runs of a pinned version (kubeflow/pipelines#12494)."""

_DATE = re.compile(r"\{\{workflow\.creationTimestamp\.([A-Za-z])\}\}")
_POLLS_LOST = 30
"""Polls in a row that may fail before waiting for a run is given up."""


@dataclass(frozen=True, kw_only=True)
class PipelineTask:
    """One task of a pipeline run, as the server tells it."""

    name: str
    state: str
    started: str
    ended: str
    error: str
    pod: str


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """A run of a pipeline, as the server tells it. Times are RFC 3339, empty where there is none."""

    id: str
    name: str
    state: str
    created: str
    finished: str
    error: str
    schedule: str
    """Id of the schedule that started it; empty where nobody's did."""
    url: str
    parameters: Mapping[str, Any]
    """Those given, and the pipeline's defaults as far as they are known."""
    tasks: tuple[PipelineTask, ...] = ()

    @property
    def run_id(self) -> str:
        """The run that it works on, as far as its parameters say; else its own id."""
        given = str(self.parameters.get("run_id") or "")
        return on_date(given, self.created) or self.id

    @property
    def is_active(self) -> bool:
        """Whether it has not ended."""
        return self.state in ACTIVE

    def works_on(self, run_id: str, root: str | None) -> bool:
        """Whether its run is that one, below that root.

        Without a root, of whatever root; `run_id` may then be its own id, or its name where its parameters say no run.
        """
        if root:
            own = str(self.parameters.get("root") or "")
            return own.rstrip("/") == root.rstrip("/") and run_id == self.run_id
        is_named = not self.schedule and not self.parameters.get("run_id") and self.name == run_id
        return is_named or run_id in (self.run_id, self.id)


def on_date(run_id: str, created: str) -> str:
    """Return a scheduled run id as it is in the pipeline run that was created then (RFC 3339, UTC)."""
    if not created or "{{" not in run_id:
        return run_id
    moment = datetime.fromisoformat(created).astimezone(UTC)
    return _DATE.sub(lambda found: moment.strftime(f"%{found[1]}"), run_id)


def matching(key: str, operation: str, value: str | list[str]) -> str:
    """Return the filter of a listing."""
    given = {"string_value": value} if isinstance(value, str) else {"string_values": {"values": value}}
    return quote(json.dumps({"predicates": [{"key": key, "operation": operation, **given}]}))


def find_experiment(api: Api, name: str) -> str:
    """Return the id of the experiment of that name, which is made where there is none."""
    query = {"filter": matching("display_name", "EQUALS", name), "namespace": api.namespace}

    def known() -> str | None:
        found = api.pages(f"find the experiment {name}", "/experiments", "experiments", query)
        return next((str(one["experiment_id"]) for one in found if one.get("display_name") == name), None)

    body = {"display_name": name, **({"namespace": api.namespace} if api.namespace else {})}
    try:
        return known() or str(
            api.ask(f"make the experiment {name}", "POST", "/experiments", body=body)["experiment_id"]
        )
    except ConflictError:
        # Somebody else made it in between.
        found = known()
        if found is None:
            raise
        return found


def start_run(
    api: Api,
    package: Package,
    values: Mapping[str, Any],
    *,
    name: str,
    experiment: str,
    service_account: str | None = None,
    pipeline_root: str | None = None,
) -> PipelineRun:
    """Start a run of a pipeline. Its parameters are checked first."""
    package.check(values)
    settings = {"parameters": dict(values), **({"pipeline_root": pipeline_root} if pipeline_root else {})}
    body = {
        "display_name": name,
        "experiment_id": find_experiment(api, experiment),
        "pipeline_spec": package.body,
        "runtime_config": settings,
        **({"service_account": service_account} if service_account else {}),
    }
    return _read(api, api.ask(f"start the run {name} of {package.name}", "POST", "/runs", body=body))


def get_run(api: Api, pipeline_run_id: str) -> PipelineRun:
    """Return one pipeline run with its tasks; MissingError if there is none."""
    return _read(api, api.ask(f"show the pipeline run {pipeline_run_id}", "GET", f"/runs/{pipeline_run_id}"))


def active_runs(api: Api, run_id: str, root: str | None = None) -> list[PipelineRun]:
    """Return the pipeline runs that work on a run and have not ended, newest first."""
    query = {"filter": matching("state", "IN", list(ACTIVE)), "namespace": api.namespace, "sort_by": "created_at desc"}
    known: dict[str, Mapping[str, Any]] = {}
    found = (_with_defaults(api, one, known) for one in api.pages("list its active runs", "/runs", "runs", query))
    return [one for one in found if one.is_active and one.works_on(run_id, root)]


def _with_defaults(api: Api, told: Mapping[str, Any], known: dict[str, Mapping[str, Any]]) -> PipelineRun:
    """Return a pipeline run with what its parameters leave to its pipeline; `known` are versions asked for before."""
    run, reference = _read(api, told), told.get("pipeline_version_reference") or {}
    pipeline, version = (str(reference.get(name) or "") for name in ("pipeline_id", "pipeline_version_id"))
    if version and not {"root", "run_id"} <= set(run.parameters):
        if version not in known:
            path = f"/pipelines/{pipeline}/versions/{version}"
            try:
                known[version] = api.ask(f"show the version {version} of a pipeline", "GET", path)
            except (MissingError, NotAllowedError) as error:
                logger.info("what the pipeline run %s leaves to its pipeline is not known: %s", run.id, error)
                known[version] = {}
        run = _read(api, {**told, "pipeline_spec": known[version].get("pipeline_spec")})
    return run


def find_active(api: Api, place: str) -> list[PipelineRun]:
    """Return the active pipeline runs of ROOT/RUN-ID, of a run id, or of a pipeline run's id."""
    root, _, name = place.rstrip("/").rpartition("/")
    return active_runs(api, name, root or None)


def terminate_run(api: Api, run: PipelineRun) -> None:
    """End a pipeline run; its pods get SIGTERM at the controller's next turn."""
    api.ask(f"terminate the pipeline run {run.id}", "POST", f"/runs/{run.id}:terminate")


def delete_run(api: Api, run: PipelineRun) -> None:
    """Delete a pipeline run and its workflow; what lies in object storage stays."""
    try:
        api.ask(f"delete the pipeline run {run.id}", "DELETE", f"/runs/{run.id}")
    except MissingError:
        logger.info("pipeline run %s is gone already", run.id)


def wait_for(
    api: Api, pipeline_run_id: str, *, every: float = 10.0, listener: Callable[[PipelineRun], None] | None = None
) -> PipelineRun:
    """Return the pipeline run once it has ended; `listener` hears of every change of its state."""
    state, lost = "", 0
    while True:
        try:
            run = get_run(api, pipeline_run_id)
            lost = 0
        except (ClusterError, ConfigError) as error:
            lost += 1
            if isinstance(error, MissingError) or lost > _POLLS_LOST:
                raise
            logger.info("%s", error)
            time.sleep(every)
            continue
        if listener is not None and run.state != state:
            listener(run)
        state = run.state
        if not run.is_active:
            return run
        time.sleep(every)


def _read(api: Api, told: Mapping[str, Any]) -> PipelineRun:
    identity = str(told.get("run_id") or "")
    return PipelineRun(
        id=identity,
        name=str(told.get("display_name") or ""),
        state=str(told.get("state") or "PENDING"),
        created=_moment(told.get("created_at")),
        finished=_moment(told.get("finished_at")),
        error=_reason(told),
        schedule=str(told.get("recurring_run_id") or ""),
        url=api.page(f"runs/details/{identity}"),
        parameters=_defaults(told) | ((told.get("runtime_config") or {}).get("parameters") or {}),
        tasks=tuple(_tasks((told.get("run_details") or {}).get("task_details") or ())),
    )


def _defaults(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters' defaults in a pipeline run's own pipeline; none where it is of an uploaded version."""
    spec = told.get("pipeline_spec") or {}
    root = (spec.get("pipeline_spec") or spec).get("root") or {}
    declared = (root.get("inputDefinitions") or {}).get("parameters") or {}
    return {name: one["defaultValue"] for name, one in declared.items() if "defaultValue" in one}


def _tasks(told: Iterable[Mapping[str, Any]]) -> Iterator[PipelineTask]:
    for one in told:
        children = (child.get("pod_name") for child in one.get("child_tasks") or ())
        yield PipelineTask(
            name=str(one.get("display_name") or one.get("task_id") or ""),
            state=str(one.get("state") or ""),
            started=_moment(one.get("start_time")),
            ended=_moment(one.get("end_time")),
            error=_reason(one),
            pod=str(one.get("pod_name") or next(filter(None, children), "")),
        )


def _reason(told: Mapping[str, Any]) -> str:
    return str((told.get("error") or {}).get("message") or "")


def _moment(told: Any) -> str:
    # What has not happened yet is the beginning of time to a server.
    return "" if not told or str(told).startswith("1970-") else str(told)
