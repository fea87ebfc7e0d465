"""What MLflow keeps beside the metrics, through every outage: a real server behind a gateway, a real artifact storage.

The rule of all of it: what could not be sent is sent later, in order, and is there once.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ratchet.errors import DamagedError
from ratchet.store.manifest import Manifest
from ratchet.store.run import Run
from ratchet.tracking import report_pages
from ratchet.tracking.mlflow_artifacts import ARTIFACTS_TAG, _State
from ratchet.tracking.mlflow_tracker import MLflowTracker
from ratchet.tracking.pauses import Pauses
from ratchet.tracking.progress import Progress
from tests.ratchet.tracking.conftest import Chain

Open = Callable[..., MLflowTracker]
NOW = Pauses(shortest=0.0, longest=0.0, artifacts=0.0)
KEYS = ["actor/pg_loss", "critic/score/mean", "response_length/mean", "training/global_step"]


class Tables:
    """Shows the rewards of every second step and of the first, as one file each."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.failing: dict[int, Exception] = {}

    def wants(self, manifest: Manifest) -> bool:
        step = manifest.step or 0
        return manifest.stage == "reward" and (step == 1 or step % 2 == 0)

    def send(self, client: Any, mlflow_run_id: str, run: Run, manifest: Manifest) -> None:
        step = manifest.step or 0
        if step in self.failing:
            raise self.failing[step]
        score = manifest.metrics["critic/score/mean"]
        client.log_dict(mlflow_run_id, {"score": score}, f"tables/step-{step}.json")
        self.sent.append(step)


@pytest.fixture
def tables() -> Tables:
    return Tables()


@pytest.fixture
def open_tracker(chain: Chain, tables: Tables, request: pytest.FixtureRequest) -> Open:
    """Open the tracker that a new process would have, in an experiment named after the test."""

    def open_tracker(uri: str, **changes: Any) -> MLflowTracker:
        given: dict[str, Any] = {
            "experiment": request.node.name,
            "run_name": "first",
            "params": {"seed": 1},
            "pauses": NOW,
            "exhibits": [tables],
            "tracking_uri": uri,
        }
        return MLflowTracker(chain.run, **(given | changes))

    return open_tracker


