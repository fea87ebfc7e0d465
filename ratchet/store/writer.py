"""Writing behind the work: what a segment has made is stored and committed in order, on a thread of its own.

Trap: only the order keeps the chain whole. Once a job has failed, no later one runs, and whoever hands over the next
job is told why; nothing that was handed over counts as done before its commit.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, stop_when_event_set, wait_exponential

from ratchet.errors import StoreError, StoreUnavailableError
from ratchet.store.objects import ObjectInfo, ObjectNotFoundError, ObjectStore

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

OUTAGE_SECONDS = 900.0
"""How long a job is tried again while storage does not answer; what is made meanwhile waits in the bounded queue."""
_LONGEST_PAUSE = 30.0
_FOLDERS_HELD = 2
"""The step that trains, and the one that is sampled ahead of it."""


class Writer(Protocol):
    """Runs jobs in the order in which they come."""

    def submit(self, job: Callable[[], Result]) -> "Future[Result]":
        """Hand over a job; raises what an earlier one failed with. A job may run twice: it must not mind."""


class InlineWriter(Writer):
    """Runs each job at once: the next line of the caller finds it done, or its error raised."""

    def submit(self, job: Callable[[], Result]) -> "Future[Result]":
        done: Future[Result] = Future()
        done.set_result(job())
        return done


INLINE = InlineWriter()


class BackgroundWriter(Writer):
    """Runs the jobs on one thread. A store that does not answer is tried again for `outage_seconds`."""

    def __init__(self, *, outage_seconds: float = OUTAGE_SECONDS) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._outage_seconds = outage_seconds
        self._failure: BaseException | None = None
        self._stop = threading.Event()

    def submit(self, job: Callable[[], Result]) -> "Future[Result]":
        self.check()
        return self._executor.submit(self._run, job)

    def store(self, inner: ObjectStore) -> ObjectStore:
        """Return the store through which stages write what these jobs then publish."""
        return QueuedStore(inner, self)

    @property
    def failure(self) -> BaseException | None:
        """What a job has failed with."""
        return self._failure

    def check(self) -> None:
        """Raise what a job has failed with."""
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Wait until everything handed over is done; raises what a job failed with."""
        self.submit(lambda: None).result()

    def close(self, *, seconds: float = 0.0) -> None:
        """Give the queue `seconds` to empty itself, drop what is left, and end the thread after the job it is at."""
        try:
            if self._failure is None and seconds > 0:
                self._executor.submit(lambda: None).result(timeout=seconds)
        except TimeoutError:
            logger.warning("commits under way after %.0f s are dropped; a resumed run makes them again", seconds)
        finally:
            # Also when a signal ends the wait: at its exit Python would wait for the whole queue.
            self._stop.set()
            self._executor.shutdown(wait=True, cancel_futures=True)

    def patiently(self, call: Callable[[], Result]) -> Result:
        """Return what `call` does, on this thread; where storage does not answer, it is tried again like a job."""
        retrying = Retrying(
            retry=retry_if_exception_type(StoreUnavailableError),
            stop=stop_after_delay(self._outage_seconds) | stop_when_event_set(self._stop),
            wait=wait_exponential(max=_LONGEST_PAUSE),
            sleep=self._pause,
            before_sleep=lambda state: logger.warning(
                "storage does not answer (%s); trying again", state.outcome.exception() if state.outcome else "?"
            ),
            reraise=True,
        )
        return retrying(call)

    def _run(self, job: Callable[[], Result]) -> Result:
        if self._failure is not None:
            raise self._failure
        try:
            return self.patiently(job)
        except BaseException as error:
            self._failure = error
            raise

    def _pause(self, seconds: float) -> None:
        self._stop.wait(seconds)


def direct(store: ObjectStore) -> ObjectStore:
    """Return the store that a job of the writer writes to: what it queued would come after its own commit."""
    return store.inner if isinstance(store, QueuedStore) else store


class QueuedStore(ObjectStore):
    """A store whose plain puts are the writer's jobs. What is still to be written is read from memory.

    So is what was written of the newest steps: the next stage reads it, and would else wait for storage, in an outage
    while there is room for more work. What is older is read from storage, as patiently as it was written.
    """

    def __init__(self, inner: ObjectStore, writer: BackgroundWriter) -> None:
        self.uri = inner.uri
        self.inner = inner
        self._writer = writer
        self._held: dict[str, bytes] = {}
        self._waiting: set[str] = set()
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes | memoryview) -> None:
        kept = bytes(data)
        with self._lock:
            self._held[key] = kept
            self._waiting.add(key)
            self._let_go()

        def write() -> None:
            self.inner.put(key, kept)
            self._waiting.discard(key)

        self._writer.submit(write)

    def _let_go(self) -> None:
        """Hold what waits, and what is there of the folders that were written to last."""
        newest = list(dict.fromkeys(key.partition("/")[0] for key in reversed(self._held)))[:_FOLDERS_HELD]
        for key in [key for key in self._held if key not in self._waiting and key.partition("/")[0] not in newest]:
            del self._held[key]

    def get(self, key: str) -> bytes:
        data = self._held.get(key)
        return self._writer.patiently(lambda: self.inner.get(key)) if data is None else data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = self._held.get(key)
        if data is not None:
            return data[start : start + length]
        return self._writer.patiently(lambda: self.inner.get_range(key, start, length))

    def put_create(self, key: str, data: bytes) -> bool:
        return self.inner.put_create(key, data)

    def size(self, key: str) -> int | None:
        data = self._held.get(key)
        return self._writer.patiently(lambda: self.inner.size(key)) if data is None else len(data)

    def list_objects(self, folder: str) -> Iterator[ObjectInfo]:
        return iter(self._writer.patiently(lambda: list(self.inner.list_objects(folder))))

    def list_folders(self, folder: str) -> list[str]:
        return self._writer.patiently(lambda: self.inner.list_folders(folder))

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def upload_file(self, path: Path, key: str, *, is_given: bool = False) -> None:
        self.inner.upload_file(path, key, is_given=is_given)

    def download_file(self, key: str, path: Path) -> None:
        if key in self._waiting:
            raise ObjectNotFoundError(f"{key!r} in {self.uri} is still to be written")
        self._writer.patiently(lambda: self.inner.download_file(key, path))

    def child(self, folder: str) -> ObjectStore:
        raise StoreError(f"{self.uri}: no store inside one that is written behind")
