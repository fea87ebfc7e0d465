"""The application that verbs register with, and what several of them share."""

import logging
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ratchet import __version__
from ratchet.environment import set_defaults, start_log
from ratchet.errors import ConfigError, RatchetError
from ratchet.redaction import hidden

if TYPE_CHECKING:
    from ratchet.config import RunConfig
    from ratchet.stages.base import Stage
    from ratchet.store.run import Run

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="RL post-training of language models as Kubeflow Pipelines.",
)

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run: a folder or s3://bucket/prefix/run-id.")]
PricesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--price", metavar="DEVICE=PRICE", help="Of an hour, as 'NVIDIA H200=3.5' or cpu=0.05; before trainer.prices."
    ),
]
StepOption = Annotated[int, typer.Option("--step", min=0, help="RL step; 0 is what precedes training.")]


def main() -> None:
    """Run the command line. Errors that Ratchet raises on purpose end with code 2 and their message alone."""
    try:
        app()
    except RatchetError as error:
        typer.echo(f"ratchet: {hidden(str(error))}", err=True)
        sys.exit(2)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is done.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    set_defaults()
    level = logging.INFO if verbose else logging.WARNING
    start_log(level)


def open_run(place: str) -> "Run":
    from ratchet.store import place as places

    return places.open_run(place)


def newest_config(run: "Run") -> "RunConfig":
    from ratchet.stages import measurement

    return measurement.newest_config(run)


def stage_of_a_step(run: "Run", config: "RunConfig", name: str) -> "Stage":
    """Return the stage of that name; ConfigError where a step of this run has none."""
    from ratchet.stages.graph import step_stage, step_stages

    found = step_stage(name, config)
    if found is None:
        known = ", ".join(item.name for item in step_stages(config))
        raise ConfigError(f"a step of run {run.uri} has no stage {name!r}; its stages are {known}")
    return found
