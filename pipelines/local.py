"""Run a compiled pipeline in this machine's processes, without a cluster: kfp.local over the golden YAML."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

from kfp import components, local

FOLDER = Path(__file__).parent


def run_locally(golden: Path, arguments: dict[str, Any], *, pipeline_root: Path) -> None:
    """Run the compiled pipeline to its end; RuntimeError if a task failed.

    Tasks are processes of this environment, whatever image they name. `pipeline_root` gets KFP's own small files.
    """
    # Tasks run in folders of their own, and must import the components' library all the same.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )
    # kfp.local starts "python": it must be this one.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    logging.getLogger("kfp").setLevel(logging.WARNING)
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(pipeline_root), raise_on_error=True)
    components.load_component_from_file(str(golden))(**arguments)
