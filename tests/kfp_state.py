"""What a Kubeflow Pipelines server knows and does, without its HTTP (`tests.kfp_endpoint`) and without a cluster."""

import itertools
from typing import Any

from tests import kfp_checks
from tests.kfp_checks import Refused

Requests = list[tuple[str, str, Any]]
"""(method, path, body) of every request."""
Answer = dict[str, Any]
Query = dict[str, str]

_ENDED = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")


class KfpServer:
    """What the server knows, and what tests may do to it."""

    def __init__(self, *, token: str = "", cookie: str = "", has_profiles: bool = False, page: int = 200) -> None:
        self.url = ""
        self.token, self.cookie, self.has_profiles, self.page = token, cookie, has_profiles, page
        self.prefix = ""
        """Path below which the API lies."""
        self.requests: Requests = []
        self.headers: list[dict[str, str]] = []
        self.answers: dict[str, tuple[int, dict[str, str], bytes]] = {}
        """Part of a path -> (status, headers, body) that is answered instead."""
        self.experiments: list[Answer] = []
        self.pipelines: list[Answer] = []
        self.versions: list[Answer] = []
        self.runs: list[Answer] = []
        self.schedules: list[Answer] = []
        self._seconds = 0
        self._numbers = {kind: itertools.count(1) for kind in "epvrs"}

    # -- for tests ---------------------------------------------------------------------------------------------------

    def asked(self, method: str, part: str) -> list[Any]:
        """Return the bodies of the requests of that method whose path has that part."""
        return [body for verb, path, body in self.requests if verb == method and part in path]

    def run(self, run_id: str) -> Answer:
        """Return one run, to look at or to change."""
        return _one(self.runs, "run_id", run_id)

    def set_state(self, run_id: str, state: str, *tasks: Answer, **fields: Any) -> None:
        """Say what has become of a run; `tasks` are its task_details."""
        run = self.run(run_id)
        run.update(state=state, **fields)
        if tasks:
            run["run_details"] = {"task_details": list(tasks)}
        if state in _ENDED:
            run["finished_at"] = self.now()

    def add_run(self, **fields: Any) -> str:
        """Add a run that somebody started elsewhere; return its id."""
        identity = self._new("r")
        known = {"run_id": identity, "display_name": identity, "state": "RUNNING", "created_at": self.now()}
        self.runs.append({"experiment_id": "e-1", **known, **fields})
        return identity

    def tick(self, schedule_id: str) -> str | None:
        """Let a schedule's turn come; return the id of the run that it started, None where it starts none."""
        schedule = _one(self.schedules, "recurring_run_id", schedule_id)
        own = [run for run in self.runs if run.get("recurring_run_id") == schedule_id]
        active = [run for run in own if run["state"] not in _ENDED]
        if schedule["status"] != "ENABLED" or len(active) >= int(schedule["max_concurrency"]):
            return None
        # Nothing of a pinned version's parameters is filled in, and the name is the server's.
        return self.add_run(
            display_name=f"{schedule['display_name'][:25]}x7k2p-{len(own) + 1}-{1234567890 + len(own)}",
            recurring_run_id=schedule_id,
            experiment_id=schedule["experiment_id"],
            pipeline_version_reference=schedule["pipeline_version_reference"],
            runtime_config=schedule["runtime_config"],
        )

    def now(self) -> str:
        """Return a moment that is later than every one before."""
        self._seconds += 1
        return f"2026-11-30T07:{self._seconds // 60:02}:{self._seconds % 60:02}Z"

    # -- experiments and pipelines -----------------------------------------------------------------------------------

    def list_experiments(self, query: Query) -> Answer:
        return self._page("experiments", self.experiments, "/experiments", query)

    def make_experiment(self, query: Query, body: Answer) -> Answer:
        kfp_checks.check_body(body, "V2beta1Experiment")
        namespace = self._namespace(body.get("namespace", ""))
        self._refuse_second(self.experiments, display_name=body["display_name"], namespace=namespace)
        made = {**body, "experiment_id": self._new("e"), "namespace": namespace}
        self.experiments.append({**made, "created_at": self.now()})
        return made

    def list_pipelines(self, query: Query) -> Answer:
        return self._page("pipelines", self.pipelines, "/pipelines", query)

    def make_pipeline(self, query: Query, body: Answer) -> Answer:
        kfp_checks.check_body(body, "V2beta1Pipeline")
        namespace = self._namespace(body.get("namespace", ""))
        self._refuse_second(self.pipelines, display_name=body["display_name"], namespace=namespace)
        made = {**body, "pipeline_id": self._new("p"), "namespace": namespace}
        self.pipelines.append({**made, "created_at": self.now()})
        return made

    def list_versions(self, query: Query, pipeline_id: str) -> Answer:
        _one(self.pipelines, "pipeline_id", pipeline_id)
        found = [one for one in self.versions if one["pipeline_id"] == pipeline_id]
        return self._page("pipeline_versions", found, "/versions", {**query, "namespace": "any"})

    def get_version(self, query: Query, pipeline_id: str, version_id: str) -> Answer:
        _one(self.pipelines, "pipeline_id", pipeline_id)
        return _one(self.versions, "pipeline_version_id", version_id)

    def upload_version(self, query: Query, uploaded: bytes) -> Answer:
        _one(self.pipelines, "pipeline_id", query["pipelineid"])
        spec, platform = kfp_checks.parse_yaml(uploaded)
        self._refuse_second(self.versions, display_name=query["name"], pipeline_id=query["pipelineid"])
        told = {"pipeline_spec": spec, "platform_spec": platform} if platform else spec
        made = {
            "pipeline_id": query["pipelineid"],
            "pipeline_version_id": self._new("v"),
            "display_name": query["name"],
            "description": query.get("description", ""),
            "pipeline_spec": told,
        }
        self.versions.append({**made, "created_at": self.now()})
        return made

    # -- runs --------------------------------------------------------------------------------------------------------

    def list_runs(self, query: Query) -> Answer:
        return self._page("runs", self.runs, "/runs", query)

    def make_run(self, query: Query, body: Answer) -> Answer:
        kfp_checks.check_body(body, "V2beta1Run")
        experiment = _one(self.experiments, "experiment_id", body.get("experiment_id", ""))
        self._check_work(body)
        identity = self._new("r")
        made = {"run_id": identity, "state": "PENDING", "created_at": self.now(), "finished_at": "1970-01-01T00:00:00Z"}
        self.runs.append({**body, **made, "namespace": experiment["namespace"]})
        return self.get_run(query, identity)

    def get_run(self, query: Query, run_id: str) -> Answer:
        return {name: value for name, value in self.run(run_id).items() if name != "namespace"}

    def delete_run(self, query: Query, run_id: str) -> Answer:
        self.runs.remove(self.run(run_id))
        return {}

    def terminate_run(self, query: Query, run_id: str) -> Answer:
        if self.run(run_id)["state"] in _ENDED:
            raise Refused(400, f"Failed to terminate run {run_id}: it is not running")
        self.run(run_id)["state"] = "CANCELING"
        return {}

    # -- recurring runs ----------------------------------------------------------------------------------------------

    def list_schedules(self, query: Query) -> Answer:
        return self._page("recurringRuns", self.schedules, "/recurringruns", query)

    def make_schedule(self, query: Query, body: Answer) -> Answer:
        kfp_checks.check_body(body, "V2beta1RecurringRun")
        experiment = _one(self.experiments, "experiment_id", body.get("experiment_id", ""))
        self._check_work(body)
        if not 1 <= int(body.get("max_concurrency", 0)) <= 10:
            raise Refused(400, "Max concurrency of a recurring run must be at least 1 and at most 10")
        cron = body["trigger"].get("cron_schedule", {}).get("cron", "* * * * * *")
        # The server takes five fields, too, and means the first for the second.
        if not 5 <= len(cron.split()) <= 6:
            raise Refused(400, "Schedule cron is not a supported format(https://godoc.org/github.com/robfig/cron)")
        made = {**body, "recurring_run_id": self._new("s"), "created_at": self.now()}
        made["status"] = "ENABLED" if body.get("mode") == "ENABLE" else "DISABLED"
        # What nobody gave is the installation's.
        made.setdefault("service_account", "pipeline-runner")
        self.schedules.append({**made, "namespace": experiment["namespace"]})
        return made

    def get_schedule(self, query: Query, schedule_id: str) -> Answer:
        return _one(self.schedules, "recurring_run_id", schedule_id)

    def switch_schedule(self, query: Query, schedule_id: str, verb: str) -> Answer:
        _one(self.schedules, "recurring_run_id", schedule_id)["status"] = f"{verb.upper()}D"
        return {}

    def delete_schedule(self, query: Query, schedule_id: str) -> Answer:
        self.schedules.remove(_one(self.schedules, "recurring_run_id", schedule_id))
        for run in self.runs:
            is_own = run.get("recurring_run_id") == schedule_id and run["state"] not in _ENDED
            if is_own and query.get("propagation_policy") != "ORPHAN":
                self.set_state(run["run_id"], "FAILED")
        return {}

    def healthz(self, query: Query) -> Answer:
        return {"multi_user": True} if self.has_profiles else {}

    # -- what they share ---------------------------------------------------------------------------------------------

    def _new(self, kind: str) -> str:
        """Return an id that nothing had before, deleted or not."""
        return f"{kind}-{next(self._numbers[kind])}"

    def _check_work(self, body: Answer) -> None:
        """Refuse a run whose pipeline is none, or which is given what the pipeline does not take."""
        reference = body.get("pipeline_version_reference")
        if (reference is None) == ("pipeline_spec" not in body):
            raise Refused(400, "expected a pipeline spec or a pipeline version")
        if reference is not None:
            found = _one(self.versions, "pipeline_version_id", reference["pipeline_version_id"])
            spec = kfp_checks.spec_in(found["pipeline_spec"])
        else:
            spec = kfp_checks.spec_in(body["pipeline_spec"])
        kfp_checks.check_parameters(spec, body.get("runtime_config", {}).get("parameters", {}))

    def _page(self, key: str, items: list[Answer], kind: str, query: Query) -> Answer:
        namespace = self._namespace(query.get("namespace", ""))
        found = [one for one in items if kind == "/versions" or not namespace or one.get("namespace") == namespace]
        found = kfp_checks.keep(found, query.get("filter", ""), kfp_checks.FILTERED[kind])
        if query.get("sort_by") == "created_at desc":
            found = sorted(found, key=lambda one: one["created_at"], reverse=True)
        start, size = int(query.get("page_token") or 0), min(int(query.get("page_size") or 20), self.page)
        shown = {key: found[start : start + size]} if found[start : start + size] else {}
        return shown | ({"next_page_token": str(start + size)} if start + size < len(found) else {})

    def _namespace(self, given: str) -> str:
        if not self.has_profiles:
            return ""
        if not given:
            raise Refused(400, "Resource cannot have an empty namespace in multi-user mode")
        return given

    @staticmethod
    def _refuse_second(items: list[Answer], **fields: str) -> None:
        if any(all(one.get(name) == value for name, value in fields.items()) for one in items):
            raise Refused(409, f"Already exist error: {fields}")


def _one(items: list[Answer], key: str, identity: str) -> Answer:
    found = next((one for one in items if one[key] == identity), None)
    if found is None:
        raise Refused(404, f"{key} {identity} not found.")
    return found
