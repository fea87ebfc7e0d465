"""Uploading, submitting, watching and ending runs of pipelines, against a server that is as strict as the real one."""

import dataclasses
from pathlib import Path
from typing import Any

import kfp
import pytest
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from pipelines import runs, submissions, uploads
from pipelines.api import Api, ConflictError
from pipelines.client import open_api
from pipelines.packages import Package, find_package, parse_package
from pipelines.submissions import Order, order
from ratchet.config import RunConfig, parse_text, semantic
from ratchet.errors import ClusterError, ConfigError
from ratchet.store.manifest import Manifest
from ratchet.store.run import Run
from tests.kfp_endpoint import KfpServer, forget_endpoints, kfp_server
from tests.promotion import finished_run, promotion_config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

CONFIG = """
data: {train_files: s3://data/train.parquet}
actor_rollout_ref: {model: {path: s3://models/qwen}}
trainer: {total_training_steps: 7, project_name: sums}
"""


@pytest.fixture(scope="module")
def package() -> Package:
    return find_package("grpo")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forget_endpoints(monkeypatch, tmp_path)


def _submit(api: Api, ordered: Order, **options: Any) -> submissions.Submission:
    return submissions.submit(api, ordered, experiment="sums", **options)


# -- upload ----------------------------------------------------------------------------------------------------------


def test_the_same_pipeline_is_uploaded_once_and_another_content_is_another_version(
    api: Api, server: KfpServer, package: Package
) -> None:
    first, again = uploads.upload(api, package), uploads.upload(api, package)
    assert (first.is_new, again.is_new, first.version_id) == (True, False, again.version_id)
    assert first.version == package.version
    assert first.url == f"{server.url}/#/pipelines/details/p-1/version/v-1"
    other = uploads.upload(api, parse_package(package.text + "# more\n", "the test"))
    assert (other.is_new, other.pipeline_id, other.version_id) == (True, "p-1", "v-2")
    assert [one["display_name"] for one in server.versions] == [package.version, other.version]
    assert len(server.pipelines) == 1
    assert server.pipelines[0]["display_name"] == "ratchet-grpo"


def test_a_version_of_a_given_name_keeps_its_content(api: Api, package: Package) -> None:
    assert uploads.upload(api, package, version="spring").is_new
    assert not uploads.upload(api, package, version="spring").is_new
    changed = parse_package(
        package.text.replace("cpuRequest: 0.25", "cpuRequest: 0.5").replace("250m", "500m"), "a test"
    )
    assert changed.spec != package.spec
    with pytest.raises(ConfigError, match=r"has a version spring with other content, and versions do not change"):
        uploads.upload(api, changed, version="spring")


