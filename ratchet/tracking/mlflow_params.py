"""The configuration of a run in MLflow: flat params to compare runs by, and the whole as the artifact `config.yaml`.

Trap: MLflow params are written once, and one that differs from what is there rejects the whole batch, metrics and all.
So params travel alone, and only those that the run lacks.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.redaction import hidden
from ratchet.store.manifest import digest_of
from ratchet.tracking.metrics import mlflow_names
from ratchet.tracking.mlflow_runs import TrackedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
CONFIG_TAG = "ratchet.config"
"""Digest of the configuration in `config.yaml`, or why there is no such file."""
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


def log_config(client: "MlflowClient", tracked: TrackedRun, config: Mapping[str, Any]) -> None:
    """Upload `config.yaml` unless this configuration is there; where artifacts cannot be written, say so once a run."""
    import yaml

    plain = json.loads(json.dumps(config, default=str))
    digest = digest_of(json.loads(json.dumps(plain), parse_constant=str))
    if tracked.tags.get(CONFIG_TAG, "").startswith(digest):
        return
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    failed = _upload(lambda: client.log_text(tracked.run_id, text, CONFIG_FILE), CONFIG_FILE)
    # Told in the tag, so that the pods of the other stages do not wait for the same storage.
    client.set_tag(tracked.run_id, CONFIG_TAG, digest if not failed else f"{digest} not uploaded: {failed}")


def upload(client: "MlflowClient", tracked: TrackedRun, path: Path, folder: str) -> int:
    """Upload a file to a folder of the artifacts; return whether that was possible, as 0 or 1."""
    failed = _upload(lambda: client.log_artifact(tracked.run_id, str(path), folder), f"{folder}/{path.name}")
    return int(not failed)


def _upload(call: Callable[[], object], name: str) -> str:
    """Upload an artifact; where that cannot be, say so in the log and return the error's class, else ""."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError
    from mlflow.exceptions import MlflowException

    try:
        call()
    except (MlflowException, OSError, BotoCoreError, ClientError, Boto3Error, ImportError) as error:
        logger.warning(
            "no %s in MLflow, its artifact storage cannot be written from here: %s", name, hidden(str(error))
        )
        return type(error).__name__
    return ""


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
