"""From the place of a run, as people write it, to the run."""

import re

from ratchet.errors import ConfigError, NotCommittedError
from ratchet.store.run import Run


def run_at(place: str) -> Run:
    """Return the run at ROOT/RUN-ID, which need not be there; ConfigError for what names none."""
    if re.fullmatch(r"s3:/*[^/]*/*", place):
        raise ConfigError(f"{place}: expected s3://bucket/run-id, or s3://bucket/prefix/run-id")
    root, slash, run_id = place.rstrip("/").rpartition("/")
    return Run(root or slash or ".", run_id)


def open_run(place: str) -> Run:
    """Return the run at ROOT/RUN-ID; NotCommittedError where nobody has claimed one."""
    run = run_at(place)
    if run.newest_epoch() == 0:
        raise NotCommittedError(f"no run at {run.uri}: nobody has claimed it")
    return run
