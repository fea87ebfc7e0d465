"""Whether the run can be stored, tracked and worked on: the bucket, MLflow, the scratch disk.

Trap: the bucket is asked by doing what commits do, since permissions and create-only puts show in no other way. The
probe lies under the run's own prefix and is removed again; no run exists by it.
"""

import contextlib
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from ratchet.config import RunConfig
from ratchet.errors import StoreError, StoreUnavailableError
from ratchet.grains.checks.finding import Finding, PipelineFacts
from ratchet.redaction import by_looks
from ratchet.store.local import LocalStore
from ratchet.store.objects import ObjectStore

logger = logging.getLogger(__name__)

PROBES = "preflight"
"""Folder of the run in which the bucket is probed."""
TRACKING = "MLFLOW_TRACKING_URI"

_TRACKING_TIMEOUT_S = 5
_TRAINER_STATE_BYTES = 12
"""Of a parameter: its float32 master weight and two moments."""


def bucket_findings(store: ObjectStore, facts: PipelineFacts) -> Iterator[Finding]:
    """Write, create, read, list and delete where the run lies.

    In a pod, storage that does not answer raises StoreUnavailableError, which says that nothing is wrong with the run.
    """
    if facts.on_cluster and not store.uri.startswith("s3://"):
        yield Finding(
            "bucket",
            "warning",
            f"the run lies in the folder {store.uri}: every pod must see the same folder there; s3:// works anywhere",
        )
    key = f"{PROBES}/{uuid.uuid4().hex}"
    try:
        yield _probe(store, key)
    except StoreUnavailableError as error:
        if facts.in_pod:
            raise
        yield Finding("bucket", "error", str(error))
    except StoreError as error:
        yield Finding("bucket", "error", f"{error}; a run must get, put, list and delete objects below its root")


def _probe(store: ObjectStore, key: str) -> Finding:
    first, second = b"the first of two", b"the second of two"
    is_new = store.put_create(key, first)
    try:
        is_new_again, found = store.put_create(key, second), store.get(key)
        if not is_new or is_new_again or found != first:
            return Finding(
                "bucket",
                "error",
                f"{store.uri}: this storage ignores create-only puts (If-None-Match: *), so that commits are unsafe: "
                "of two puts under one key the second must be refused; use other storage",
            )
        if not any(info.key == key for info in store.list_objects(PROBES)):
            return Finding("bucket", "error", f"{store.uri}: an object that was just written is in no listing")
        store.delete(key)
        if store.size(key) is not None:
            return Finding("bucket", "error", f"{store.uri}: an object that was just deleted is still there")
    finally:
        _remove(store, key)
    return Finding("bucket", "ok", f"{store.uri} can be written, and creates an object once only")


def _remove(store: ObjectStore, key: str) -> None:
    try:
        store.delete(key)
    except StoreError as error:
        logger.warning("the probe %s in %s stays: %s", key, store.uri, error)
    if isinstance(store, LocalStore):
        # Unlike a bucket, a disk keeps empty folders: what is refused should leave none.
        for folder in (store.root / PROBES, store.root):
            with contextlib.suppress(OSError):
                folder.rmdir()


def tracking_findings(config: RunConfig, facts: PipelineFacts, settings: dict[str, str] | None) -> Iterator[Finding]:
    """Whether MLflow answers; a run never waits for it. `settings` are those of pods, None where nobody could ask."""
    if "mlflow" not in config.trainer.logger:
        return
    is_outside = facts.asks_cluster and not facts.in_pod
    if is_outside and settings is None:
        yield Finding("tracking", "unknown", f"whether pods get {TRACKING} is not known: their settings were not read")
        return
    uri = (settings or {}).get(TRACKING, "") if is_outside else os.environ.get(TRACKING, "")
    if not uri and facts.on_cluster:
        where = f"the config map {facts.config_map}"
        yield Finding(
            "tracking",
            "warning",
            f"trainer.logger names mlflow, and {TRACKING} is not set for pods ({where}): metrics go to a file in the "
            "pod, and are lost with it",
        )
    elif urlsplit(uri).scheme not in ("http", "https"):
        level, place = ("warning", "the pod, and is lost with it") if facts.on_cluster else ("ok", "this machine")
        yield Finding("tracking", level, f"{TRACKING} is {by_looks(uri) or 'not set'}: MLflow's data stay on {place}")  # type: ignore[arg-type]
    elif is_outside:
        yield Finding(
            "tracking",
            "unknown",
            f"{by_looks(uri)} is the pods' MLflow server; whether it answers shows from there only",
        )
    else:
        yield _ask(uri)


def _ask(uri: str) -> Finding:
    import requests  # type: ignore[import-untyped]

    token, user = os.environ.get("MLFLOW_TRACKING_TOKEN"), os.environ.get("MLFLOW_TRACKING_USERNAME")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    login = (user, os.environ.get("MLFLOW_TRACKING_PASSWORD", "")) if user and not token else None
    later = "training goes on without it, and metrics follow when it is back"
    shown = urlsplit(uri)._replace(query="")
    place = shown._replace(netloc=shown.netloc.rpartition("@")[2]).geturl()
    try:
        response = requests.get(
            f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/get-by-name",
            params={"experiment_name": "Default"},
            headers=headers,
            auth=login,
            timeout=_TRACKING_TIMEOUT_S,
        )
    except (requests.RequestException, ValueError) as error:
        return Finding("tracking", "warning", f"MLflow at {place} does not answer ({type(error).__name__}); {later}")
    if response.status_code in (401, 403):
        said = "expected the secret ratchet-tokens to hold its user and password, or its token"
        return Finding("tracking", "warning", f"MLflow at {place} answers {response.status_code}: {said}; {later}")
    if response.status_code >= 500:
        return Finding("tracking", "warning", f"MLflow at {place} answers {response.status_code}; {later}")
    return Finding("tracking", "ok", f"MLflow at {place} answers")


def scratch_findings(config: RunConfig, num_parameters: int | None, num_critic: int | None) -> Iterator[Finding]:
    """Room for copies of the models and a trainer state; the number of parameters is None where it is not known."""
    named = os.environ.get("RATCHET_SCRATCH")
    folder = Path(named or tempfile.gettempdir())
    if not folder.is_dir():
        yield Finding(
            "scratch", "error", f"RATCHET_SCRATCH is {folder}, which is no folder here: name one that exists, or none"
        )
        return
    free = shutil.disk_usage(folder).free
    if num_parameters is None:
        yield Finding("scratch", "unknown", f"{folder} has {free / 1e9:.1f} GB free; how much a run needs is not known")
        return
    width = 4 if config.actor_rollout_ref.rollout.dtype == "float32" else 2
    needed = num_parameters * (3 * width + _TRAINER_STATE_BYTES)
    if config.critic_is_needed:
        critic = num_critic or num_parameters
        # One trainer's state lies there at a time.
        needed += critic * 2 * (4 if config.critic.fsdp_config.dtype == "float32" else 2)
        needed += max(critic - num_parameters, 0) * _TRAINER_STATE_BYTES
    said = f"{folder} has {free / 1e9:.1f} GB free here, and three copies of the model and a trainer state take"
    if free < needed:
        in_pod = bool(os.environ.get("RATCHET_POD_NAME"))
        advice = "choose nodes with a larger disk" if in_pod else "let RATCHET_SCRATCH name a larger disk"
        yield Finding("scratch", "warning", f"{said} {needed / 1e9:.1f} GB: {advice}")
    else:
        yield Finding("scratch", "ok", f"{said} {needed / 1e9:.1f} GB")
