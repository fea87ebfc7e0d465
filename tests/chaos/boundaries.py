"""Where a process can be struck: each write and deletion of a run, the parts of each stage, and what lies between.

`Probe.install` wraps the product's own calls in a process that is there for nothing else, a fork. A recording probe
notes the boundaries that the program comes by; a striking one does its harm at the one that it is told. Boundaries are
known by readable labels without what differs between two executions: attempts, submissions, digests.

Trap: the temporary file of a write is part of what a fault leaves behind, so that half of the bytes are really there.
"""

import errno
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ratchet.engines import trainer_state
from ratchet.engines.sampler_hf import HFSampler
from ratchet.engines.sharded import ShardedTrainer
from ratchet.grains import session
from ratchet.store import layout, local
from ratchet.store.local import LocalStore
from tests.chaos.bench import Journal

BEFORE, HALF, CREATED, AFTER = "before", "half written", "created and not yet tidied", "after"


def normalised(key: str) -> str:
    """Return a key without what differs between two executions."""
    key = re.sub(r"\b\d{4}-[0-9a-f]{12}\b", "ATTEMPT", key)
    key = re.sub(r"\b[0-9a-f]{32,64}\b", "DIGEST", key)
    return re.sub(r"^status/[^/]+/", "status/SUBMISSION/", key)


class Probe:
    """Notes the boundaries that this process comes by, and strikes at one of them."""

    def __init__(self, root: Path, run_id: str, journal: Journal, target: str = "") -> None:
        self.seen: list[tuple[str, str]] = []
        """Thread and label, in the order in which they came."""
        self.strike: Callable[[], None] = lambda: None
        self.disk_is_full = False
        """Whether every write fails from now on, as on a real disk."""
        self._root = root.absolute()
        self._run_id = run_id
        self._begun = journal.listener()
        self._target = target
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._here = threading.local()

    def install(self) -> None:
        """Wrap what writes, deletes and computes, for the rest of this process."""
        self._wrap_puts()
        self._wrap_files()
        self._wrap_checkpoints()
        self._wrap_stages()

    def _come_by(self, label: str) -> None:
        if self._is_target(label):
            self.strike()

    def _is_target(self, label: str) -> bool:
        """Note a boundary; the second one of this label is called `label (2)`."""
        with self._lock:
            self._counts[label] += 1
            label = label if self._counts[label] == 1 else f"{label} ({self._counts[label]})"
            self.seen.append((threading.current_thread().name, label))
            return label == self._target

    # -- storage -----------------------------------------------------------------------------------------------------

    def _wrap_puts(self) -> None:
        for name, key_at, verb in (
            ("put", 0, ""),
            ("put_create", 0, ""),
            ("upload_file", 1, ""),
            ("delete", 0, "delete "),
        ):
            setattr(LocalStore, name, self._around(getattr(LocalStore, name), key_at, verb))

    def _around(self, real: Any, key_at: int, verb: str) -> Any:
        def wrapped(store: LocalStore, *arguments: Any, **options: Any) -> Any:
            label = verb + self._shown(store.root / arguments[key_at])
            self._come_by(f"{label}, {BEFORE}")
            self._here.writes = label
            try:
                result = real(store, *arguments, **options)
            finally:
                self._here.writes = None
            self._come_by(f"{label}, {AFTER}")
            return result

        return wrapped

    def _shown(self, path: Path) -> str:
        """Return where an object is, relative to its run, or to the root where it belongs to none."""
        place = path.relative_to(self._root).as_posix()
        return normalised(place.removeprefix(f"{self._run_id}/"))

    def _wrap_files(self) -> None:
        write, copy, link = local._write_durably, shutil.copyfile, os.link

        def write_half(path: Path, data: bytes | memoryview) -> None:
            self._strike_halfway(lambda: path.write_bytes(data[: len(data) // 2]))
            write(path, data)

        def copy_half(source: Any, target: Any) -> Any:
            data = Path(source).read_bytes
            self._strike_halfway(lambda: Path(target).write_bytes(data()[: len(data()) // 2]))
            return copy(source, target)

        def link_and_stay(source: Any, target: Any, **options: Any) -> None:
            link(source, target, **options)
            # A file that is given gets a temporary name in place of a copy; anything else its own.
            self._come_by(f"{self._here.writes}, {HALF if options else CREATED}")

        local._write_durably = write_half
        shutil.copyfile = copy_half  # type: ignore[assignment]
        os.link = link_and_stay  # type: ignore[assignment]

    def _strike_halfway(self, write_half: Callable[[], Any]) -> None:
        label = getattr(self._here, "writes", None)
        if label is None:
            return
        if self._is_target(f"{label}, {HALF}"):
            write_half()
            self.strike()
        self._check_disk()

    def _check_disk(self) -> None:
        if self.disk_is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _wrap_checkpoints(self) -> None:
        """Torch's distributed checkpoint, in scratch: inside its data, and between them and their index."""
        writer: Any = trainer_state._Writer
        write_data, finish = writer.write_data, writer.finish

        def data(this: Any, *arguments: Any) -> Any:
            written = write_data(this, *arguments)
            if self._is_target(f"checkpoint's data, {HALF}"):
                for path in Path(this.path).iterdir():
                    os.truncate(path, path.stat().st_size // 2)
                self.strike()
            self._check_disk()
            return written

        def index(this: Any, *arguments: Any) -> None:
            self._come_by(f"checkpoint's index, {BEFORE}")
            self._check_disk()
            finish(this, *arguments)

        writer.write_data, writer.finish = data, index

    # -- stages ------------------------------------------------------------------------------------------------------

    def _wrap_stages(self) -> None:
        run_stage, tell = session.run_stage, session.Session._tell

        def run(stage: Any, run: Any, config: Any, step: int | None, *arguments: Any, **named: Any) -> Any:
            if run.manifest(stage.name, step) is not None:
                return run_stage(stage, run, config, step, *arguments, **named)
            place = self._here.stage = layout.stage_folder(stage.name, step)
            self._begun(place, False)
            self._come_by(f"{place}, begun")
            manifest = run_stage(stage, run, config, step, *arguments, **named)
            self._come_by(f"{place}, ended")
            return manifest

        def told(this: session.Session, manifest: Any, place: str) -> None:
            self._come_by(f"{place}, committed")
            tell(this, manifest, place)

        session.run_stage = run
        session.Session._tell = told  # type: ignore[method-assign]
        for kind, method, what in ((HFSampler, "sample", "sampled"), (ShardedTrainer, "update", "trained")):
            setattr(kind, method, self._after(getattr(kind, method), what))

    def _after(self, real: Any, what: str) -> Any:
        def wrapped(this: Any, *arguments: Any, **named: Any) -> Any:
            result = real(this, *arguments, **named)
            self._come_by(f"{self._here.stage}, {what}")
            return result

        return wrapped