def test_two_who_upload_at_once_agree(
    api: Api, server: KfpServer, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one's pipeline and version appear after this one has looked."""
    asked = Api.ask

    def late(self: Api, what: str, method: str, path: str, **options: Any) -> dict[str, Any]:
        if method == "POST" and path in ("/pipelines", "/pipelines/upload_version"):
            asked(self, what, method, path, **options)
        return asked(self, what, method, path, **options)

    monkeypatch.setattr(Api, "ask", late)
    done = uploads.upload(api, package)
    assert (len(server.pipelines), len(server.versions), done.version_id) == (1, 1, "v-1")


def test_a_profile_has_pipelines_and_experiments_of_its_own(package: Package) -> None:
    with kfp_server(has_profiles=True) as server:
        for name in ("alice", "bob"):
            api = open_api(host=server.url, namespace=name)
            assert uploads.upload(api, package).is_new
            assert _submit(api, order(package, {}, run_id="same")).what == "started"
        assert [one["namespace"] for one in server.pipelines] == ["alice", "bob"]
        assert [one["namespace"] for one in server.experiments] == ["alice", "bob"]
        assert [one["experiment_id"] for one in server.runs] == ["e-1", "e-2"]


# -- orders ----------------------------------------------------------------------------------------------------------


def test_an_order_holds_what_is_given_and_what_the_config_says(package: Package) -> None:
    stated = CONFIG + "  \n".join(["", "algorithm: {adv_estimator: rloo}"])
    ordered = order(package, {"total_steps": 3}, config=stated, root="s3://b/runs", run_id="qwen")
    assert {name: ordered.values[name] for name in ("root", "run_id", "total_steps")} == {
        "root": "s3://b/runs",
        "run_id": "qwen",
        "total_steps": 3,
    }
    assert parse_text(str(ordered.values["config"])) == ordered.config
    assert ordered.experiment == "sums"


def test_a_config_may_say_where_its_run_lies_and_what_it_is_called(package: Package) -> None:
    config = CONFIG.replace("trainer: {", "trainer: {default_local_dir: s3://c/runs, experiment_name: mine, ")
    assert (order(package, {}, config=config).root, order(package, {}, config=config).run_id) == ("s3://c/runs", "mine")
    given = order(package, {}, config=config, root="s3://d", run_id="yours")
    assert (given.root, given.run_id) == ("s3://d", "yours")
    assert order(package, {}, config=config, is_named_by_config=False).run_id == ""


def test_without_a_config_the_pipelines_own_is_changed(package: Package) -> None:
    assert "config" not in order(package, {}).values
    changed = order(package, {}, overrides=["trainer.seed=5"])
    assert changed.config is not None
    assert changed.config.trainer.seed == 5
    assert parse_text(str(changed.values["config"])) == changed.config


@pytest.mark.parametrize(
    ("parameters", "options", "why"),
    [
        ({"run_id": "a"}, {"run_id": "b"}, "parameter run_id is given twice: 'a' and 'b'"),
        ({}, {"root": "runs"}, "root 'runs': the pods must find it: expected s3://bucket/prefix"),
        ({"steps": 1}, {}, "has no parameter 'steps': did you mean total_steps"),
        ({"total_steps": "7"}, {}, "parameter total_steps: expected a whole number, but it is '7'"),
        ({}, {"config": "trainer: {sed: 1}"}, "trainer.sed: no such key"),
        ({}, {"overrides": ["trainer.sed=1"]}, "trainer.sed: no such key"),
        ({"device_map": {"segment": {"gpus": 1}}}, {}, "device_map.segment.gpus: no such key"),
        ({"device_map": {"segmnt": {"cpu": 1}}}, {"config": CONFIG}, "device_map.segmnt: no such key"),
        ({"device_map": {"segment": 1}}, {}, "device_map.segment: expected a mapping such as"),
        ({"min_accuracy": 2.0}, {}, "promotion.min_accuracy: "),
        ({"total_steps": -1}, {}, "trainer.total_training_steps: "),
        ({"champion": "a/b"}, {}, "champion 'a/b': expected 1 to 128 letters"),
        ({"champion": "best"}, {"config": CONFIG}, "champion 'best' (promotion.name): data.val_files is not set"),
        ({}, {"config": CONFIG + "promotion: {name: best}"}, "data.val_files is not set"),
    ],
)
def test_what_can_be_known_to_be_wrong_costs_no_pod(
    package: Package, parameters: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        order(package, parameters, **options)
    assert why in str(refused.value)


def test_a_config_that_only_the_pods_can_read_leaves_the_other_parameters_to_check(package: Package) -> None:
    with pytest.raises(ConfigError, match=r"device_map\.segment\.gpus: no such key"):
        order(package, {"device_map": {"segment": {"gpus": 1}}}, config="s3://no.such.bucket/run.yaml")
    assert order(package, {"champion": "7"}, config="s3://no.such.bucket/run.yaml").effective is None


def test_what_the_parameters_change_is_what_preflight_makes_of_them(package: Package) -> None:
    parameters = {"total_steps": 3, "champion": "7", "device_map": {"segment": {"cpu": 4}}}
    effective = order(package, parameters).effective
    assert effective is not None
    assert (effective.trainer.total_training_steps, effective.promotion.name) == (3, "7")
    assert effective.device_map.segment.cpu == "4"


# -- submit ----------------------------------------------------------------------------------------------------------


def test_a_run_is_started_with_its_parameters_under_its_own_name(api: Api, server: KfpServer, package: Package) -> None:
    ordered = order(package, {"total_steps": 3}, config=CONFIG, root="s3://b/runs/", run_id="qwen")
    done = _submit(api, ordered, service_account="trainer", pipeline_root="s3://b/kfp")
    assert (done.what, done.run, done.pipeline_run_id, done.state) == ("started", "s3://b/runs/qwen", "r-1", "PENDING")
    (body,) = server.asked("POST", "/runs")
    assert (body["display_name"], body["experiment_id"], body["service_account"]) == ("qwen", "e-1", "trainer")
    assert body["runtime_config"] == {"parameters": dict(ordered.values), "pipeline_root": "s3://b/kfp"}
    assert body["pipeline_spec"] == package.body
    assert [one["display_name"] for one in server.experiments] == ["sums"]


def test_kfps_own_client_sends_the_same(api: Api, server: KfpServer, package: Package, tmp_path: Path) -> None:
    """It gets along with the server here, too."""
    ordered = order(package, {}, root="s3://b", run_id="qwen")
    _submit(api, ordered)
    path = tmp_path / "pipeline.yaml"
    path.write_text(package.text)
    client = kfp.Client(host=server.url)
    client.create_run_from_pipeline_package(
        str(path), arguments=dict(ordered.values), run_name="qwen", experiment_name="sums"
    )
    ours, theirs = server.asked("POST", "/runs")
    specs = [
        (
            json_format.ParseDict(one["pipeline_spec"].pop("pipeline_spec"), pipeline_spec_pb2.PipelineSpec()),
            json_format.ParseDict(one.pop("pipeline_spec")["platform_spec"], pipeline_spec_pb2.PlatformSpec()),
        )
        for one in (ours, theirs)
    ]
    assert specs[0] == specs[1]
    assert ours == theirs
    assert client.get_run("r-1").display_name == "qwen"


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "CANCELING", "PAUSED"])
def test_while_a_pipeline_run_works_on_a_run_nothing_is_started(
    api: Api, server: KfpServer, package: Package, state: str
) -> None:
    ordered = order(package, {}, run_id="qwen")
    _submit(api, ordered)
    server.set_state("r-1", state)
    again = _submit(api, ordered)
    assert (again.what, again.pipeline_run_id, again.state) == ("active", "r-1", state)
    assert len(server.runs) == 1
    assert _submit(api, ordered, is_forced=True).pipeline_run_id == "r-2"


