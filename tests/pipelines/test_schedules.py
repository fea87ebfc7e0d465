"""Recurring runs: when, of what, how they are replaced, and what is called as on that day."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipelines import runs, schedules, submissions
from pipelines.api import Api
from pipelines.client import open_api
from pipelines.packages import Package, find_package
from pipelines.schedules import Change, Trigger
from ratchet.errors import ClusterError, ConfigError
from ratchet.store.layout import check_run_id
from tests.kfp_endpoint import KfpServer, forget_endpoints, kfp_server

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

NIGHT = Trigger(cron="0 0 2 * * *")
VALUES = {"root": "s3://b/runs", "run_id": "qwen"}


@pytest.fixture(scope="module")
def package() -> Package:
    return find_package("nightly")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forget_endpoints(monkeypatch, tmp_path)


def _schedule(api: Api, package: Package, trigger: Trigger = NIGHT, **options: Any) -> Change:
    given = {"name": "nightly", "values": VALUES, "experiment": "sums", **options}
    return schedules.schedule(api, package, trigger=trigger, **given)


# -- triggers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "either a cron expression or an interval"),
        ({"cron": "0 0 2 * * *", "minutes": 5}, "either a cron expression or an interval"),
        (
            {"cron": "0 0 2 * * *", "is_at_once": True},
            "--keep-alive begins now, and a cron expression begins at its own",
        ),
        ({"minutes": 0}, "--every 0: expected at least one minute"),
        ({"cron": "0 2 * * *"}, "has five fields"),
        ({"minutes": 5, "start": "tomorrow"}, "--start 'tomorrow': expected a moment such as 2026-01-01T00:00:00Z"),
        ({"minutes": 5, "end": "soon"}, "--end 'soon': expected a moment"),
    ],
)
def test_a_trigger_that_cannot_be_meant_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Trigger(**options)
    assert why in str(refused.value)


def test_moments_reach_the_server_in_utc() -> None:
    trigger = Trigger(cron="0 0 2 * * *", start="2026-12-01T02:00:00+02:00", end="2026-12-24")
    span = {"start_time": "2026-12-01T00:00:00Z", "end_time": "2026-12-24T00:00:00Z"}
    assert trigger.body() == {"cron_schedule": {**span, "cron": "0 0 2 * * *"}}


def test_a_first_run_at_once_is_an_interval_that_is_over_now() -> None:
    found = Trigger(minutes=10, is_at_once=True).body()["periodic_schedule"]
    began = datetime.fromisoformat(found["start_time"])
    assert found["interval_second"] == "600"
    assert 600 <= (datetime.now(UTC) - began).total_seconds() < 605
    assert "start_time" not in Trigger(minutes=10).body()["periodic_schedule"]


# -- making and replacing --------------------------------------------------------------------------------------------


def test_a_schedule_starts_one_run_at_a_time_of_a_pinned_version(api: Api, server: KfpServer, package: Package) -> None:
    done = _schedule(api, package, service_account="trainer", pipeline_root="s3://b/kfp")
    assert (done.what, done.schedule.when, done.schedule.is_enabled) == ("created", "0 0 2 * * *", True)
    (body,), (version,) = server.asked("POST", "/recurringruns"), server.versions
    assert body == {
        "display_name": "nightly",
        "description": f"ratchet-nightly, version {version['display_name']}, by Ratchet [ratchet {done.schedule.mark}]",
        "experiment_id": "e-1",
        "pipeline_version_reference": {"pipeline_id": "p-1", "pipeline_version_id": "v-1"},
        "runtime_config": {"parameters": VALUES, "pipeline_root": "s3://b/kfp"},
        "max_concurrency": "1",
        "no_catchup": True,
        "mode": "ENABLE",
        "trigger": {"cron_schedule": {"cron": "0 0 2 * * *"}},
        "service_account": "trainer",
    }
    assert server.tick("s-1") == "r-1"
    assert server.tick("s-1") is None
    server.set_state("r-1", "SUCCEEDED")
    assert server.tick("s-1") == "r-2"


@pytest.mark.parametrize("trigger", [NIGHT, Trigger(minutes=10, is_at_once=True)])
def test_the_same_again_changes_nothing(api: Api, server: KfpServer, package: Package, trigger: Trigger) -> None:
    first, again = (_schedule(api, package, trigger) for _ in range(2))
    assert (first.what, again.what, again.schedule.id) == ("created", "unchanged", first.schedule.id)
    assert len(server.schedules) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"trigger": Trigger(cron="0 0 3 * * *")},
        {"trigger": Trigger(cron="0 0 2 * * *", end="2026-12-24")},
        {"values": VALUES | {"total_steps": 3}},
        {"service_account": "trainer"},
        {"experiment": "others"},
        {"pipeline_root": "s3://b/kfp"},
    ],
)
def test_other_content_under_the_same_name_replaces_it_and_leaves_its_run_alone(
    api: Api, server: KfpServer, package: Package, change: dict[str, Any]
) -> None:
    _schedule(api, package)
    running = server.tick("s-1")
    done = _schedule(api, package, **change)
    assert (done.what, [one["recurring_run_id"] for one in server.schedules]) == ("replaced", ["s-2"])
    order = [(method, path.partition("?")[0].rpartition("/")[2]) for method, path, _ in server.requests]
    made = max(at for at, one in enumerate(order) if one == ("POST", "recurringruns"))
    # Never two that are on at once: each would start a run.
    assert order.index(("POST", "s-1:disable")) < made < order.index(("DELETE", "s-1"))
    assert server.run(str(running))["state"] == "RUNNING"


def test_a_schedule_goes_on_where_its_successor_cannot_be_made(
    api: Api, server: KfpServer, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    _schedule(api, package)
    asked = Api.ask

    def refuse(self: Api, what: str, method: str, path: str, **options: Any) -> dict[str, Any]:
        if (method, path) == ("POST", "/recurringruns"):
            options["body"] = {**options["body"], "max_concurrency": "0"}
        return asked(self, what, method, path, **options)

    monkeypatch.setattr(Api, "ask", refuse)
    with pytest.raises(ClusterError, match="Max concurrency"):
        _schedule(api, package, Trigger(cron="0 0 3 * * *"))
    assert [(one["recurring_run_id"], one["status"]) for one in server.schedules] == [("s-1", "ENABLED")]
    paths = [path.rpartition("/")[2] for method, path, _ in server.requests if method == "POST"]
    assert [path for path in paths if path.startswith("s-1:")] == ["s-1:disable", "s-1:enable"]


def test_a_schedule_that_was_off_stays_off_where_its_successor_cannot_be_made(
    api: Api, server: KfpServer, package: Package
) -> None:
    _schedule(api, package, is_enabled=False)
    with pytest.raises(ClusterError), schedules._paused(api, schedules.schedules(api)):
        raise ClusterError("not now")
    assert server.schedules[0]["status"] == "DISABLED"


def test_ids_do_not_come_again(api: Api, server: KfpServer, package: Package) -> None:
    for name in ("one", "two"):
        _schedule(api, package, name=name)
    schedules.unschedule(api, "one")
    assert _schedule(api, package, name="three").schedule.id == "s-3"


def test_another_pipeline_replaces_it(api: Api, server: KfpServer, package: Package) -> None:
    _schedule(api, package)
    done = _schedule(api, find_package("grpo"))
    assert (done.what, done.schedule.pipeline_version_id, len(server.pipelines)) == ("replaced", "v-2", 2)


def test_the_version_knows_the_parameters_that_a_server_may_forget(
    api: Api, server: KfpServer, package: Package
) -> None:
    """KFP 2.17 with its MLflow plugin starts a pinned version without the recurring run's parameters."""
    values = VALUES | {"total_steps": 3, "min_accuracy": 0.25, "device_map": {"segment": {"cpu": "4"}}}
    _schedule(api, package, values=values)
    declared = server.versions[0]["pipeline_spec"]["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]
    assert {name: declared[name]["defaultValue"] for name in values} == values
    assert declared["champion"] == package.parameters["champion"]


def test_what_an_interrupted_replacement_left_is_tidied(
    api: Api, server: KfpServer, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    _schedule(api, package)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(schedules, "_delete", lambda *_: None)
        _schedule(api, package, Trigger(cron="0 0 3 * * *"))
    assert len(server.schedules) == 2
    assert _schedule(api, package, Trigger(cron="0 0 3 * * *")).what == "unchanged"
    assert [one["recurring_run_id"] for one in server.schedules] == ["s-2"]


def test_a_schedule_can_be_made_to_wait_and_let_go(api: Api, server: KfpServer, package: Package) -> None:
    assert _schedule(api, package, is_enabled=False).schedule.is_enabled is False
    assert server.tick("s-1") is None
    done = _schedule(api, package)
    assert (done.what, done.schedule.is_enabled, done.schedule.id) == ("enabled", True, "s-1")
    assert _schedule(api, package, is_enabled=False).what == "disabled"
    assert server.tick("s-1") is None


def test_parameters_are_checked_before_anything_is_made(api: Api, server: KfpServer, package: Package) -> None:
    with pytest.raises(ConfigError, match="total_steps: expected a whole number"):
        _schedule(api, package, values={"total_steps": "3"})
    with pytest.raises(ConfigError, match="run id 'a b': expected"):
        _schedule(api, package, name="a b")
    assert server.schedules == []


# -- a run that is kept alive ----------------------------------------------------------------------------------------

ALIVE = Trigger(minutes=10, is_at_once=True)


def test_a_run_that_somebody_works_on_is_not_taken_over_at_once(api: Api, server: KfpServer, package: Package) -> None:
    ordered = submissions.order(package, {}, root="s3://b/runs", run_id="qwen")
    submissions.submit(api, ordered, experiment="sums")
    with pytest.raises(
        ConfigError, match=r"the pipeline run r-1 works on run qwen now \(PENDING\).*ratchet terminate qwen"
    ):
        _schedule(api, package, ALIVE)
    assert _schedule(api, package, ALIVE, is_forced=True).what == "created"
    server.set_state("r-1", "FAILED")
    server.tick("s-1")
    assert _schedule(api, package, Trigger(minutes=20, is_at_once=True)).what == "replaced"


def test_a_root_that_is_left_to_the_pipeline_is_compared_too(api: Api, server: KfpServer, package: Package) -> None:
    elsewhere = submissions.order(package, {}, root="s3://elsewhere", run_id="qwen")
    submissions.submit(api, elsewhere, experiment="sums")
    assert _schedule(api, package, ALIVE, values={"run_id": "qwen"}).what == "created"


def test_only_a_schedule_that_starts_now_takes_a_run_over_now(api: Api, server: KfpServer, package: Package) -> None:
    submissions.submit(api, submissions.order(package, dict(VALUES)), experiment="sums")
    later = Trigger(minutes=10, is_at_once=True, start="2099-01-01")
    assert _schedule(api, package, later).what == "created"


def test_each_turn_submits_the_same_run_again(api: Api, server: KfpServer, package: Package) -> None:
    _schedule(api, package, ALIVE)
    first = server.tick("s-1")
    server.set_state(str(first), "FAILED")
    second = runs.get_run(api, str(server.tick("s-1")))
    assert (second.run_id, second.schedule, second.name == "qwen") == ("qwen", "s-1", False)
    assert [one.id for one in runs.find_active(api, "s3://b/runs/qwen")] == [second.id]


# -- names of the day ------------------------------------------------------------------------------------------------


def test_a_run_id_may_hold_the_moment_of_its_start(api: Api, server: KfpServer, package: Package) -> None:
    done = _schedule(api, package, values=VALUES | {"run_id": "nightly-{date}-{time}"})
    assert done.schedule.run_id == "nightly-{date}-{time}"
    sent = server.asked("POST", "/recurringruns")[0]["runtime_config"]["parameters"]["run_id"]
    # Argo fills in variables of this form; what the server calls macros it leaves as they are.
    assert sent.startswith("nightly-{{workflow.creationTimestamp.Y}}{{workflow.creationTimestamp.m}}")
    started = server.tick("s-1")
    run = server.run(str(started))
    run["created_at"] = "2026-12-01T02:00:09Z"
    assert runs.get_run(api, str(started)).run_id == "nightly-20261201-020009"
    assert [one.id for one in runs.find_active(api, "nightly-20261201-020009")] == [started]
    assert runs.find_active(api, "nightly-20261202-020009") == []
    check_run_id("nightly-20261201-020009")


@pytest.mark.parametrize(
    ("run_id", "why"),
    [
        ("nightly-[[ScheduledTime]]", r"does not fill in \[\[\.\.\.\]\] for a recurring run .* as in nightly-\{date\}"),
        ("nightly {date}", "run id 'nightly 20260101': expected"),
        ("nightly-{day}", r"run id 'nightly-\{day\}': expected"),
    ],
)
def test_a_run_id_that_would_be_none_is_refused(
    api: Api, server: KfpServer, package: Package, run_id: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        _schedule(api, package, values=VALUES | {"run_id": run_id})
    assert server.schedules == []


def test_without_a_run_id_each_run_has_that_of_its_pipeline_run(api: Api, server: KfpServer, package: Package) -> None:
    _schedule(api, package, values={"root": "s3://b/runs"})
    started = server.tick("s-1")
    assert runs.get_run(api, str(started)).run_id == started
    assert [one.id for one in runs.find_active(api, f"s3://b/runs/{started}")] == [started]


# -- looking at them, and ending them --------------------------------------------------------------------------------


def test_schedules_are_listed_newest_first(api: Api, server: KfpServer, package: Package) -> None:
    server.page = 1
    for name in ("one", "two", "three"):
        _schedule(api, package, name=name)
    server.schedules[0]["trigger"] = {"periodic_schedule": {"interval_second": "90"}}
    found = schedules.schedules(api)
    assert [one.name for one in found] == ["three", "two", "one"]
    assert found[2].when == "every 90 s"


def test_ending_a_schedule_leaves_its_run_alone(api: Api, server: KfpServer, package: Package) -> None:
    _schedule(api, package)
    running = server.tick("s-1")
    (paused,) = schedules.unschedule(api, "nightly", only_disable=True)
    assert (paused.is_enabled, server.tick("s-1")) == (False, None)
    (gone,) = schedules.unschedule(api, "s-1")
    assert (gone.id, server.schedules, server.run(str(running))["state"]) == ("s-1", [], "RUNNING")
    with pytest.raises(ConfigError, match="has no schedule 'nightly'; there are: none"):
        schedules.unschedule(api, "nightly")


def test_a_profiles_schedules_are_its_own(package: Package) -> None:
    with kfp_server(has_profiles=True) as server:
        alice, bob = (open_api(host=server.url, namespace=name) for name in ("alice", "bob"))
        _schedule(alice, package)
        assert schedules.schedules(bob) == []
        assert _schedule(bob, package).what == "created"
        assert len(schedules.schedules(alice)) == 1
