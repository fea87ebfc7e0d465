"""The samples of fault injection whose victims are forks, in a process in which nothing has run before them."""

import os
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.chaos.conftest import ALONE, FORKING
from tests.warm import Warm

FOLDER = Path(__file__).parent
LIMIT_SECONDS = 600

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> tuple[int, dict[str, list[bool]], str]:
    """The exit code, what became of the tests of each module, and what was said; one workbench serves all of them."""
    folder = tmp_path_factory.mktemp("alone")
    log, report = folder / "log", folder / "report.xml"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    program = warm.start(
        log,
        {**environment, ALONE: "1"},
        *("pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--junitxml", str(report)),
        # Some plugin is imported already: a fork is a process that has imported everything.
        *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
        *(str(FOLDER / name) for name in FORKING),
    )
    code = program.wait(LIMIT_SECONDS)
    found: dict[str, list[bool]] = {}
    for case in ElementTree.parse(report).iter("testcase") if report.is_file() else ():
        module = case.attrib["classname"].rpartition(".")[2]
        # A passed test says nothing; a skipped one counts as failed, since nothing here may be skipped.
        found.setdefault(f"{module}.py", []).append(not len([part for part in case if part.tag != "properties"]))
    return code, found, log.read_text(errors="replace")


@pytest.mark.parametrize("name", FORKING)
def test_runs_survive_their_faults(ended: tuple[int, dict[str, list[bool]], str], name: str) -> None:
    _, found, said = ended
    assert found.get(name), said[-6000:]
    assert all(found[name]), said[-6000:]


def test_nothing_else_failed(ended: tuple[int, dict[str, list[bool]], str]) -> None:
    code, found, said = ended
    assert (code, set(found)) == (0, set(FORKING)), said[-6000:]
