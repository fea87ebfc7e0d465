"""The first tests of the suite for a live server, without one: submitted, run by kfp.local, read, submitted again."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BUCKET
from tests.e2e.rehearsal import rehearsal
from tests.warm import Warm

TESTS = ("committed_in_order", "again_does_nothing")

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]


def test_what_the_suite_does_first_works_against_the_doubles(
    s3_server: Any, s3_root: str, warm: Warm, tmp_path: Path
) -> None:
    log = tmp_path / "suite.log"
    assert s3_root.startswith(f"s3://{BUCKET}/")
    with rehearsal(tmp_path, s3_server.env(), s3_root) as environment:
        # Only the suite itself is a fork: the commands that it gives and the tasks that they start are new processes.
        arguments = ["tests/e2e", "-q", "-x", "-k", " or ".join(TESTS)]
        # Some plugin is imported already.
        quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = warm.run(log, environment, "pytest", *arguments, *quiet)
    said = log.read_text(errors="replace")
    assert code == 0, said[-8000:]
    assert f"{len(TESTS)} passed" in said.splitlines()[-1]
