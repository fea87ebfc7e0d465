"""Points of curves in MLflow, in as few requests as it allows."""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ratchet.store.manifest import Manifest

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, RunTag

logger = logging.getLogger(__name__)

MAX_METRICS = 900
"""In one request; MLflow takes 1000 metrics, params and tags together."""


def batches(manifests: Iterable[Manifest]) -> Iterator[list[Manifest]]:
    """Yield the manifests in batches of one request each, if a single one has no more than that."""
    batch: list[Manifest] = []
    num_metrics = 0
    for manifest in manifests:
        if batch and num_metrics + len(manifest.metrics) > MAX_METRICS:
            yield batch
            batch, num_metrics = [], 0
        batch.append(manifest)
        num_metrics += len(manifest.metrics)
    if batch:
        yield batch


def points(manifests: Sequence[Manifest], names: Mapping[str, str]) -> "list[Metric]":
    """Return the finite metrics of the manifests under MLflow's `names`, each at its manifest's step and time."""
    from mlflow.entities import Metric

    return [
        Metric(names[name], float(value), int(manifest.provenance.ended * 1000), manifest.step or 0)
        for manifest in manifests
        for name, value in manifest.metrics.items()
        if math.isfinite(value)
    ]


def send(client: "MlflowClient", run_id: str, metrics: "Sequence[Metric]", tags: "Sequence[RunTag]") -> None:
    """Send points, and with the last of them `tags`, which therefore never speak of points that did not arrive.

    A point that MLflow refuses is left out with a warning, and takes no other with it.
    """
    while len(metrics) > MAX_METRICS:
        _send(client, run_id, metrics[:MAX_METRICS], [])
        metrics = metrics[MAX_METRICS:]
    _send(client, run_id, metrics, tags)


def _send(client: "MlflowClient", run_id: str, metrics: "Sequence[Metric]", tags: "Sequence[RunTag]") -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.log_batch(run_id, metrics=metrics, tags=tags)
    except MlflowException as error:
        if error.error_code != "INVALID_PARAMETER_VALUE":
            raise
        # A deleted run refuses everything: a new connection finds or makes another.
        if client.get_run(run_id).info.lifecycle_stage != "active":
            raise
        if len(metrics) <= 1 and not tags:
            logger.warning("MLflow refused the metric %s: %s", metrics[0].key, error.message)
            return
        # One refused metric must neither take the others with it nor be tried for ever.
        for metric in metrics:
            _send(client, run_id, [metric], [])
        client.log_batch(run_id, tags=tags)
