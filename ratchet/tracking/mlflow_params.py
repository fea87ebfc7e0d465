"""The configuration of a run in MLflow: flat params to compare runs by, and the whole as the artifact `config.yaml`.

Trap: MLflow params are written once, and one that differs from what is there rejects the whole batch, metrics and all.
So params travel alone, and only those that the run lacks.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ratchet.store.manifest import digest_of
from ratchet.tracking.metrics import mlflow_names
from ratchet.tracking.mlflow_runs import TrackedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
MAX_VALUE = 6000
"""Characters of the longest param that MLflow stores; the artifact holds the rest."""
_BATCH = 100


def flat_params(config: Mapping[str, Any]) -> dict[str, str]:
    """Return dotted key -> text: strings as they are, anything else as JSON, cut to what MLflow stores."""
    flat = dict(_flat(config, ""))
    names = mlflow_names(flat)
    return {names[key]: _text(value) for key, value in flat.items()}


def log_params(client: "MlflowClient", tracked: TrackedRun, config: Mapping[str, Any]) -> None:
    """Write the params that the run lacks. One that is there with another value stays; it is named in the log."""
    from mlflow.entities import Param

    params = flat_params(config)
    changed = [key for key, value in params.items() if tracked.params.get(key, value) != value]
    if changed:
        logger.info("MLflow keeps the first value of these params: %s", ", ".join(changed))
    new = [Param(key, value) for key, value in params.items() if key not in tracked.params]
    for start in range(0, len(new), _BATCH):
        _log_batch(client, tracked.run_id, new[start : start + _BATCH])


def config_digest(config: Mapping[str, Any]) -> str:
    """Return what says whether two configurations are the same."""
    return digest_of(json.loads(json.dumps(_plain(config)), parse_constant=str))


def send_config(client: "MlflowClient", run_id: str, config: Mapping[str, Any]) -> None:
    """Upload `config.yaml`; raises what MLflow and its artifact storage raise."""
    import yaml

    client.log_text(run_id, yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True), CONFIG_FILE)


def _plain(config: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(config, default=str))


def _log_batch(client: "MlflowClient", run_id: str, params: list[Any]) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.log_batch(run_id, params=params)
    except MlflowException as error:
        if error.error_code != "INVALID_PARAMETER_VALUE":
            raise
        if len(params) == 1:
            logger.info("MLflow refused the param %s: %s", params[0].key, error.message)
            return
        # Another process wrote one of them in the meantime: bring the others by themselves.
        for param in params:
            _log_batch(client, run_id, [param])


def _flat(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."