@pytest.mark.parametrize("state", ["FAILED", "SUCCEEDED", "CANCELED"])
def test_once_it_has_ended_the_same_run_is_gone_on_with(
    api: Api, server: KfpServer, package: Package, state: str
) -> None:
    ordered = order(package, {}, run_id="qwen")
    _submit(api, ordered)
    server.set_state("r-1", state)
    assert _submit(api, ordered).pipeline_run_id == "r-2"
    assert len(server.experiments) == 1


def test_another_root_or_another_name_is_another_run(api: Api, package: Package) -> None:
    for root, run_id in (("s3://a", "one"), ("s3://b", "one"), ("s3://a", "two")):
        assert _submit(api, order(package, {}, root=root, run_id=run_id)).what == "started"


def test_what_a_schedule_or_a_form_started_is_found_by_its_parameters(
    api: Api, server: KfpServer, package: Package
) -> None:
    parameters = {"root": "s3://b/runs", "run_id": "qwen"}
    server.page = 1
    server.add_run(display_name="another")
    scheduled = server.add_run(recurring_run_id="s-1", runtime_config={"parameters": parameters})
    done = _submit(api, order(package, {}, root="s3://b/runs", run_id="qwen"))
    assert (done.what, done.pipeline_run_id) == ("active", scheduled)


