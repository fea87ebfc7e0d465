"""What a schedule has started, and its end."""

import logging

from pipelines.runs import PipelineRun, active_runs, get_run
from tests.e2e.live import END_LIMIT, Live, LiveRun

logger = logging.getLogger(__name__)

_NEWEST = 100


def runs_of(live: Live, schedule: str) -> list[PipelineRun]:
    """Return what a schedule has started, oldest first."""
    query = {"namespace": live.api.namespace, "sort_by": "created_at desc", "page_size": _NEWEST}
    newest = live.api.ask("list its newest runs", "GET", "/runs", query=query).get("runs") or []
    own = [one for one in newest if one.get("recurring_run_id") == schedule]
    return [get_run(live.api, str(one["run_id"])) for one in sorted(own, key=lambda one: str(one.get("created_at")))]


def stop(live: Live, run: LiveRun) -> None:
    """Delete the run's schedule, and see to it that what it has started ends."""
    live.command("unschedule", run.run_id)
    run.is_scheduled = False
    for one in active_runs(live.api, run.run_id, live.root):
        logger.info("the schedule of %s had started %s", run.run_id, one.id)
        run.pipeline_runs.append(one.id)
        run.wait_for_end(one.id, limit=END_LIMIT)
