"""Where pages go, and that a page is never a reason to fail."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ratchet.grains import pages
from ratchet.grains.session import Session
from ratchet.store.run import Run
from ratchet.tracking import report
from tests.ratchet.grains.test_outputs import Artifact
from tests.ratchet.tracking.report_runs import learning_run


class Kept:
    """Trackers that keep pages."""

    def __init__(self, *, keeps_pages: bool = True) -> None:
        self.keeps_pages = keeps_pages
        self.pages: dict[str, str] = {}
        self.upto: list[int | None] = []

    def keep_pages(self, last: int | None, made: Mapping[str, str]) -> None:
        self.upto.append(last)
        self.pages |= made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return learning_run(str(tmp_path_factory.mktemp("runs")), 4)


def _session(run: Run, trackers: Kept) -> Session:
    session: Any = SimpleNamespace(store_run=run, trackers=trackers)
    return session  # type: ignore[no-any-return]


def test_the_page_goes_to_the_ui_and_to_the_trackers(run: Run, tmp_path: Path) -> None:
    kept, page, short = Kept(), Artifact(tmp_path / "page"), Artifact(tmp_path / "short")
    pages.show_run(_session(run, kept), page=page, report=short)
    pages.show_segment(_session(run, kept), 2, 4, None)
    assert list(kept.pages) == ["run.html", "steps-000002-000003.html"]
    assert kept.upto == [None, 3]
    assert Path(page.path).read_text().rstrip() == kept.pages["run.html"].rstrip()
    assert "<title>gsm8k-grpo, steps 2 to 3</title>" in kept.pages["steps-000002-000003.html"]
    assert Path(short.path).read_text().startswith("### gsm8k-grpo\n")


def test_a_page_that_nobody_gets_is_not_made(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "read_report", lambda *_: pytest.fail("it was read"))
    pages.show_run(_session(run, Kept(keeps_pages=False)))


def test_a_page_that_cannot_be_made_is_a_line_in_the_log(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> str:
        raise KeyError("of a library that changed")

    monkeypatch.setattr(report, "html", fail)
    page, short, kept = Artifact(tmp_path / "page"), Artifact(tmp_path / "short"), Kept()
    pages.show_run(_session(run, kept), page=page, report=short)
    assert "no page of run" in caplog.text
    assert (
        Path(page.path).read_text()
        == "No page could be made; the log says why. Try: ratchet report RUN --to FILE.html\n"
    )
    assert Path(short.path).read_text().startswith("### gsm8k-grpo\n"), "what was written before stays"
    assert kept.pages == {}
