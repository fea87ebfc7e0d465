"""The first tests of the suite for a live server, without one: submitted, run by kfp.local, read, submitted again."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BUCKET
from tests.e2e.environment import REPOSITORY
from tests.e2e.rehearsal import rehearsal

TESTS = ("committed_in_order", "again_does_nothing")

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]


def test_what_the_suite_does_first_works_against_the_doubles(s3_server: Any, s3_root: str, tmp_path: Path) -> None:
    assert s3_root.startswith(f"s3://{BUCKET}/")
    with rehearsal(tmp_path, s3_server.env(), s3_root) as environment:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "tests/e2e", "-q", "-x", "-k", " or ".join(TESTS)],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-8000:]
    assert f"{len(TESTS)} passed" in done.stdout.splitlines()[-1]
