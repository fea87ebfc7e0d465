"""Metrics of the machine: what is measured arrives, an MLflow that is away costs nothing, and nothing waits for it."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from ratchet.tracking import mlflow_system
from ratchet.tracking.mlflow_system import SystemMonitor
from ratchet.tracking.mlflow_tracker import MLflowTracker
from tests.ratchet.tracking.conftest import Chain


class Client:
    """Takes points, or fails."""

    def __init__(self) -> None:
        self.points: list[Any] = []
        self.requests: list[int] = []
        self.error: Exception | None = None
        self.seconds = 0.0

    def log_batch(self, run_id: str, metrics: list[Any]) -> None:
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        self.requests.append(len(metrics))
        self.points += metrics


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_machine_is_measured_on_one_axis_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_NODE_ID", "node-1")
    monitor = SystemMonitor(lambda: (client, "r"), epoch=time.time() - 100, seconds=0.01)  # type: ignore[arg-type, return-value]
    assert monitor.start()
    assert not SystemMonitor(lambda: None, epoch=0.0).start(), "a process has one machine"
    until(lambda: len(client.requests) > 3)
    monitor.stop()
    names = {point.key.removeprefix("system/node-1/") for point in client.points}
    assert {"cpu_utilization_percentage", "system_memory_usage_megabytes", "disk_usage_percentage"} <= names
    assert "network_receive_megabytes" in names
    assert {point.step for point in client.points} <= set(range(100, 121))
    assert mlflow_system._one_at_a_time.acquire(blocking=False), "the next session may measure"
    mlflow_system._one_at_a_time.release()


def test_what_is_measured_while_mlflow_is_away_comes_later_and_once() -> None:
    client, is_away = Client(), True
    client.error = OSError("no route")
    monitor = SystemMonitor(lambda: None if is_away else (client, "r"), epoch=0.0, seconds=0.01)  # type: ignore[arg-type, return-value]
    assert monitor.start()
    until(lambda: len(monitor._waiting) > 120)
    is_away = False
    until(lambda: len(monitor._waiting) > 130)
    client.error = None
    until(lambda: not monitor._waiting)
    monitor.stop()
    assert max(client.requests) <= 900
    times = [point.timestamp for point in client.points if point.key == "system/cpu_utilization_percentage"]
    assert len(times) > 130
    assert times == sorted(times)


def test_the_end_of_a_run_waits_for_it_for_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_system, "_LAST_SECONDS", 0.1)
    client = Client()
    client.seconds = 1.0
    monitor = SystemMonitor(lambda: (client, "r"), epoch=0.0, seconds=0.01)  # type: ignore[arg-type, return-value]
    assert monitor.start()
    time.sleep(0.1)
    started = time.monotonic()
    monitor.stop()
    assert time.monotonic() - started < 0.7
    until(lambda: mlflow_system._one_at_a_time.acquire(blocking=False))
    mlflow_system._one_at_a_time.release()


def test_without_what_measures_there_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> Any:
        raise ImportError("No module named 'psutil'")

    monkeypatch.setattr(mlflow_system, "_probes", missing)
    assert not SystemMonitor(lambda: None, epoch=0.0).start()
    assert "no system metrics: No module named 'psutil'" in caplog.text
    assert mlflow_system._one_at_a_time.acquire(blocking=False)
    mlflow_system._one_at_a_time.release()


@pytest.mark.slow
def test_a_tracker_measures_between_its_first_request_and_the_end(
    chain: Chain, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    client = MlflowClient(tracking_uri=database)
    for _ in range(2):
        tracker = MLflowTracker(
            chain.run, experiment="system", run_name="r", params={}, tracking_uri=database, system_metrics=True
        )
        tracker.catch_up()
        assert tracker.run_id is not None
        run_id, before = tracker.run_id, len(chain.manifests)
        for manifest in chain.step(before + 1):
            tracker.log(manifest)
        time.sleep(0.2)
        tracker.finish("FINISHED")
    points = client.get_metric_history(run_id, "system/cpu_utilization_percentage")
    assert len(points) >= 2
    assert len({(point.step, point.timestamp) for point in points}) == len(points)
    assert sorted(p.step for p in client.get_metric_history(run_id, "training/global_step")) == [1, 4]
    assert client.get_run(run_id).info.status == "FINISHED"
