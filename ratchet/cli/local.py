"""The verbs that work on a run here: train, one stage, data, rewards, evaluation, export, a look at it."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from ratchet.cli.app import PricesOption, RunArgument, StepOption, app, newest_config, open_run, stage_of_a_step
from ratchet.errors import ConfigError

if TYPE_CHECKING:
    from ratchet.config import RunConfig

Mode = Literal["default", "strict", "flexible"]


@app.command()
def train(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config overrides.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML config under verl's key names.")] = None,
    root: Annotated[str | None, typer.Option("--root", help="Where runs lie; trainer.default_local_dir.")] = None,
    run_id: Annotated[str | None, typer.Option("--run-id", help="Name of the run; trainer.experiment_name.")] = None,
    num_gpus: Annotated[
        int | None, typer.Option("--num_gpus", "--num-gpus", min=1, help="trainer.n_gpus_per_node.")
    ] = None,
) -> None:
    """Train here, in this process. The same run id again resumes the run."""
    from ratchet.config import load_config
    from ratchet.grains import loop
    from ratchet.grains.exits import at_sigterm
    from ratchet.grains.session import open_session, place_of, submit

    gpus = [] if num_gpus is None else [f"trainer.num_gpus={num_gpus}"]
    parsed = load_config(config, [*(overrides or []), *gpus])
    with at_sigterm(_terminated), _progress(parsed) as (listener, echo):
        run = submit(*place_of(parsed, root, run_id), parsed)
        with open_session(run, parsed, listener, echo=echo) as session:
            loop.train(session)
    typer.echo(f"run: {run.uri}")


@app.command()
def stage(
    name: Annotated[str, typer.Argument(help="rollout, reward, advantage, policy_update, ...")],
    run: RunArgument,
    step: StepOption,
    debug: Annotated[bool, typer.Option("--debug", help="Stop in the debugger before the stage computes.")] = False,
) -> None:
    """Run one stage of one step. A committed stage is computed again and compared; nothing is published then."""
    from ratchet.grains.entry import replay_stage, take_over

    opened = open_run(run)
    config = newest_config(opened)
    found = stage_of_a_step(opened, config, name)
    if debug:
        breakpoint()
    if opened.manifest(name, step) is None:
        take_over(found, opened, config, step)
        typer.echo(f"committed {name} of step {step}")
        return
    for role, (old, new) in replay_stage(found, opened, config, step).items():
        typer.echo(f"{role}: {'equal' if old == new else 'different'} (committed {old[:12]}, computed {new[:12]})")


@app.command()
def preprocess(
    source: Annotated[str, typer.Option("--source", help="GSM8K JSONL, Parquet, a folder, s3://..., or a dataset id.")],
    local_dir: Annotated[str, typer.Option("--local_dir", "--local-dir", help="Folder or s3:// place to write to.")],
) -> None:
    """Write training data as Parquet in verl's schema."""
    from ratchet.data.sources import preprocess as convert

    for name, rows in convert(source, local_dir).items():
        typer.echo(f"{name}: {rows} rows")


@app.command()
def score(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="Lines of {completion, ground_truth, ...}.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config overrides.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML config that says what grades.")] = None,
    data_source: Annotated[
        str, typer.Option("--data-source", help="Names the rule, in place of the lines' data_source.")
    ] = "",
    mode: Annotated[
        Mode | None, typer.Option("--mode", help="How an answer is read; strict and flexible are verl's.")
    ] = None,
) -> None:
    """Grade a file by any kind of reward: one JSON line for each of its lines, in order."""
    from ratchet.config import load_config
    from ratchet.rewards.score_file import score_lines

    modes = [] if mode is None else [f"reward_model.gsm8k_mode={mode}"]
    parsed = load_config(config, [*(overrides or []), *modes], is_quiet=True)
    for line in score_lines(file, parsed, data_source=data_source):
        typer.echo(json.dumps(line, ensure_ascii=False))


@app.command()
def evaluate(run: RunArgument, step: StepOption) -> None:
    """Measure on what is held out the policy that a step published. Takes the run over if that is not done yet."""
    from ratchet.grains.entry import take_over
    from ratchet.stages.graph import evaluation

    opened = open_run(run)
    manifest = opened.manifest("evaluate", step)
    if manifest is None:
        config = newest_config(opened)
        manifest = take_over(evaluation(config), opened, config, step)
    for name, value in sorted(manifest.provenance.metrics.items()):
        typer.echo(f"{name}: {value:.6g}")


@app.command()
def export(
    run: RunArgument,
    step: StepOption,
    to: Annotated[Path, typer.Option("--to", help="Folder to write; must not exist.")],
) -> None:
    """Write a step's policy as a Hugging Face folder, proven to reload. Takes the run over if that is not done yet."""
    from ratchet.grains.entry import take_over
    from ratchet.stages.checkpoint_export import CheckpointExport
    from ratchet.store.artifacts import read_folder

    if to.exists():
        raise ConfigError(f"--to: {to} exists already; expected a folder to be made")
    opened = open_run(run)
    manifest = opened.manifest(CheckpointExport.name, step)
    if manifest is None:
        manifest = take_over(CheckpointExport(), opened, newest_config(opened), step)
    # Written beside and renamed, so that an interrupted export leaves nothing that looks like one.
    partial = to.with_name(f"{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    read_folder(opened.store, manifest.output("export"), partial)
    partial.rename(to)
    typer.echo(f"{to}: policy of step {step}")


@app.command()
def show(
    run: RunArgument,
    step: Annotated[int | None, typer.Option("--step", help="Show this step's best and worst completion.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a step, and a last one: the cost.")] = False,
    prices: PricesOption = None,
) -> None:
    """Show a run: its steps with their metrics and what it cost, or one step's completions with their rewards."""
    from ratchet.tracking.cost import parse_prices
    from ratchet.tracking.show import completion_lines, run_lines

    table, opened = parse_prices(prices or []), open_run(run)
    lines = run_lines(opened, table, as_json=as_json) if step is None else completion_lines(opened, step)
    for line in lines:
        typer.echo(line)


def _terminated() -> NoReturn:
    """End as at Ctrl-C, by an exception: commits under way are given their time (`Session.behind`)."""
    raise SystemExit(128 + signal.SIGTERM)


@contextmanager
def _progress(config: "RunConfig") -> Iterator[tuple[Callable[[str, bool], None], Callable[[str], None]]]:
    """Yield a stage listener and a line printer: a progress bar on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield (lambda place, is_committed: None), typer.echo
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ratchet.store.layout import parse_step_folder
    from ratchet.store.run import POLICY_UPDATE

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} steps"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=config.trainer.total_training_steps)

        def listen(place: str, is_committed: bool) -> None:
            folder, _, stage_name = place.partition("/")
            step = parse_step_folder(folder)
            # What is committed may lie behind what runs.
            if not is_committed:
                bar.update(task, description=place)
            elif stage_name == POLICY_UPDATE:
                bar.update(task, completed=step)

        yield listen, lambda line: bar.console.print(line, highlight=False, soft_wrap=True)