def test_a_run_without_a_name_is_not_submitted(api: Api, package: Package) -> None:
    with pytest.raises(ConfigError, match=r"pass run_id= \(--run-id\), or set trainer\.experiment_name"):
        _submit(api, order(package, {}, config=CONFIG))
    with pytest.raises(ConfigError, match="run id 'a/b': expected 1 to 128 letters"):
        _submit(api, order(package, {}, run_id="a/b"))


def test_a_complete_run_is_not_submitted(api: Api, server: KfpServer, package: Package, tmp_path: Path) -> None:
    root = str(tmp_path / "runs")
    finished_run(root, "done", [1.0, 0.0])
    config = promotion_config(**{"promotion.name": "", "trainer.total_training_steps": 1})
    ordered = Order(package=package, values={"root": root, "run_id": "done"}, config=config)
    done = _submit(api, ordered, is_complete=submissions.is_complete)
    assert (done.what, done.run, done.pipeline_run_id) == ("complete", f"{root}/done", "")
    assert server.asked("POST", "/runs") == []
    more = Order(package=package, values={**ordered.values, "total_steps": 99}, config=config)
    assert not submissions.is_complete(more)
    undecided = Order(package=package, values={**ordered.values, "champion": "policy"}, config=config)
    assert not submissions.is_complete(undecided)
    assert _submit(api, ordered, is_complete=submissions.is_complete, is_forced=True).what == "started"


def _of_a_run(package: Package, root: str, config: RunConfig, **values: Any) -> Order:
    return Order(package=package, values={"root": root, "run_id": "done", **values}, config=config)


def test_another_config_under_a_finished_runs_id_is_refused_with_what_differs(
    api: Api, server: KfpServer, package: Package, tmp_path: Path
) -> None:
    root, usual = str(tmp_path), {"promotion.name": "", "trainer.total_training_steps": 1}
    finished_run(root, "done", [1.0, 0.0], config=promotion_config(**usual))
    changed = {"trainer.seed": 5, "actor_rollout_ref.actor.optim.lr": 0.5, "trainer.save_freq": 3}
    other = _of_a_run(package, root, promotion_config(**usual, **changed))
    with pytest.raises(ConfigError) as refused:
        _submit(api, other, is_complete=submissions.is_complete)
    said = str(refused.value).splitlines()
    assert said[0] == f"run {root}/done exists with another configuration:"
    assert [line.partition(":")[0].strip() for line in said[1:-1]] == [
        "actor_rollout_ref.actor.optim.lr",
        "trainer.seed",
    ]
    assert ("this submission 0.5" in said[1], said[-1]) == (True, "Use another run id.")
    # Word for word what preflight says.
    with pytest.raises(ConfigError) as theirs:
        Run(root, "done").create_or_check(semantic(promotion_config(**usual, **changed)))
    assert str(theirs.value) == str(refused.value)
    assert server.asked("POST", "/runs") == []


def test_another_config_under_an_unfinished_runs_id_is_refused_too(
    api: Api, server: KfpServer, package: Package, tmp_path: Path
) -> None:
    finished_run(str(tmp_path), "done", [1.0], config=promotion_config(), is_exported=False)
    with pytest.raises(ConfigError, match=r"trainer\.seed: the run has 0, this submission 5"):
        submissions.is_complete(_of_a_run(package, str(tmp_path), promotion_config(**{"trainer.seed": 5})))


