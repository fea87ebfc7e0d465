"""`python -m tests.warm_pipelines JOBS.json`: run compiled pipelines on kfp.local with a warm process for every task.

A job is {"golden": path, "arguments": {...}}. Each task is a fork of this process, which has imported everything and
runs no thread of its own: kfp.local would start Python anew, and most of a small task's time is importing torch.
"""

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch  # noqa: F401
from kfp.dsl import executor_main
from kfp.local import subprocess_task_handler
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

from pipelines.local import run_locally
from ratchet.grains import entry, loop  # noqa: F401


def run_in_a_fork(full_command: list[str], env_vars: dict[str, str] | None = None) -> int:
    """Run a lightweight component's command, `sh -ec SCRIPT CODE ARGUMENTS...`, without the shell and a new Python."""
    code, arguments = full_command[3], full_command[4:]
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        os.environ |= {"_KFP_RUNTIME": "true", **(env_vars or {})}
        program = Path(tempfile.mkdtemp()) / "ephemeral_component.py"
        program.write_text(code, encoding="utf-8")
        sys.argv = ["executor_main", "--component_module_path", str(program), *arguments]
        executor_main.executor_main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(place: str) -> None:
    """Run the jobs in order; the first that fails ends it."""
    jobs: list[dict[str, Any]] = json.loads(Path(place).read_text(encoding="utf-8"))
    subprocess_task_handler.run_local_subprocess = run_in_a_fork
    for job in jobs:
        with tempfile.TemporaryDirectory() as folder:
            run_locally(Path(job["golden"]), job["arguments"], pipeline_root=Path(folder))


if __name__ == "__main__":
    main(sys.argv[1])
