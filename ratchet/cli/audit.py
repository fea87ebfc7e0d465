"""The verbs of an auditor: audit and sample. Code 1 says that something contradicts the chain."""

import dataclasses
import json
from typing import Annotated

import typer

from ratchet.cli.app import PricesOption, RunArgument, StepOption, app, open_run


@app.command()
def audit(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RUN",
            help="models:/NAME/VERSION or models:/NAME@ALIAS of MLflow; ROOT/champions/NAME[/NUMBER]; an export's "
            "folder; or a run.",
        ),
    ],
    root: Annotated[
        str | None,
        typer.Option(
            "--root", help="Where runs lie: the model is then a champion's NAME[/NUMBER], or a folder's copy."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with every stage of every step.")] = False,
    is_indexing: Annotated[
        bool, typer.Option("--index", help="Write the run's indexes that are missing first, to audit faster.")
    ] = False,
    prices: PricesOption = None,
) -> None:
    """Show what a model came from: who promoted it, export, steps, rollouts, prompts, rows, code, hardware, cost."""
    from ratchet.grains import audit as auditing
    from ratchet.grains.audit.screen import tree_lines
    from ratchet.store.index import rebuild
    from ratchet.tracking.cost import parse_prices

    table = parse_prices(prices or [])
    found = auditing.find_subject(subject, root=root)
    if is_indexing:
        written = rebuild(found.run, found.run.last_step())
        typer.echo(f"{len(written)} indexes written", err=True)
    read = auditing.audit(found, table)
    lines = [json.dumps(dataclasses.asdict(read), sort_keys=True)] if as_json else tree_lines(read)
    typer.echo("\n".join(lines))
    if read.faults:
        raise typer.Exit(1)


@app.command()
def sample(
    run: RunArgument,
    step: StepOption,
    wanted: Annotated[
        str,
        typer.Option("--id", metavar="ID", help="GROUP/INDEX as in 000003/train-0000007/1, GROUP, or PROMPT_ID."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show one completion: prompt, tokens, log-probs, reward and its parts, advantage, and the update that it fed."""
    from ratchet.grains.audit import find_sample
    from ratchet.grains.audit.sample_screen import sample_lines

    found = find_sample(open_run(run), step, wanted)
    lines = [json.dumps(dataclasses.asdict(found), sort_keys=True)] if as_json else sample_lines(found)
    typer.echo("\n".join(lines))
    if found.faults:
        raise typer.Exit(1)