@pytest.mark.parametrize("values", [{"total_steps": 1}, {}])
def test_fewer_steps_than_are_committed_are_refused(
    api: Api, server: KfpServer, package: Package, tmp_path: Path, values: dict[str, Any]
) -> None:
    root = str(tmp_path)
    many, one = ({"promotion.name": "", "trainer.total_training_steps": steps} for steps in (2, 1))
    run, _ = finished_run(root, "done", [1.0, 0.0], config=promotion_config(**many))
    first = run.require("policy_update", 1)
    second = dataclasses.replace(first.content, step=2, policy_version=2)
    run.commit(Manifest(content=second, provenance=first.provenance))
    ordered = _of_a_run(package, root, promotion_config(**(many if values else one)), **values)
    with pytest.raises(ConfigError, match=r"has committed 2 steps, and this submission asks for 1 in all"):
        _submit(api, ordered, is_complete=submissions.is_complete)


def test_storage_that_cannot_be_seen_from_here_keeps_nothing_from_starting(
    api: Api, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    ordered = order(package, {}, run_id="qwen")
    assert _submit(api, ordered, is_complete=submissions.is_complete).what == "started"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"runtime_config": {"parameters": {"total_steps": "7"}}}, "input parameter total_steps requires type NUMBER"),
        ({"runtime_config": {"parameters": {"steps": 7}}}, "are not required by pipeline: steps"),
        ({"displayname": "qwen"}, 'unknown field "displayname"'),
        ({"runtime_config": {"params": {}}}, 'unknown field "params"'),
        ({"pipeline_spec": {"pipelineInfo": {"name": "x"}, "rut": {}}}, "invalid v2 pipeline spec"),
        ({"experiment_id": "e-9"}, "experiment_id e-9 not found"),
    ],
)
def test_what_the_server_refuses_is_said_in_its_words(
    api: Api, package: Package, change: dict[str, Any], why: str
) -> None:
    body = {
        "display_name": "qwen",
        "experiment_id": runs.find_experiment(api, "sums"),
        "pipeline_spec": package.body,
        "runtime_config": {"parameters": {}},
    }
    assert api.ask("start the run qwen", "POST", "/runs", body=body)["run_id"] == "r-1"
    with pytest.raises((ClusterError, ConfigError)) as refused:
        api.ask("start the run qwen", "POST", "/runs", body=body | change)
    assert "was asked to start the run qwen and f" in str(refused.value)
    assert why in str(refused.value)


