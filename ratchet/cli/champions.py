"""The verbs of promotion: promote, rollback, champions."""

import dataclasses
import json
from typing import Annotated

import typer

from ratchet.cli.app import RunArgument, app, newest_config, open_run
from ratchet.errors import ConfigError, StoreError

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="What the policies serve under: promotion.name.")]
RootOption = Annotated[str, typer.Option("--root", help="Where runs and their champions lie.")]


@app.command()
def promote(
    run: RunArgument,
    name: Annotated[str | None, typer.Option("--name", help="Champion's name; promotion.name of the run.")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Decide anew about a policy that was decided on before.")
    ] = False,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="RUN",
            help="Run that started from the champion's export: its step 0 is the champion's accuracy.",
        ),
    ] = None,
) -> None:
    """Decide whether a run's last policy becomes the champion, and record the decision with its numbers."""
    from ratchet.grains import promotion
    from ratchet.tracking.show_champions import decision_line

    opened = open_run(run)
    config = newest_config(opened)
    if name is not None:
        update = {"promotion": config.promotion.model_copy(update={"name": name})}
        config = config.model_copy(update=update)
    other = open_run(baseline) if baseline is not None else None
    decision = promotion.promote(opened, config, again=again, baseline=other)
    if decision is None:
        raise ConfigError(f"run {opened.uri} has no promotion.name; give the champion's name by --name")
    typer.echo(f"{decision.name} {decision_line(decision)}")
    for reason in decision.reasons:
        typer.echo(f"  {reason}")


@app.command()
def rollback(
    name: NameArgument,
    root: RootOption,
    to: Annotated[
        int | None, typer.Option("--to", min=1, help="Promoted decision that serves again; the one before by default.")
    ] = None,
    reason: Annotated[str, typer.Option("--reason", help="Why, for the record.")] = "",
) -> None:
    """Make an earlier champion serve again; its export is checked first."""
    from ratchet.grains import promotion
    from ratchet.tracking.show_champions import decision_line

    decision = promotion.rollback(root, name, to, reason=reason)
    typer.echo(f"{name} {decision_line(decision)}")
    typer.echo(f"  {decision.export.uri}")


@app.command()
def champions(
    name: NameArgument,
    root: RootOption,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a decision.")] = False,
    sync: Annotated[bool, typer.Option("--sync", help="Bring MLflow's registered model up to date, too.")] = False,
) -> None:
    """Show every decision on what serves under a name, oldest first; an asterisk marks the champion."""
    from ratchet.store.champions import decisions
    from ratchet.tracking.show_champions import history_lines

    history = decisions(root, name)
    if not history and not as_json:
        typer.echo(f"nothing was decided about {name} below {root}", err=True)
    if as_json:
        for decision in history:
            typer.echo(json.dumps(dataclasses.asdict(decision), sort_keys=True))
    else:
        for line in history_lines(history):
            typer.echo(line)
    if sync:
        from ratchet.tracking.registry import sync as mirror

        if not mirror(root, name):
            raise StoreError(f"MLflow could not be brought up to date with {name}")
        typer.echo("MLflow is up to date", err=True)
