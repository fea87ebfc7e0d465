"""Views of a run: MLflow, the console, files. A run never depends on them; each can catch up from the chain."""

from ratchet.tracking.base import Status, Tracker
from ratchet.tracking.console import ConsoleTracker, JsonlTracker
from ratchet.tracking.metrics import mlflow_names, step_line, summary
from ratchet.tracking.mlflow_tracker import MLflowTracker
from ratchet.tracking.trackers import TRACKERS, Trackers, check_names, open_trackers

__all__ = [
    "TRACKERS",
    "ConsoleTracker",
    "JsonlTracker",
    "MLflowTracker",
    "Status",
    "Tracker",
    "Trackers",
    "check_names",
    "mlflow_names",
    "open_trackers",
    "step_line",
    "summary",
]
