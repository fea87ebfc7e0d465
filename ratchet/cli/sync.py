"""The verb sync: MLflow as the run's chain is."""

from typing import Annotated

import typer

from ratchet.cli.app import RunArgument, app, newest_config, open_run


@app.command()
def sync(
    run: RunArgument,
    tracking_uri: Annotated[
        str | None, typer.Option("--tracking-uri", metavar="URI", help="MLflow's address; MLFLOW_TRACKING_URI if not.")
    ] = None,
) -> None:
    """Bring to MLflow what it lacks of a run: metrics, tables, pages. Whatever is there stays as it is."""
    from ratchet.grains import loop, views
    from ratchet.tracking.mlflow_runs import without_passwords

    opened = open_run(run)
    config = newest_config(opened)
    done = views.sync(opened, config, is_finished=loop.is_finished(opened, config), tracking_uri=tracking_uri)
    if done is None:
        # The warning before it says why.
        raise typer.Exit(1)
    place = f"run {done.run_id} of MLflow at {without_passwords(done.tracking_uri)}"
    typer.echo(f"{place}: {done.num_stages} stages brought, the others were there")
    if done.missing:
        typer.echo(f"its artifact storage cannot be written from here ({done.missing}): files are missing", err=True)
        raise typer.Exit(1)
