"""Recurring runs of a pipeline: one at a time, none that were missed, each pinned to a version of the pipeline.

Traps: a recurring run cannot be changed, so a new one replaces it; deleting one deletes the run that it started, unless
the server is told to leave that alone. Its first interval passes before its first run, unless it began in the past.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pipelines.api import Api
from pipelines.cron import check_cron
from pipelines.packages import Package
from pipelines.runs import RUN_DATE, active_runs, find_experiment, matching, on_date
from pipelines.uploads import upload
from ratchet.errors import ClusterError, ConfigError
from ratchet.store.layout import check_run_id

logger = logging.getLogger(__name__)

_MARK = re.compile(r"\[ratchet ([0-9a-f]{16})\]")
_EXAMPLE = "2026-01-01T00:00:00Z"


@dataclass(frozen=True, kw_only=True)
class Trigger:
    """When a schedule starts runs: by `cron` or every `minutes`, between `start` and `end` (RFC 3339)."""

    cron: str | None = None
    minutes: int | None = None
    start: str | None = None
    end: str | None = None
    is_at_once: bool = False
    """Whether the first of `minutes` begins now, unless there is a `start`."""

    def __post_init__(self) -> None:
        if (self.cron is None) == (self.minutes is None):
            raise ConfigError(
                "a schedule has either a cron expression or an interval: pass --cron, --every or --keep-alive"
            )
        if self.minutes is not None and self.minutes < 1:
            raise ConfigError(f"--every {self.minutes}: expected at least one minute")
        if self.cron is not None:
            check_cron(self.cron)
            if self.is_at_once:
                raise ConfigError(
                    "--keep-alive begins now, and a cron expression begins at its own time: pass --every instead of "
                    "--cron, or --cron without --keep-alive"
                )
        for name, moment in (("--start", self.start), ("--end", self.end)):
            if moment is not None:
                _utc(name, moment)

    @property
    def content(self) -> dict[str, Any]:
        """What makes two triggers the same one."""
        return {
            "cron": self.cron and check_cron(self.cron),
            "minutes": self.minutes,
            "start": self.start,
            "end": self.end,
        }

    @property
    def starts_now(self) -> bool:
        """Whether a run starts as soon as there is such a schedule."""
        return self.is_at_once and self.start is None

    def body(self) -> dict[str, Any]:
        """Return the trigger as the server takes it."""
        start = _utc("--start", self.start) if self.start else None
        if self.starts_now and self.minutes is not None:
            start = _text(datetime.now(UTC) - timedelta(minutes=self.minutes))
        span = {"start_time": start, "end_time": _utc("--end", self.end) if self.end else None}
        stated = {name: value for name, value in span.items() if value is not None}
        if self.cron is not None:
            return {"cron_schedule": {**stated, "cron": check_cron(self.cron)}}
        assert self.minutes is not None
        return {"periodic_schedule": {**stated, "interval_second": str(self.minutes * 60)}}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A recurring run, as the server tells it."""

    id: str
    name: str
    when: str
    """Its cron expression, or its interval."""
    is_enabled: bool
    run_id: str
    """The run id that its runs are given; empty takes each pipeline run's own."""
    pipeline_version_id: str
    created: str
    mark: str
    """Digest of what Ratchet asked for; empty where somebody else made it."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What was done about a schedule."""

    schedule: Schedule
    what: str
    """created, replaced, enabled, disabled or unchanged."""


def schedule(
    api: Api,
    package: Package,
    *,
    name: str,
    values: Mapping[str, Any],
    trigger: Trigger,
    experiment: str,
    service_account: str | None = None,
    pipeline_root: str | None = None,
    is_enabled: bool = True,
    is_forced: bool = False,
) -> Change:
    """Make a recurring run of a pipeline, or replace the one of that name if it has other content.

    It is pinned to a version of the pipeline whose defaults are its parameters, which is uploaded. In the parameter
    run_id, {date} and {time} (UTC) are those of each pipeline run's start. A run that somebody else works on now is
    refused unless `is_forced`: a schedule that starts at once would take it over.
    """
    check_run_id(name)
    given = dict(values) | ({"run_id": _run_id(str(values["run_id"]))} if values.get("run_id") else {})
    # A server with plugins (KFP 2.17 with MLflow) forgets a recurring run's parameters: its version knows them, too.
    version = upload(api, package.with_defaults(given))
    content = {
        "version": version.version_id,
        "parameters": given,
        "trigger": trigger.content,
        "service_account": service_account,
        "experiment": experiment,
        "pipeline_root": pipeline_root,
    }
    mark = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    known = schedules(api, name=name)
    same = next((one for one in known if one.mark == mark), None)
    if same is not None:
        # What a replacement that was interrupted left.
        _delete(api, [one for one in known if one.id != same.id])
        if same.is_enabled == is_enabled:
            return Change(schedule=same, what="unchanged")
        return Change(schedule=switch(api, same, on=is_enabled), what="enabled" if is_enabled else "disabled")
    if not is_forced and trigger.starts_now:
        root = str(package.value("root", given) or "")
        _refuse_takeover(api, str(given.get("run_id") or ""), root, known)
    body = {
        "display_name": name,
        "description": f"{package.name}, version {version.version}, by Ratchet [ratchet {mark}]",
        "experiment_id": find_experiment(api, experiment),
        "pipeline_version_reference": {"pipeline_id": version.pipeline_id, "pipeline_version_id": version.version_id},
        "runtime_config": {"parameters": given, **({"pipeline_root": pipeline_root} if pipeline_root else {})},
        "max_concurrency": "1",
        "no_catchup": True,
        "mode": "ENABLE" if is_enabled else "DISABLE",
        "trigger": trigger.body(),
        **({"service_account": service_account} if service_account else {}),
    }
    with _paused(api, known):
        made = _read(api.ask(f"make the schedule {name}", "POST", "/recurringruns", body=body))
    _delete(api, known)
    return Change(schedule=made, what="replaced" if known else "created")


