"""Every Python of a rehearsal imports this first: where it is a task's program, it becomes what a pod would be.

Trap: it runs before anything else does, in every Python that is started with its folder on the path.
"""

import json
import os
import sys
import time
from pathlib import Path


def _become_pod(run: str) -> None:
    folder, arguments = Path(os.environ["REHEARSAL_PODS"]), sys.orig_argv
    component = arguments[arguments.index("--function_to_execute") + 1]
    program = os.fork()
    if program:
        _watch(program, folder)
        # It was deleted, and is started again where the server would do that.
        return _become_pod(run)
    name = f"{component.replace('_', '-')}-{os.getpid()}"
    os.environ.update(RATCHET_POD_NAME=name, RATCHET_POD_NAMESPACE="kubeflow")
    waits = component in os.environ.get("REHEARSAL_WAITS", "").split(",")
    told = {"run": run, "task": component.replace("_", "-"), "pid": os.getpid(), "waits": waits, "created": time.time()}
    (folder / f".{name}").write_text(json.dumps(told))
    (folder / f".{name}").rename(folder / f"{name}.json")
    log = os.open(folder / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    while waits:
        time.sleep(1)


def _watch(program: int, folder: Path) -> None:
    """Wait for the program, and end as it did; return where it was deleted and is to be started again."""
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    name = max(folder.glob(f"*-{program}.json"), key=lambda path: path.stat().st_mtime).stem
    if (folder / f"{name}.deleted").exists():
        if os.environ.get("REHEARSAL_RESTARTS") == "1":
            return
    else:
        (folder / f"{name}.ended").write_text(str(abs(code)))
    os._exit(code if code >= 0 else 128 - code)


if os.environ.get("REHEARSAL_RUN") and "kfp.dsl.executor_main" in sys.orig_argv:
    _become_pod(os.environ["REHEARSAL_RUN"])
