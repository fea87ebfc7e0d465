"""`python -m pipelines.local GOLDEN.yaml key=value ...`: run a compiled pipeline here, without a cluster.

kfp.local runs the golden YAML itself, each task as a process of this environment, whatever image the task names.
"""

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import yaml
from kfp import components, local

REPOSITORY = Path(__file__).resolve().parents[1]


def run_locally(golden: Path, arguments: dict[str, Any], *, pipeline_root: Path) -> None:
    """Run the compiled pipeline to its end; RuntimeError if a task failed. Its small files go to `pipeline_root`."""
    # Tasks are processes that start "python": it must be this one, and find the library.
    paths = {"PYTHONPATH": str(REPOSITORY), "PATH": str(Path(sys.executable).parent)}
    for name, first in paths.items():
        os.environ[name] = os.pathsep.join(filter(None, [first, os.environ.get(name)]))
    # Here a task's image is a name only.
    warnings.filterwarnings("ignore", "You may be attemping to run a task", RuntimeWarning)
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(pipeline_root), raise_on_error=True)
    components.load_component_from_file(str(golden))(**arguments)


def main(golden: str, *pairs: str) -> None:
    """Run with arguments from the command line, each of the type that the pipeline declares."""
    logging.basicConfig(level=logging.INFO)
    ir = next(yaml.safe_load_all(Path(golden).read_text(encoding="utf-8")))
    declared = ir["root"]["inputDefinitions"]["parameters"]
    values = dict(pair.split("=", 1) for pair in pairs)
    arguments = {name: _typed(value, declared[name]["parameterType"]) for name, value in values.items()}
    run_locally(Path(golden), arguments, pipeline_root=Path(os.environ.get("RATCHET_KFP_ROOT", "kfp-local")))


def _typed(value: str, kind: str) -> Any:
    return value if kind == "STRING" else yaml.safe_load(value)


if __name__ == "__main__":
    main(*sys.argv[1:])
