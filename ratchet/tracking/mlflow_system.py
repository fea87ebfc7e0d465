"""Metrics of the machine beside those of the run: processor, memory, disk, network, and every GPU, as `system/...`.

MLflow's own probes measure; its own monitor is not used, since it ends for good at the first request that fails, and
waits without limit for its thread. Trap: of all that MLflow shows, this alone is not in the chain. What is measured
while MLflow is away is kept for an hour, and is lost with the process.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

logger = logging.getLogger(__name__)

SECONDS = 10.0
"""Between two measurements, unless MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL says otherwise."""
_KEPT = 360
"""Measurements that wait for an MLflow that is away."""
_MAX_METRICS = 900
"""In one request."""
_LAST_SECONDS = 2.0
"""How long the end of a run waits for the last measurements to arrive."""
_one_at_a_time = threading.Lock()
"""Of a process: it has one machine."""

Destination = Callable[[], "tuple[MlflowClient, str] | None"]
"""Returns the client and the id of the MLflow run, None while MLflow is left alone."""


class _Probe(Protocol):
    """One of MLflow's classes that measure."""

    def collect_metrics(self) -> None: ...
    def aggregate_metrics(self) -> dict[str, float]: ...
    def clear_metrics(self) -> None: ...


class SystemMonitor:
    """Measures in a thread of its own from `start` to `stop`, and sends what it has where `destination` says.

    The step of a point is the whole seconds since `epoch`, so that the processes of a run share one axis.
    """

    def __init__(self, destination: Destination, *, epoch: float, seconds: float | None = None) -> None:
        """`epoch` is in Unix seconds."""
        self._destination = destination
        self._epoch = epoch
        self._seconds = seconds or _interval()
        node = os.environ.get("MLFLOW_SYSTEM_METRICS_NODE_ID")
        self._prefix = f"system/{node}/" if node else "system/"
        self._waiting: deque[list[Metric]] = deque(maxlen=_KEPT)
        self._is_ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> bool:
        """Begin, unless another monitor of this process measures or nothing here can; return whether it did."""
        if not _one_at_a_time.acquire(blocking=False):
            return False
        try:
            probes = _probes()
        except Exception as error:
            # psutil is missing, or does not know this machine.
            _one_at_a_time.release()
            logger.warning("no system metrics: %s", error)
            return False
        self._thread = threading.Thread(target=self._run, args=(probes,), name="system-metrics", daemon=True)
        self._thread.start()
        return True

    def stop(self) -> None:
        """End; what was measured is sent if that takes seconds at most."""
        if self._thread is not None:
            self._is_ending.set()
            self._thread.join(_LAST_SECONDS)
            self._thread = None

    def _run(self, probes: list[_Probe]) -> None:
        try:
            # The first answer of some probes is about the time before it, which is none.
            _measured(probes)
            while not self._is_ending.wait(self._seconds):
                self._waiting.append(self._points(_measured(probes)))
                self._send()
            self._waiting.append(self._points(_measured(probes)))
            self._send()
        except Exception:
            logger.warning("no more system metrics", exc_info=True)
        finally:
            _one_at_a_time.release()

    def _points(self, values: dict[str, float]) -> "list[Metric]":
        from mlflow.entities import Metric

        now = time.time()
        step = max(0, int(now - self._epoch))
        return [Metric(self._prefix + name, float(value), int(now * 1000), step) for name, value in values.items()]

    def _send(self) -> None:
        """Send what waits, oldest first; what does not arrive waits on."""
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            while self._waiting and (place := self._destination()) is not None:
                client, run_id = place
                batch: list[Metric] = []
                count = 0
                for points in list(self._waiting):
                    if batch and len(batch) + len(points) > _MAX_METRICS:
                        break
                    batch += points
                    count += 1
                client.log_batch(run_id, metrics=batch)
                for _ in range(count):
                    self._waiting.popleft()
        except (MlflowException, SQLAlchemyError, OSError) as error:
            # The tracker, which meets the same, says it.
            logger.debug("system metrics wait: %s", error)


def _interval() -> float:
    try:
        return float(os.environ.get("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL") or SECONDS) or SECONDS
    except ValueError:
        return SECONDS


def _probes() -> list[_Probe]:
    from mlflow.system_metrics.metrics import cpu_monitor, disk_monitor, gpu_monitor, network_monitor, rocm_monitor

    makers: list[Any] = [cpu_monitor.CPUMonitor, disk_monitor.DiskMonitor, network_monitor.NetworkMonitor]
    probes = [make() for make in makers]
    gpus: list[Any] = [gpu_monitor.GPUMonitor, rocm_monitor.ROCMMonitor]
    for make in gpus:
        try:
            return [*probes, make()]
        except Exception as error:
            # No such GPU, or what reads it is not installed.
            logger.debug("no metrics of GPUs by %s: %s", make.__name__, error)
    return probes


def _measured(probes: list[_Probe]) -> dict[str, float]:
    values: dict[str, Any] = {}
    for probe in probes:
        probe.collect_metrics()
        values |= probe.aggregate_metrics()
        probe.clear_metrics()
    return values
