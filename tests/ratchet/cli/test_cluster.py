"""The verbs of a Kubeflow Pipelines endpoint, as typed, against a strict server in this process."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratchet import cli
from ratchet.config import parse_text
from tests.command_line import Ratchet, in_this_process
from tests.kfp_endpoint import KfpServer, forget_endpoints, kfp_server
from tests.promotion import finished_run, promotion_config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

CONFIG = """
data: {train_files: s3://data/train.parquet, val_files: s3://data/val.parquet}
actor_rollout_ref: {model: {path: s3://models/qwen}}
trainer: {total_training_steps: 7, project_name: sums}
"""
AT = ("--root", "s3://b/runs", "--run-id", "qwen")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[KfpServer]:
    """A server that the environment names."""
    forget_endpoints(monkeypatch, tmp_path)
    with kfp_server() as served:
        monkeypatch.setenv("KF_PIPELINES_ENDPOINT", served.url)
        yield served


@pytest.fixture
def ratchet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ratchet:
    """Run the command line in this process, as its entry point does."""
    return in_this_process(monkeypatch, capsys)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def _parameters(server: KfpServer, at: int = -1) -> dict[str, Any]:
    found: dict[str, Any] = server.asked("POST", "/runs")[at]["runtime_config"]["parameters"]
    return found


# -- compile, upload -------------------------------------------------------------------------------------------------


def test_compile_writes_a_pipeline_that_upload_takes(server: KfpServer, ratchet: Ratchet, tmp_path: Path) -> None:
    path = tmp_path / "nightly.yaml"
    finished = ratchet("compile", "nightly", "--to", path)
    assert (finished.code, finished.out.startswith(f"{path}: pipeline ratchet-nightly, version 0.1.0-")) == (0, True)
    assert next(iter(yaml.safe_load_all(path.read_text())))["pipelineInfo"]["name"] == "ratchet-nightly"
    first, again = ratchet("upload", path), ratchet("upload", "nightly")
    version = server.versions[0]["display_name"]
    page = f"{server.url}/#/pipelines/details/p-1/version/v-1"
    assert first.out == f"pipeline ratchet-nightly, version {version}: uploaded\n{page}\n"
    assert again.out == f"pipeline ratchet-nightly, version {version}: is there already: nothing uploaded\n{page}\n"
    assert len(server.versions) == 1
    told = json.loads(ratchet("upload", "nightly", "--version", "spring", "--json").out)
    assert (told["version"], told["is_new"], told["version_id"]) == ("spring", True, "v-2")


def test_a_place_that_nothing_can_be_written_to_is_said(ratchet: Ratchet, tmp_path: Path) -> None:
    finished = ratchet("compile", "grpo", "--to", tmp_path / "no" / "grpo.yaml")
    said = f"ratchet: cannot write the pipeline to {tmp_path}/no/grpo.yaml: No such file or directory\n"
    assert (finished.code, finished.err) == (2, said)


def test_a_pipeline_that_is_not_there_is_said(server: KfpServer, ratchet: Ratchet) -> None:
    finished = ratchet("upload", "nightli")
    assert (finished.code, finished.out) == (2, "")
    assert finished.err.startswith("ratchet: no pipeline 'nightli': did you mean nightly? there are dpo, ")


# -- submit ----------------------------------------------------------------------------------------------------------


def test_submit_sends_parameters_and_config_with_its_overrides(
    server: KfpServer, ratchet: Ratchet, config: Path
) -> None:
    finished = ratchet("submit", "grpo", "total_steps=3", "trainer.seed=5", "--config", config, *AT)
    page = f"{server.url}/#/runs/details/r-1"
    assert (finished.code, finished.out) == (0, f"run s3://b/runs/qwen: started as pipeline run r-1\n{page}\n")
    sent = _parameters(server)
    parsed = parse_text(sent.pop("config"))
    assert sent == {"root": "s3://b/runs", "run_id": "qwen", "total_steps": 3}
    assert (parsed.trainer.seed, parsed.trainer.total_training_steps) == (5, 7)
    assert server.experiments[0]["display_name"] == "sums"


def test_submit_again_names_what_works_on_the_run(server: KfpServer, ratchet: Ratchet) -> None:
    ratchet("submit", "grpo", *AT)
    server.set_state("r-1", "RUNNING")
    again = ratchet("submit", "grpo", *AT)
    assert again.code == 0
    assert again.out.startswith(
        "run s3://b/runs/qwen: the pipeline run r-1 works on it (RUNNING): nothing started; --force"
    )
    assert json.loads(ratchet("submit", "grpo", "--json", *AT).out)["what"] == "active"
    assert json.loads(ratchet("submit", "grpo", "--json", "--force", *AT).out)["pipeline_run_id"] == "r-2"


def test_the_root_may_come_from_the_environment(
    server: KfpServer, ratchet: Ratchet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_ROOT", "s3://elsewhere")
    assert ratchet("submit", "grpo", "--run-id", "qwen").code == 0
    assert _parameters(server)["root"] == "s3://elsewhere"


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1)])
def test_submit_may_stay_until_the_run_has_ended(
    server: KfpServer, ratchet: Ratchet, monkeypatch: pytest.MonkeyPatch, state: str, code: int
) -> None:
    monkeypatch.setattr("pipelines.runs.time.sleep", lambda _: server.set_state("r-1", state))
    finished = ratchet("submit", "grpo", "--wait", *AT)
    assert finished.code == code
    assert finished.err.splitlines() == ["pipeline run r-1: PENDING", f"pipeline run r-1: {state}"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["grpo", "total_step=3"], "pipeline ratchet-grpo has no parameter 'total_step': did you mean total_steps?"),
        (["grpo", "total_steps=3.5"], "parameter total_steps: expected a whole number, but it is 3.5"),
        (["grpo", "total_steps"], "'total_steps': expected PARAMETER=VALUE"),
        (["grpo", "trainer.sed=3"], "trainer.sed: no such key"),
        (["grpo", "--config", "gone.yaml"], "cannot read the config file gone.yaml: No such file or directory"),
        (["grpo", "--root", "runs"], "root 'runs': the pods must find it: expected s3://bucket/prefix"),
        (["grpo", "min_accuracy=2"], "promotion.min_accuracy: "),
        (["grpo", "device_map={segment: {gpus: 1}}"], "device_map.segment.gpus: no such key"),
        (["grpo", "champion=a/b"], "champion 'a/b': expected 1 to 128 letters"),
        (["grpo", "--run-id", ""], "pass run_id= (--run-id), or set trainer.experiment_name in the config"),
    ],
)
def test_what_is_wrong_is_said_before_a_pod_starts(
    server: KfpServer, ratchet: Ratchet, arguments: list[str], why: str
) -> None:
    at = [] if "--run-id" in arguments else ["--run-id", "qwen"]
    finished = ratchet("submit", *arguments, *at)
    assert (finished.code, finished.out) == (2, "")
    assert why in finished.err
    assert server.asked("POST", "") == []


def test_an_endpoint_that_is_not_there_or_refuses_is_said(
    server: KfpServer, ratchet: Ratchet, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = ratchet("schedules", "--endpoint", "http://127.0.0.1:9")
    assert (
        finished.code,
        finished.err.startswith("ratchet: cannot reach the Kubeflow endpoint http://127.0.0.1:9 to"),
    ) == (
        2,
        True,
    )
    server.token = "s3cret"
    assert "refused (401)" in ratchet("schedules").err
    monkeypatch.setenv("KF_PIPELINES_TOKEN", "s3cret")
    assert ratchet("schedules").code == 0
    server.answers["/recurringruns"] = (403, {}, b'{"message": "not yours"}')
    refused = ratchet("schedules")
    assert (refused.code, "asked to list its schedules and refused (403): not yours" in refused.err) == (2, True)


def test_a_profile_is_named_by_an_option(ratchet: Ratchet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forget_endpoints(monkeypatch, tmp_path)
    with kfp_server(has_profiles=True) as server:
        asked = ("--endpoint", server.url)
        assert "has profiles: say whose runs these are with --namespace" in ratchet("submit", "grpo", *AT, *asked).err
        assert ratchet("submit", "grpo", *AT, *asked, "--namespace", "alice").code == 0
        assert server.runs[0]["namespace"] == "alice"


# -- schedules -------------------------------------------------------------------------------------------------------


def test_a_nightly_schedule_is_made_listed_paused_and_deleted(
    server: KfpServer, ratchet: Ratchet, config: Path
) -> None:
    given = ("schedule", "nightly", "--cron", "0 0 2 * * *", "--run-id", "nightly-{date}", "--config", config)
    line = "ratchet-nightly  on  0 0 2 * * *  nightly-{date}  s-1\n"
    assert ratchet(*given).out == f"schedule ratchet-nightly: created\n{line}"
    assert ratchet(*given).out == f"schedule ratchet-nightly: unchanged\n{line}"
    assert ratchet("schedules").out == line
    assert json.loads(ratchet("schedules", "--json").out)["run_id"] == "nightly-{date}"
    assert ratchet("unschedule", "ratchet-nightly", "--disable").out == "schedule ratchet-nightly (s-1): disabled\n"
    assert ratchet("schedules").out == line.replace("  on  ", "  off  ")
    assert ratchet("unschedule", "ratchet-nightly").out == "schedule ratchet-nightly (s-1): deleted\n"
    gone = ratchet("unschedule", "ratchet-nightly")
    assert (gone.code, "has no schedule 'ratchet-nightly'; there are: none" in gone.err) == (2, True)


def test_a_run_is_kept_alive_every_ten_minutes_from_now_on(server: KfpServer, ratchet: Ratchet) -> None:
    finished = ratchet("schedule", "grpo", "--keep-alive", *AT)
    said = "schedule qwen: created; when the run is complete: ratchet unschedule qwen"
    assert finished.out == f"{said}\nqwen  on  every 10 min  qwen  s-1\n"
    (body,) = server.asked("POST", "/recurringruns")
    assert (body["max_concurrency"], body["no_catchup"]) == ("1", True)
    assert "start_time" in body["trigger"]["periodic_schedule"]
    refused = ratchet("schedule", "grpo", "--keep-alive", "--root", "s3://b/runs")
    assert (refused.code, "--keep-alive submits one run again and again: pass its --run-id" in refused.err) == (2, True)


def test_a_config_names_the_run_that_is_kept_alive_but_not_every_nights(
    server: KfpServer, ratchet: Ratchet, config: Path
) -> None:
    config.write_text(CONFIG.replace("trainer: {", "trainer: {experiment_name: mine, "))
    ratchet("schedule", "nightly", "--cron", "0 0 2 * * *", "--config", config)
    ratchet("schedule", "grpo", "--keep-alive", "--config", config)
    night, alive = (one["runtime_config"]["parameters"] for one in server.asked("POST", "/recurringruns"))
    assert ("run_id" in night, alive["run_id"]) == (False, "mine")


def test_a_cron_expression_of_five_fields_is_refused_with_the_one_that_was_meant(
    server: KfpServer, ratchet: Ratchet
) -> None:
    refused = ratchet("schedule", "nightly", "--cron", "0 2 * * *")
    assert (refused.code, server.requests) == (2, [])
    assert (
        "has five fields, and Kubeflow Pipelines wants six, of which the first is the second: '0 0 2 * * *'"
        in refused.err
    )
    neither = ratchet("schedule", "nightly")
    assert "either a cron expression or an interval: pass --cron, --every or --keep-alive" in neither.err


def test_a_run_that_is_kept_alive_goes_by_an_interval(server: KfpServer, ratchet: Ratchet) -> None:
    """A cron expression begins at its own time, and not now as the option promises."""
    refused = ratchet("schedule", "grpo", "--keep-alive", "--cron", "0 0 2 * * *", *AT)
    assert (refused.code, server.requests) == (2, [])
    assert "--keep-alive begins now, and a cron expression begins at its own time: pass --every instead" in refused.err


# -- terminate -------------------------------------------------------------------------------------------------------


def test_terminate_ends_what_works_on_a_run_and_says_how_long_that_takes(server: KfpServer, ratchet: Ratchet) -> None:
    ratchet("submit", "grpo", *AT)
    finished = ratchet("terminate", "s3://b/runs/qwen")
    assert finished.out.startswith(
        "pipeline run r-1 (PENDING): its pod is told to stop within some 10 s; every iteration"
    )
    assert server.run("r-1")["state"] == "CANCELING"
    assert ratchet("terminate", "qwen", "--delete").out == "pipeline run r-1 (CANCELING): deleted\n"
    assert server.runs == []
    assert ratchet("terminate", "qwen").out == "run qwen: no pipeline run works on it\n"


def test_submit_says_how_a_finished_run_differs(server: KfpServer, ratchet: Ratchet, tmp_path: Path) -> None:
    config = promotion_config(**{"trainer.total_training_steps": 1, "promotion.name": ""})
    finished_run(str(tmp_path / "runs"), "done", [1.0], config=config)
    path = tmp_path / "done.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    given = ("submit", "grpo", "--config", path, "--root", tmp_path / "runs", "--run-id", "done")
    assert ratchet(*given).out == f"run {tmp_path}/runs/done is complete: nothing started\n"
    other = ratchet(*given, "trainer.seed=5")
    assert (other.code, server.asked("POST", "")) == (2, [])
    assert "exists with another configuration:\n  trainer.seed: the run has " in other.err


def test_terminate_leaves_the_runs_of_others_alone(server: KfpServer, ratchet: Ratchet) -> None:
    named = {"parameters": {"root": "s3://b/runs", "run_id": "second"}}
    server.add_run(display_name="first", runtime_config=named)
    assert ratchet("terminate", "s3://b/runs/first").out == "run s3://b/runs/first: no pipeline run works on it\n"
    assert ratchet("terminate", "first").out == "run first: no pipeline run works on it\n"
    assert ratchet("terminate", "s3://b/runs/second").out.startswith("pipeline run r-1 (RUNNING): ")


def test_terminate_says_that_a_schedule_will_start_the_run_again(server: KfpServer, ratchet: Ratchet) -> None:
    ratchet("schedule", "grpo", "--keep-alive", *AT)
    server.tick("s-1")
    assert ratchet("terminate", "qwen").out.splitlines()[1] == (
        "the schedule s-1 will start it again: ratchet unschedule s-1"
    )


# -- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["compile", "upload", "submit", "schedule", "schedules", "unschedule", "terminate"])
def test_every_option_of_a_verb_is_described(verb: str) -> None:
    import typer.main

    command = typer.main.get_command(cli.app).commands[verb]  # type: ignore[attr-defined]
    assert command.help
    assert [one.name for one in command.params if not getattr(one, "help", None)] == []


def test_the_help_of_compile_names_every_pipeline() -> None:
    import typer.main

    from pipelines.packages import catalogue

    command = typer.main.get_command(cli.app).commands["compile"]  # type: ignore[attr-defined]
    told = next(one.help for one in command.params if one.name == "pipeline")
    assert set(re.findall(r"\w+", told)) - {"or"} == set(catalogue())
