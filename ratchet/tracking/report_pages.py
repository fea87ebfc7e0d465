"""Which pages a run has, where trackers and the UI keep them: one for each segment that a pipeline ran, one of all.

They follow from the chain: every step says under which claim it was committed, and every claim how long its segments
are. So a page that could not be kept when its segment ended is made later, by whoever comes next.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ratchet.errors import NotCommittedError
from ratchet.store.run import POLICY_UPDATE, Run

FOLDER = "reports"
"""Of pages among a tracker's files."""
RUN_PAGE = "run.html"


def segment_page(first: int, last: int) -> str:
    """Return the name of the page of a segment."""
    return f"steps-{first:06d}-{last:06d}.html"


def segments(run: Run, after: int, upto: int) -> Iterator[tuple[int, int]]:
    """Yield first and last step of each segment that pipelines ran of the steps from `after` + 1 to `upto`.

    `after` ends a segment, and so does `upto`. A segment that another claim went on with ends where that one began.
    Steps that no pipeline's task of a segment made have no page of their own.
    """
    known: dict[int, int | None] = {}
    first: int | None = None
    claim = length = 0
    for step in range(after + 1, upto + 1):
        manifest = run.manifest(POLICY_UPDATE, step)
        if manifest is None:
            break
        epoch = manifest.provenance.epoch
        if first is not None and (epoch != claim or step == first + length):
            yield first, step - 1
            first = None
        if first is None:
            if epoch not in known:
                known[epoch] = _length(run, epoch)
            if (found := known[epoch]) is not None:
                first, claim, length = step, epoch, found
    else:
        step = upto + 1
    if first is not None:
        yield first, step - 1


def page(run: Run, first: int = 1, last: int | None = None) -> str:
    """Return the page of these steps, by default of the whole run."""
    from ratchet.tracking.report import html, read_report

    return html(read_report(Run(run.root, run.run_id), first, last))


def _length(run: Run, epoch: int) -> int | None:
    """Steps of a segment under this claim; None where it ran none in a pipeline."""
    try:
        submission: Mapping[str, Any] = run.submission(epoch)
    except NotCommittedError:
        return None
    is_pipeline = bool(submission.get("submission_id")) and submission.get("grain") == "segment"
    length = ((submission.get("config") or {}).get("trainer") or {}).get("steps_per_segment")
    return int(length) if is_pipeline and length else None
