"""What the task of a pod last said of itself, for whoever asks why a run stands still.

Trap: a status is no part of the chain. It is replaced freely, may be missing or old, and decides nothing.
"""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Literal

from ratchet.errors import StoreError
from ratchet.store import layout
from ratchet.store.objects import ObjectNotFoundError, ObjectStore

logger = logging.getLogger(__name__)

_READERS = 16


class DamagedStatusError(StoreError):
    """What lies where a status should is none."""


State = Literal["running", "succeeded", "failed", "terminated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskStatus:
    """One task of one submission.

    Example: TaskStatus(submission_id="6f0c..", task="segment", step=51, state="failed", host="ratchet-grpo-x-93", ...).
    """

    submission_id: str
    """The pipeline run."""
    task: str
    """The component."""
    step: int | None
    """Its RL step, or the first one of its segment; None for tasks without one."""
    state: State
    host: str
    """The pod."""
    started: float
    """Unix seconds."""
    updated: float
    """Unix seconds; when this was written."""
    attempt: int = 1
    """How often the task has begun its work in this process."""
    exit_code: int | None = None
    """Of the process, once it has ended (`ratchet.grains.exits`)."""
    error: str = ""
    """The exception's class."""
    message: str = ""
    advice: str = ""
    """What to do next."""
    note: str = ""
    """What a task that succeeded has to say, such as why there was nothing to do."""


def write_status(store: ObjectStore, status: TaskStatus) -> None:
    """Replace the task's status in the run's store; what cannot be written is logged and otherwise ignored."""
    key = layout.status(status.submission_id, status.task, status.step)
    try:
        store.put(key, json.dumps(asdict(status), sort_keys=True).encode())
    except OSError as error:
        logger.warning("the status of %s cannot be written: %s", status.task, error)


def read_statuses(store: ObjectStore) -> list[TaskStatus]:
    """Return what every task of the run last said; what is damaged, or was replaced by nothing, is logged and left out.

    StoreError where storage cannot be read.
    """

    def read(key: str) -> TaskStatus | None:
        try:
            return read_status(store, key)
        except (ObjectNotFoundError, DamagedStatusError) as error:
            logger.warning("%s", error)
            return None

    keys = [info.key for info in store.list_objects("status")]
    with ThreadPoolExecutor(_READERS) as pool:
        return [one for one in pool.map(read, keys) if one is not None]


def read_status(store: ObjectStore, key: str) -> TaskStatus:
    """Return the status under a key; DamagedStatusError for what is none, ObjectNotFoundError for nothing."""
    try:
        return TaskStatus(**json.loads(store.get(key)))
    except (ValueError, TypeError) as error:
        raise DamagedStatusError(f"{store.uri}/{key} is not a task's status: {error}") from error
