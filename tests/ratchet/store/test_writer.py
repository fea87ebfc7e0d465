"""Writing behind the work: in order, tried again, and nothing after a failure."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from ratchet.errors import CommitConflictError, StoreError, StoreUnavailableError
from ratchet.store.objects import ObjectInfo, ObjectNotFoundError, open_store
from ratchet.store.writer import INLINE, BackgroundWriter, direct


def test_jobs_run_in_order_on_another_thread() -> None:
    writer, seen = BackgroundWriter(), []
    for number in range(50):
        writer.submit(lambda number=number: seen.append((number, threading.current_thread().name)))
    writer.drain()
    writer.close()
    assert [number for number, _ in seen] == list(range(50))
    assert {name for _, name in seen} == {"writer_0"}


def test_a_store_that_does_not_answer_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = BackgroundWriter()
    monkeypatch.setattr(writer, "_pause", lambda seconds: None)
    tries: list[int] = []

    def job() -> str:
        tries.append(1)
        if len(tries) < 4:
            raise StoreUnavailableError("nobody listens")
        return "done"

    assert writer.submit(job).result() == "done"
    writer.close()
    assert len(tries) == 4


def test_an_outage_without_end_fails_the_job() -> None:
    writer = BackgroundWriter(outage_seconds=0.0)

    def job() -> None:
        raise StoreUnavailableError("nobody listens")

    with pytest.raises(StoreUnavailableError, match="nobody listens"):
        writer.submit(job).result()
    writer.close()


def test_nothing_runs_after_a_failure_and_the_next_caller_is_told() -> None:
    writer, seen = BackgroundWriter(), []
    gate = threading.Event()

    def lost() -> None:
        gate.wait()
        raise CommitConflictError("another attempt was first")

    failed = writer.submit(lost)
    later = writer.submit(lambda: seen.append("later"))
    gate.set()
    for future in (failed, later):
        with pytest.raises(CommitConflictError, match="another attempt was first"):
            future.result()
    with pytest.raises(CommitConflictError, match="another attempt was first"):
        writer.submit(lambda: seen.append("after"))
    with pytest.raises(CommitConflictError):
        writer.drain()
    writer.close(seconds=5)
    assert seen == []


def test_closing_gives_the_queue_its_time_and_drops_the_rest() -> None:
    writer, seen = BackgroundWriter(), []
    writer.submit(lambda: time.sleep(0.05))
    writer.submit(lambda: seen.append("in time"))
    writer.submit(lambda: time.sleep(0.5))
    dropped = writer.submit(lambda: seen.append("too late"))
    writer.close(seconds=0.2)
    assert seen == ["in time"]
    assert dropped.cancelled()


def test_closing_ends_an_outage() -> None:
    writer = BackgroundWriter()

    def job() -> None:
        raise StoreUnavailableError("nobody listens")

    future = writer.submit(job)
    started = time.monotonic()
    writer.close(seconds=0.1)
    assert time.monotonic() - started < 5
    assert future.done()


def test_a_signal_while_closing_drops_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, gate = BackgroundWriter(), threading.Event()
    writer.submit(lambda: gate.wait(5))
    dropped = writer.submit(lambda: None)

    def end(future: Future[None], timeout: float | None = None) -> None:
        gate.set()
        raise SystemExit(143)

    monkeypatch.setattr(Future, "result", end)
    with pytest.raises(SystemExit):
        writer.close(seconds=60)
    assert dropped.cancelled()


def test_what_is_written_is_read_as_patiently_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, writer = open_store(str(tmp_path)), BackgroundWriter()
    monkeypatch.setattr(writer, "_pause", lambda seconds: None)
    inner.put("step/table", b"0123456789")
    store, get, tries = writer.store(inner), inner.get, []

    def fail_first(key: str) -> bytes:
        tries.append(key)
        if len(tries) < 4:
            raise StoreUnavailableError("nobody listens")
        return get(key)

    monkeypatch.setattr(inner, "get", fail_first)
    assert store.get("step/table") == b"0123456789"
    assert len(tries) == 4

    listed, listings = inner.list_objects, []

    def list_late(folder: str) -> Iterator[ObjectInfo]:
        listings.append(folder)
        if len(listings) < 3:
            raise StoreUnavailableError("nobody listens")
        return listed(folder)

    monkeypatch.setattr(inner, "list_objects", list_late)
    assert [info.key for info in store.list_objects("step")] == ["step/table"]
    assert len(listings) == 3
    writer.close()
    with pytest.raises(ObjectNotFoundError):
        store.get("step/other")


def test_what_is_queued_is_read_from_memory_until_it_is_written(tmp_path: Path) -> None:
    inner, writer = open_store(str(tmp_path)), BackgroundWriter()
    gate = threading.Event()
    writer.submit(gate.wait)
    store = writer.store(inner)
    store.put("step/table", b"0123456789")
    assert inner.size("step/table") is None
    assert store.get("step/table") == b"0123456789"
    assert store.get_range("step/table", 2, 3) == b"234"
    assert store.size("step/table") == 10
    with pytest.raises(StoreError, match="still to be written"):
        store.download_file("step/table", tmp_path / "copy")
    gate.set()
    writer.drain()
    assert inner.get("step/table") == store.get("step/table") == b"0123456789"
    store.download_file("step/table", tmp_path / "copy")
    writer.close()
    assert (tmp_path / "copy").read_bytes() == b"0123456789"
    assert direct(store) is inner
    assert direct(inner) is inner


def test_what_the_newest_steps_wrote_is_read_from_memory_and_older_steps_are_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, writer = open_store(str(tmp_path)), BackgroundWriter()
    store, asked = writer.store(inner), []
    get = inner.get
    monkeypatch.setattr(inner, "get", lambda key: (asked.append(key), get(key))[1])
    tables = {f"step-{step:06d}/rollout/table": bytes([step]) * 100 for step in range(1, 5)}
    for key, data in tables.items():
        store.put(key, data)
        writer.drain()
    assert {key: store.get(key) for key in tables} == tables
    assert asked == ["step-000001/rollout/table", "step-000002/rollout/table"]
    # What still waits is held whatever its age.
    gate = threading.Event()
    writer.submit(gate.wait)
    for key, data in tables.items():
        store.put(f"{key}-2", data)
    asked.clear()
    assert [store.get(f"{key}-2") for key in tables] == list(tables.values())
    assert asked == []
    gate.set()
    writer.close()


def test_inline_jobs_are_done_at_once_and_fail_where_they_are_handed_over() -> None:
    seen: list[str] = []
    assert INLINE.submit(lambda: seen.append("now")).done()
    assert seen == ["now"]

    def lost() -> None:
        raise CommitConflictError("another attempt was first")

    with pytest.raises(CommitConflictError):
        INLINE.submit(lost)
