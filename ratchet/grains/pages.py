"""Pages of a run for people: where a task or a local run leaves them.

Trap: by then the work is done and committed. A page that cannot be made is a line in the log, never a failure.
"""

import logging
import time
from collections.abc import Iterable
from pathlib import Path

from ratchet.grains import outputs
from ratchet.grains.outputs import Output
from ratchet.grains.session import Session
from ratchet.store.run import Run
from ratchet.tracking.report_pages import RUN_PAGE, segment_page

logger = logging.getLogger(__name__)


def show_segment(session: Session, start: int, stop: int, page: Output | None) -> None:
    """Leave the page of the steps from `start` up to and without `stop` with the UI and with the trackers."""
    _show(session, start, stop - 1, segment_page(start, stop - 1), page, None)


def show_run(session: Session, *, page: Output | None = None, report: Output | None = None) -> None:
    """Leave the page of the whole run with the UI and with the trackers; `report` gets a short form of it."""
    _show(session, 1, None, RUN_PAGE, page, report)


def _show(
    session: Session, first: int, last: int | None, name: str, page: Output | None, report: Output | None
) -> None:
    if page is None and report is None and not session.trackers.keeps_pages:
        return
    started = time.monotonic()
    try:
        from ratchet.tracking import report as pages

        # What is committed, not what this process holds.
        found = pages.read_report(Run(session.store_run.root, session.store_run.run_id), first, last)
        outputs.write_report(report, pages.markdown(found))
        text = pages.html(found)
        outputs.write_report(page, [text])
        session.trackers.keep_pages(last, {name: text})
    except Exception:
        logger.warning("no page of run %s could be made", session.store_run.uri, exc_info=True)
        _say_so(page, report)
        return
    logger.info("made %s in %.1f s, %d bytes", name, time.monotonic() - started, len(text))


def _say_so(*wanted: Output | None) -> None:
    """KFP shows what an output holds: a sentence is better than nothing."""
    for output in _empty(wanted):
        outputs.write_report(
            output, ["No page could be made; the log says why. Try: ratchet report RUN --to FILE.html"]
        )


def _empty(wanted: Iterable[Output | None]) -> list[Output]:
    return [output for output in wanted if output is not None and not Path(output.path).exists()]