def schedules(api: Api, *, name: str | None = None) -> list[Schedule]:
    """Return the recurring runs, of that name where one is given, newest first."""
    query = {"namespace": api.namespace, "sort_by": "created_at desc"}
    if name is not None:
        query["filter"] = matching("display_name", "EQUALS", name)
    found = api.pages("list its schedules", "/recurringruns", "recurringRuns", query)
    read = [_read(one) for one in found]
    return [one for one in read if name in (None, one.name)]


def find_schedules(api: Api, name: str) -> list[Schedule]:
    """Return the recurring runs of that name or id; ConfigError where there are none."""
    known = schedules(api)
    found = [one for one in known if name in (one.name, one.id)]
    if not found:
        there = ", ".join(sorted({one.name for one in known})) or "none"
        raise ConfigError(f"{api.place} has no schedule {name!r}; there are: {there}")
    return found


def switch(api: Api, one: Schedule, *, on: bool) -> Schedule:
    """Let a schedule start runs, or keep it from it; return it as it is then."""
    verb = "enable" if on else "disable"
    api.ask(f"{verb} the schedule {one.name}", "POST", f"/recurringruns/{one.id}:{verb}")
    return _read(api.ask(f"show the schedule {one.name}", "GET", f"/recurringruns/{one.id}"))


def unschedule(api: Api, name: str, *, only_disable: bool = False) -> list[Schedule]:
    """Delete the schedules of that name, or disable them. The run that one has started goes on to its end."""
    found = find_schedules(api, name)
    if only_disable:
        return [switch(api, one, on=False) for one in found]
    _delete(api, found)
    return found


@contextmanager
def _paused(api: Api, found: list[Schedule]) -> Iterator[None]:
    """Keep schedules from starting runs while their successor is made; they may go on where that fails."""
    # Two that are on at once would start two runs, of which one loses the run to the other.
    was_on = [one for one in found if one.is_enabled]
    is_done = False
    try:
        for one in was_on:
            switch(api, one, on=False)
        yield
        is_done = True
    finally:
        for one in [] if is_done else was_on:
            try:
                switch(api, one, on=True)
            except (ClusterError, ConfigError) as error:
                logger.warning("the schedule %s (%s) is off, and cannot be let go again: %s", one.name, one.id, error)


def _delete(api: Api, found: list[Schedule]) -> None:
    for one in found:
        query = {"propagation_policy": "ORPHAN"}
        api.ask(f"delete the schedule {one.name}", "DELETE", f"/recurringruns/{one.id}", query=query)


def _refuse_takeover(api: Api, run_id: str, root: str | None, known: list[Schedule]) -> None:
    own = {one.id for one in known}
    others = [one for one in active_runs(api, run_id, root) if one.schedule not in own] if run_id else []
    if others:
        raise ConfigError(
            f"the pipeline run {others[0].id} works on run {run_id} now ({others[0].state}), and a schedule that "
            f"starts at once would take the run from it: end it first (ratchet terminate {run_id}), wait for it, or "
            "pass --force"
        )


def _run_id(given: str) -> str:
    """Return a run id with its {date} and {time} as Argo fills them in; ConfigError if it would be none."""
    if "[[" in given:
        raise ConfigError(
            f"run id {given!r}: Kubeflow Pipelines does not fill in [[...]] for a recurring run of a pinned version; "
            "write {date} or {time}, as in nightly-{date}"
        )
    for name, macro in RUN_DATE.items():
        given = given.replace(name, macro)
    check_run_id(on_date(given, _EXAMPLE))
    return given


def _read(told: Mapping[str, Any]) -> Schedule:
    trigger = told.get("trigger") or {}
    cron, periodic = trigger.get("cron_schedule") or {}, trigger.get("periodic_schedule") or {}
    seconds = int(periodic.get("interval_second") or 0)
    mark = _MARK.search(str(told.get("description") or ""))
    return Schedule(
        id=str(told.get("recurring_run_id") or ""),
        name=str(told.get("display_name") or ""),
        when=str(cron.get("cron") or "") or " ".join(_interval(seconds)),
        is_enabled=told.get("status") == "ENABLED" or (told.get("status") is None and told.get("mode") == "ENABLE"),
        run_id=_shown((told.get("runtime_config") or {}).get("parameters") or {}),
        pipeline_version_id=str((told.get("pipeline_version_reference") or {}).get("pipeline_version_id") or ""),
        created=str(told.get("created_at") or ""),
        mark=mark[1] if mark else "",
    )


def _shown(parameters: Mapping[str, Any]) -> str:
    run_id = str(parameters.get("run_id") or "")
    for name, macro in RUN_DATE.items():
        run_id = run_id.replace(macro, name)
    return run_id


def _interval(seconds: int) -> Iterator[str]:
    yield "every"
    yield f"{seconds // 60} min" if seconds % 60 == 0 else f"{seconds} s"


def _utc(name: str, text: str) -> str:
    """Return a moment as the server takes it; one without an offset is in UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"{name} {text!r}: expected a moment such as {_EXAMPLE}") from error
    return _text(moment if moment.tzinfo else moment.replace(tzinfo=UTC))


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