def client_of(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def steps(uri: str, run_id: str | None, key: str) -> list[int]:
    return sorted(point.step for point in client_of(uri).get_metric_history(run_id, key))


def files(uri: str, run_id: str | None, folder: str | None = None) -> list[str]:
    return sorted(one.path for one in client_of(uri).list_artifacts(run_id, folder))


# -- which pages a run has ---------------------------------------------------------------------------------------------


def _claim(chain: Chain, length: int, *, submission_id: str = "kfp", grain: str = "segment") -> None:
    config = {"trainer": {"steps_per_segment": length}}
    chain.run.claim({"submission_id": submission_id, "grain": grain, "config": config})


def test_segments_follow_from_the_claims(chain: Chain) -> None:
    chain.step(1)  # by a process outside a pipeline
    _claim(chain, 3)
    for step in range(2, 7):  # 2-4, and 5-6 of a segment that was cut short
        chain.step(step)
    _claim(chain, 2)
    for step in range(7, 10):  # 7-8, and the run's last step
        chain.step(step)
    _claim(chain, 50, grain="stage")
    chain.step(10)
    assert list(report_pages.segments(chain.run, 0, 10)) == [(2, 4), (5, 6), (7, 8), (9, 9)]
    assert list(report_pages.segments(chain.run, 4, 8)) == [(5, 6), (7, 8)]
    assert list(report_pages.segments(chain.run, 8, 8)) == []
    assert list(report_pages.segments(chain.run, 8, 99)) == [(9, 9)], "what is not committed is in no segment"


def test_a_claim_without_a_submission_ran_no_segments(chain: Chain) -> None:
    _claim(chain, 2)
    chain.run.store.delete("submissions/0002.json")
    chain.step(1)
    assert list(report_pages.segments(chain.run, 0, 1)) == []


# -- outages -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "down"),
    [
        pytest.param("refused", (1, 2), id="at the start"),
        pytest.param("refused", (3, 4), id="in the middle"),
        pytest.param("refused", (5, 6), id="at the end"),
        pytest.param("refused", (1, 6), id="all of it"),
        pytest.param("500", (1, 6), id="500 for all of it"),
        pytest.param("lost", (3, 4), id="answers lost in the middle"),
        pytest.param("page", (1, 2), id="a login page at the start"),
    ],
)
def test_after_an_outage_everything_is_there_once_and_came_in_order(
    chain: Chain,
    open_tracker: Open,
    tables: Tables,
    server_uri: str,
    make_gateway,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    down: tuple[int, int],
) -> None:
    made: list[tuple[int, int | None]] = []

    def page(run: Run, first: int = 1, last: int | None = None) -> str:
        made.append((first, last))
        return f"<p>{first} to {last}</p>"

    monkeypatch.setattr(report_pages, "page", page)
    gateway = make_gateway(server_uri)
    _claim(chain, 2)
    prompts = chain.commit("preprocess/train", None, {"data/num_duplicates": 0.0})
    tracker = open_tracker(gateway.uri)
    for step in range(1, 7):
        is_down = down[0] <= step <= down[1]
        if is_down == gateway.is_listening and mode == "refused":
            gateway.stop() if is_down else gateway.start()
        gateway.mode = mode if is_down and mode != "refused" else "ok"
        for manifest in [prompts] * (step == 1) + chain.step(step):
            tracker.log(manifest)
        if step % 2 == 0:
            tracker.keep_pages(step, {report_pages.segment_page(step - 1, step): f"<p>{step - 1} to {step}</p>"})
    tracker.finish("FINISHED")
    if not gateway.is_listening:
        gateway.start()
    gateway.mode = "ok"
    # A later session of the run, which has nothing left to do.
    later = open_tracker(gateway.uri)
    later.catch_up()
    later.keep_pages(None, {})
    later.finish("FINISHED")

    run_id = later.run_id
    for key in KEYS:
        assert steps(server_uri, run_id, key) == [1, 2, 3, 4, 5, 6]
    run = client_of(server_uri).get_run(run_id)
    assert run.info.status == "FINISHED"
    assert [one.dataset.name for one in run.inputs.dataset_inputs] == ["data/train"]
    assert files(server_uri, run_id) == ["config.yaml", "reports", "tables"]
    assert files(server_uri, run_id, "tables") == [f"tables/step-{step}.json" for step in (1, 2, 4, 6)]
    pages = ["run.html", *(report_pages.segment_page(first, first + 1) for first in (1, 3, 5))]
    assert files(server_uri, run_id, "reports") == [f"reports/{name}" for name in pages]
    got = client_of(server_uri).download_artifacts(run_id, "tables/step-4.json")
    assert json.loads(Path(got).read_text()) == {"score": 0.4}
    # An answer that was lost makes a sending twice of it; a storage that keeps files by name has one.
    assert list(dict.fromkeys(tables.sent)) == [1, 2, 4, 6]
    if mode in ("refused", "500"):
        assert tables.sent == [1, 2, 4, 6]
        assert [first for first, last in made if last is not None] == [
            one for one in (1, 3, 5) if down[0] <= one <= down[1]
        ]
    sent, pages_made = len(tables.sent), len(made)
    again = open_tracker(gateway.uri)
    assert again.catch_up() == 0
    again.keep_pages(6, {})
    assert (len(tables.sent), len(made)) == (sent, pages_made), "whoever comes later sends nothing"


