"""What a measuring process can say about itself: memory, versions, since when it runs.

Trap: vLLM reserves its KV cache whatever the model needs, so peak memory is given with and without it.
"""

import os
import platform
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ratchet.environment import code_revision

_PACKAGES = ("torch", "transformers", "vllm", "trl", "verl", "accelerate", "datasets")


def seconds_since_start() -> float:
    """Seconds since the operating system started this process, imports included."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


def memory(step: int, steps: int) -> dict[str, dict[str, int]]:
    """`memory`: bytes in use now, `host` of this process and its children, `device` of the whole GPU.

    Looking costs milliseconds, so it is done at every fifth step and at the last alone.
    """
    import torch

    if step % 5 and step != steps:
        return {}

    found = {"host": _resident(os.getpid())}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found["device"] = total - free
    return {"memory": found}


def peak(engine: Any) -> dict[str, int]:
    """Bytes that torch had allocated at most in this process, and the KV cache of a vLLM engine that is part of it."""
    import torch

    if not torch.cuda.is_available():
        return {}
    return {"allocated": torch.cuda.max_memory_allocated(), "kv_cache": _kv_cache(engine)}


def environment() -> dict[str, Any]:
    """Versions, machine and revision."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "revision": code_revision(),
    }


@dataclass(slots=True)
class StepTimes:
    """The steps of one process as they finish."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    first: float | None = None
    """Seconds from the start of the process to the end of step 1."""
    _before: float | None = None

    def add(self, finished: float, **facts: Any) -> None:
        """Record that the next step finished at `finished` (Unix seconds); a step's time is what lies between two."""
        if self._before is None:
            self.first = seconds_since_start() - (time.time() - finished)
        seconds = None if self._before is None else finished - self._before
        self._before = finished
        self.steps.append({"step": len(self.steps) + 1, "seconds": seconds, **facts})


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _resident(pid: int) -> int:
    """Resident bytes of a process and its children; shared pages count in each."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # it has ended
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(map(_resident, children))


def _kv_cache(engine: Any) -> int:
    """Bytes of the KV cache of an engine in this process; 0 where there is none."""
    if engine is None:
        return 0
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    storages = {cache.data_ptr(): cache.untyped_storage() for cache in runner.kv_caches}
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages.values()}.values())
