"""Results of cases as JSON lines, and the table that is made of them."""

import fcntl
import json
import os
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from tests.chaos.case import Case, Outcome

BEGIN, END = "<!-- the table of `make chaos` -->", "<!-- end of the table -->"

Row = dict[str, Any]


def row(case: Case, outcome: Outcome, seconds: float) -> Row:
    """Return what is kept of a case that took `seconds`."""
    return {
        "name": case.name,
        "kind": case.kind,
        "fault": case.fault,
        "grain": case.grain,
        "boundary": case.boundary,
        "params": dict(case.params),
        "survived": outcome.survived,
        "redone_seconds": round(outcome.redone_seconds, 3),
        "redone_stages": outcome.redone_stages,
        "detail": outcome.detail,
        "seconds": round(seconds, 3),
    }


def read(results: Path) -> list[Row]:
    """Return the rows of a file, of each case the last; a line that was cut off is left out."""
    rows: dict[str, Row] = {}
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else []:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        rows[found["name"]] = found
    return list(rows.values())


def append(results: Path, found: Row) -> None:
    """Add a row; a line that was cut off before it stays a line of its own."""
    with results.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0, os.SEEK_END)
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(found, sort_keys=True).encode() + b"\n")


def table(rows: list[Row]) -> str:
    """Return a Markdown table: kind x fault x grain, and their sum."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for found in rows:
        groups[found["kind"], found["fault"], found["grain"]].append(found)
    lines = [
        "| kind | fault | grain | cases | survived | redone, median | redone, longest | stages redone, most |",
        "|---|---|---|---|---|---|---|---|",
        *(_line(key, group) for key, group in sorted(groups.items())),
        _line(("**all**", "", ""), rows),
    ]
    return "\n".join(lines)


def write(page: Path, rows: list[Row]) -> None:
    """Put the table between the page's markers."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page}: expected the lines {BEGIN!r} and {END!r}, between which the table goes")
    page.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}", encoding="utf-8")


def _line(key: tuple[str, ...], rows: list[Row]) -> str:
    seconds = [found["redone_seconds"] for found in rows] or [0.0]
    survived = sum(found["survived"] for found in rows)
    stages = max((found["redone_stages"] for found in rows), default=0)
    cells = [*key, len(rows), survived, f"{median(seconds):.2f} s", f"{max(seconds):.2f} s", stages]
    return f"| {' | '.join(map(str, cells))} |"
