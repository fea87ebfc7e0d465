"""The samples of fault injection whose victims are forks, each file in a process that has run nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.conftest import ALONE, FORKING

FOLDER = Path(__file__).parent
LIMIT_SECONDS = 600


@pytest.mark.slow
@pytest.mark.parametrize("name", FORKING)
def test_runs_survive_their_faults(name: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(FOLDER / name)],
        cwd=FOLDER.parents[1],
        env={**environment, ALONE: "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-6000:]
