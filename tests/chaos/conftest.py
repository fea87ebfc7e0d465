"""Test files that fork are run by `test_alone.py`, in a process of their own.

A fork of a process in which other tests have left threads behind (torch's, pyarrow's) is not safe: it may crash. These
files leave none, since whatever they do to a run they do in forks: one process, and one workbench, serves all of them.
"""

import os
from collections.abc import Iterator

import pytest

from tests.chaos.bench import Workbench

ALONE = "RATCHET_CHAOS_ALONE"
"""The variable that is set in such a process."""
FORKING = ("test_process.py", "test_resume_matrix.py", "test_rivals.py", "test_mlflow.py")

collect_ignore = [] if os.environ.get(ALONE) else list(FORKING)


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    made = Workbench(tmp_path_factory.mktemp("bench"))
    yield made
    made.close()