def test_an_experiment_that_appears_in_between_is_taken(
    api: Api, server: KfpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Api.ask

    def late(self: Api, what: str, method: str, path: str, **options: Any) -> dict[str, Any]:
        if method == "POST":
            asked(self, what, method, path, **options)
        return asked(self, what, method, path, **options)

    monkeypatch.setattr(Api, "ask", late)
    assert runs.find_experiment(api, "a + b") == "e-1"
    assert runs.find_experiment(api, "a + b") == "e-1"
    with pytest.raises(ConflictError):
        api.ask("make it", "POST", "/experiments", body={"display_name": "a + b"})


# -- what runs say ---------------------------------------------------------------------------------------------------

TASK = {
    "task_id": "t-1",
    "display_name": "segment",
    "state": "FAILED",
    "start_time": "2026-11-30T07:10:00Z",
    "end_time": "1970-01-01T00:00:00Z",
    "error": {"message": "exit code 1"},
    "child_tasks": [{"pod_name": "pod-7"}],
}


def test_a_run_is_told_with_its_tasks(api: Api, server: KfpServer, package: Package) -> None:
    _submit(api, order(package, {}, run_id="qwen"))
    run = runs.get_run(api, "r-1")
    assert (run.name, run.run_id, run.state, run.finished, run.is_active) == ("qwen", "qwen", "PENDING", "", True)
    server.set_state("r-1", "FAILED", TASK)
    ended = runs.get_run(api, "r-1")
    assert (ended.state, ended.is_active, bool(ended.finished)) == ("FAILED", False, True)
    expected = {"name": "segment", "state": "FAILED", "started": "2026-11-30T07:10:00Z", "ended": "", "pod": "pod-7"}
    assert ended.tasks == (runs.PipelineTask(**expected, error="exit code 1"),)


def test_waiting_hears_of_every_state_and_rides_out_a_server_that_is_away(
    api: Api, server: KfpServer, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    _submit(api, order(package, {}, run_id="qwen"))
    server.answers["/runs/r-1"] = (500, {}, b"{}")
    heard, pauses = [], []

    def listen(run: runs.PipelineRun) -> None:
        heard.append(run.state)
        if run.is_active:
            server.set_state("r-1", {"PENDING": "RUNNING"}.get(run.state, "SUCCEEDED"))

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            server.answers.clear()

    monkeypatch.setattr("pipelines.runs.time.sleep", pause)
    assert runs.wait_for(api, "r-1", listener=listen).state == "SUCCEEDED"
    assert heard == ["PENDING", "RUNNING", "SUCCEEDED"]
    assert pauses == [10.0] * 5


def test_waiting_for_a_run_that_is_gone_ends(api: Api) -> None:
    with pytest.raises(ConfigError, match="asked to show the pipeline run r-9 and found nothing"):
        runs.wait_for(api, "r-9")


def test_ending_a_run_ends_all_that_works_on_it_and_deletes_nothing(
    api: Api, server: KfpServer, package: Package
) -> None:
    ordered = order(package, {}, root="s3://b", run_id="qwen")
    _submit(api, ordered)
    _submit(api, ordered, is_forced=True)
    _submit(api, order(package, {}, root="s3://c", run_id="qwen"))
    found = runs.find_active(api, "s3://b/qwen")
    assert [one.id for one in found] == ["r-2", "r-1"]
    for one in found:
        runs.terminate_run(api, one)
    assert [one["state"] for one in server.runs] == ["CANCELING", "CANCELING", "PENDING"]
    assert [one.id for one in runs.find_active(api, "qwen")] == ["r-3", "r-2", "r-1"]
    assert [one.id for one in runs.find_active(api, "r-3")] == ["r-3"]
    runs.delete_run(api, found[0])
    runs.delete_run(api, found[0])
    assert [one["run_id"] for one in server.runs] == ["r-1", "r-3"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # It is called like one run and works on another one.
        ({"parameters": {"root": "s3://b/runs", "run_id": "second"}}, ["s3://b/runs/second", "second", "r-1"]),
        # A form that was left as it is: the pipeline's own root, and the pipeline run's id.
        ({}, ["s3://ratchet/runs/r-1", "r-1", "first"]),
        ({"parameters": {"run_id": "second"}}, ["s3://ratchet/runs/second", "second", "r-1"]),
    ],
)
@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_pipeline_run_works_on_the_run_that_its_parameters_and_its_pipelines_defaults_say(
    api: Api, server: KfpServer, package: Package, fields: dict[str, Any], expected: list[str], is_pinned: bool
) -> None:
    version = uploads.upload(api, package)
    pinned = {"pipeline_id": version.pipeline_id, "pipeline_version_id": version.version_id}
    of = {"pipeline_version_reference": pinned} if is_pinned else {"pipeline_spec": package.body}
    server.add_run(display_name="first", runtime_config=fields, **of)
    places = ["r-1", "first", "second"]
    places += [f"{root}/{name}" for root in ("s3://b/runs", "s3://ratchet/runs", "s3://elsewhere") for name in places]
    assert sorted(place for place in places if runs.find_active(api, place)) == sorted(expected)


def test_a_pipeline_run_of_a_version_that_is_gone_is_of_no_root(api: Api, server: KfpServer, package: Package) -> None:
    gone = {"pipeline_id": "p-9", "pipeline_version_id": "v-9"}
    given = {"parameters": {"run_id": "qwen"}}
    for _ in range(2):
        server.add_run(pipeline_version_reference=gone, runtime_config=given)
    assert runs.find_active(api, "s3://ratchet/runs/qwen") == []
    assert len(server.asked("GET", "/versions/v-9")) == 1
    assert [one.id for one in runs.find_active(api, "qwen")] == ["r-2", "r-1"]