@pytest.mark.slow
def test_a_storage_that_cannot_be_written_holds_no_metric_up_and_gets_everything_later(
    chain: Chain, open_tracker: Open, tables: Tables, database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    client = client_of(database)
    client.create_experiment("blocked", artifact_location=(blocked / "below").as_uri())
    told = {"experiment": "blocked", "pauses": Pauses(shortest=0.0, longest=0.0)}
    for first in (1, 3):
        tracker = open_tracker(database, **told)
        for step in (first, first + 1):
            for manifest in chain.step(step):
                tracker.log(manifest)
        tracker.finish("KILLED")
    assert steps(database, tracker.run_id, "critic/score/mean") == [1, 2, 3, 4]
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "artifact storage cannot be written" in warning.message
    state = json.loads(client.get_run(tracker.run_id).data.tags[ARTIFACTS_TAG])
    assert (state["config"], state["failed"]["error"]) == ("", "NotADirectoryError")
    blocked.unlink()
    open_tracker(database, **told).catch_up()
    assert tables.sent == [], "within minutes of a failure nobody tries"
    later = open_tracker(database, experiment="blocked")
    later.catch_up()
    assert tables.sent == [1, 2, 4]
    assert files(database, later.run_id) == ["config.yaml", "tables"]
    assert "failed" not in json.loads(client.get_run(later.run_id).data.tags[ARTIFACTS_TAG])


@pytest.mark.slow
def test_a_storage_s_client_with_errors_of_its_own_holds_no_metric_up(
    chain: Chain,
    open_tracker: Open,
    database: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from mlflow import MlflowClient

    class CloudError(Exception):
        """As google.api_core.exceptions.RetryError: no OSError, and none of MLflow's."""

    def refuse(*_: object) -> None:
        raise CloudError("no such bucket")

    monkeypatch.setattr(MlflowClient, "log_text", refuse)
    tracker = open_tracker(database, pauses=Pauses(shortest=0.0, longest=0.0))
    for manifest in chain.step(1):
        tracker.log(manifest)
    assert steps(database, tracker.run_id, "critic/score/mean") == [1]
    assert tracker.missing_artifacts == "CloudError"
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "no such bucket" in warning.message


@pytest.mark.slow
def test_what_cannot_be_shown_is_passed_over_with_a_warning(
    chain: Chain, open_tracker: Open, tables: Tables, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow.exceptions import MlflowException

    refused = MlflowException("too long", error_code=1000)  # INVALID_PARAMETER_VALUE
    tables.failing = {1: KeyError("a fault of the table"), 2: DamagedError("reward is damaged"), 4: refused}
    tracker = open_tracker(database)
    for step in range(1, 7):
        for manifest in chain.step(step):
            tracker.log(manifest)
    assert tables.sent == [6]
    shown = [record.message for record in caplog.records if "cannot be shown" in record.message]
    assert [message[:23] for message in shown] == [
        "reward of step 1 cannot",
        "reward of step 2 cannot",
        "reward of step 4 cannot",
    ]
    tables.failing = {}
    assert open_tracker(database).catch_up() == 0
    assert tables.sent == [6]


@pytest.mark.slow
def test_processes_that_take_turns_send_each_table_once(
    chain: Chain, open_tracker: Open, tables: Tables, database: str
) -> None:
    for step in range(1, 9):
        for manifest in chain.step(step):
            # As at stage grain: a process for each stage.
            tracker = open_tracker(database)
            tracker.catch_up()
            tracker.log(manifest)
    assert tables.sent == [1, 2, 4, 6, 8]
    state = json.loads(client_of(database).get_run(tracker.run_id).data.tags[ARTIFACTS_TAG])
    assert state["exhibits"]["floor"] >= 7, "no process reads far back"


@pytest.mark.slow
def test_a_changed_configuration_replaces_the_file(
    chain: Chain, open_tracker: Open, database: str, tmp_path: Path
) -> None:
    for seed in (1, 2):
        tracker = open_tracker(database, params={"seed": seed})
        tracker.catch_up()
    assert files(database, tracker.run_id) == ["config.yaml"]
    got = client_of(database).download_artifacts(tracker.run_id, "config.yaml", str(tmp_path))
    assert Path(got).read_text() == "seed: 2\n"


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{}", '{"config": 1}', '{"config": "a", "exhibits": 3, "pages": "x"}']
)
def test_a_tag_that_is_damaged_is_a_run_that_has_nothing(text: str | None) -> None:
    assert _State.from_json(text).to_json() == _State().to_json()


def test_the_tag_says_again_what_it_was_told() -> None:
    state = _State("c0", Progress(4, {"step-000004/reward"}), 50, 1700000000.5, "OSError")
    assert _State.from_json(state.to_json()).to_json() == state.to_json()
