"""The verb report: a run as a page to look at."""

import re
from pathlib import Path
from typing import Annotated

import typer

from ratchet.cli.app import PricesOption, RunArgument, app, open_run
from ratchet.errors import ConfigError


@app.command()
def report(
    run: RunArgument,
    to: Annotated[Path, typer.Option("--to", metavar="FILE.html", help="File to write.")],
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="FIRST-LAST", help="Only these steps, as 51-100; all of them.")
    ] = None,
    prices: PricesOption = None,
) -> None:
    """Write a run, or some of its steps, as one HTML page that needs no network."""
    from ratchet.tracking.cost import parse_prices
    from ratchet.tracking.report import html, read_report

    first, last = _steps(steps) if steps is not None else (1, None)
    table = parse_prices(prices or [])
    page = html(read_report(open_run(run), first, last, table))
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(page, encoding="utf-8")
    typer.echo(f"{to}: {len(page.encode()) / 2**20:.1f} MiB")


def _steps(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"--steps: expected FIRST-LAST, two steps from 1 on such as 51-100; found {text!r}")
    return int(match[1]), int(match[2])
