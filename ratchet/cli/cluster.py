"""The verbs of a Kubeflow Pipelines endpoint: compile, upload, submit, schedule, schedules, unschedule, terminate."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ratchet.cli.app import app
from ratchet.cli.connection import with_endpoint

Pipeline = Annotated[
    str,
    typer.Argument(metavar="PIPELINE", help="grpo, ppo, nightly, ... (ratchet compile --help), or a compiled file."),
]
Pairs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME=VALUE]...",
        help="Parameters of the pipeline, as in its form, and overrides of the config (section.key=value).",
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="FILE", help="The run's config: a YAML file here, or its s3:// place for the pods."
    ),
]
Root = Annotated[
    str | None, typer.Option("--root", envvar="RATCHET_ROOT", metavar="URI", help="Where runs lie: s3://bucket/prefix.")
]
RunId = Annotated[
    str | None,
    typer.Option("--run-id", metavar="NAME", help="The run's name; trainer.experiment_name where the config has it."),
]
Experiment = Annotated[
    str | None,
    typer.Option(
        "--experiment",
        envvar="KF_PIPELINES_DEFAULT_EXPERIMENT_NAME",
        metavar="NAME",
        help="Kubeflow's experiment; trainer.project_name of the config.",
    ),
]
ServiceAccount = Annotated[
    str | None,
    typer.Option("--service-account", metavar="NAME", help="Kubernetes service account of the pods; the server's own."),
]
PipelineRoot = Annotated[
    str | None,
    typer.Option("--pipeline-root", metavar="URI", help="Where Kubeflow keeps the small files of its pages."),
]
Version = Annotated[
    str | None,
    typer.Option("--version", metavar="NAME", help="Name of the version; the release and a digest of the YAML."),
]
Force = Annotated[
    bool, typer.Option("--force", help="Start although a pipeline run works on the run: it loses the run.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


@app.command("compile")
def compile_pipeline(
    pipeline: Annotated[
        str,
        typer.Argument(
            metavar="PIPELINE",
            help="grpo, ppo, sft, dpo, reward_model, hybrid, nightly, grpo_steps, grpo_stages, ppo_stages, dpo_stages.",
        ),
    ],
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="YAML file to write.")],
) -> None:
    """Write a pipeline's YAML, with this installation's images (RATCHET_IMAGE or RATCHET_IMAGE_REGISTRY)."""
    package = _runner().compile_pipeline(pipeline, to)
    typer.echo(f"{to}: pipeline {package.name}, version {package.version}")


@app.command()
@with_endpoint
def upload(pipeline: Pipeline, version: Version = None, as_json: Json = False, *, connection: dict[str, Any]) -> None:
    """Upload a pipeline, or a new version of it. The same content again is recognised, and nothing is uploaded."""
    done = _runner().upload(pipeline, version=version, **connection)
    if as_json:
        return _echo_json(done)
    said = "uploaded" if done.is_new else "is there already: nothing uploaded"
    _echo(f"pipeline {done.pipeline}, version {done.version}: {said}", done.url)


@app.command()
@with_endpoint
def submit(
    pipeline: Pipeline,
    pairs: Pairs = None,
    config: Config = None,
    root: Root = None,
    run_id: RunId = None,
    experiment: Experiment = None,
    service_account: ServiceAccount = None,
    pipeline_root: PipelineRoot = None,
    force: Force = False,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until it has ended; code 1 unless it succeeded.")] = False,
    as_json: Json = False,
    *,
    connection: dict[str, Any],
) -> None:
    """Start a run as a pipeline. The same run id again resumes it.

    Nothing is started while a pipeline run works on the run, or when it is complete.
    """
    # Where object storage cannot be reached from here, that must be found out soon.
    os.environ.setdefault("AWS_MAX_ATTEMPTS", "3")
    runner = _runner()
    done = runner.submit_pipeline(
        pipeline,
        pairs or [],
        config=config,
        root=root,
        run_id=run_id,
        experiment=experiment,
        service_account=service_account,
        pipeline_root=pipeline_root,
        force=force,
        **connection,
    )
    if as_json:
        _echo_json(done)
    elif done.what == "complete":
        typer.echo(f"run {done.run} is complete: nothing started")
    elif done.what == "active":
        _echo(
            f"run {done.run}: the pipeline run {done.pipeline_run_id} works on it ({done.state}): nothing started; "
            "--force starts another, which takes the run over",
            done.url,
        )
    else:
        _echo(f"run {done.run}: started as pipeline run {done.pipeline_run_id}", done.url)
    if wait and done.pipeline_run_id:
        ended = runner.wait(
            done.pipeline_run_id,
            listener=lambda one: typer.echo(f"pipeline run {one.id}: {one.state}", err=True),
            **connection,
        )
        if ended.state != "SUCCEEDED":
            raise typer.Exit(1)


@app.command()
@with_endpoint
def schedule(
    pipeline: Pipeline,
    pairs: Pairs = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="The schedule's name; the pipeline's, or the kept run's."),
    ] = None,
    cron: Annotated[
        str | None,
        typer.Option(
            "--cron",
            metavar="EXPRESSION",
            help="When: SECOND MINUTE HOUR DAY MONTH WEEKDAY, in UTC unless the server says otherwise: '0 0 2 * * *'. "
            "Not with --keep-alive.",
        ),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option("--every", metavar="MINUTES", min=1, help="Or in what intervals; 10 with --keep-alive."),
    ] = None,
    keep_alive: Annotated[
        bool,
        typer.Option("--keep-alive", help="Submit one run now, and again whenever it has stopped before its end."),
    ] = False,
    start: Annotated[
        str | None, typer.Option("--start", metavar="TIME", help="Not before: 2026-01-01T00:00:00Z.")
    ] = None,
    end: Annotated[str | None, typer.Option("--end", metavar="TIME", help="Not after.")] = None,
    disabled: Annotated[bool, typer.Option("--disable", help="Make it, but let it start nothing yet.")] = False,
    config: Config = None,
    root: Root = None,
    run_id: Annotated[
        str | None,
        typer.Option(
            "--run-id",
            metavar="NAME",
            help="Name of each run; {date} and {time} are those of its start: nightly-{date}. Without one, each run "
            "has the id of its pipeline run.",
        ),
    ] = None,
    experiment: Experiment = None,
    service_account: ServiceAccount = None,
    pipeline_root: PipelineRoot = None,
    force: Force = False,
    as_json: Json = False,
    *,
    connection: dict[str, Any],
) -> None:
    """Start runs again and again, one at a time, and none that was missed.

    A version of the pipeline with these parameters is uploaded, and what it starts is that version. The same again
    changes nothing; the same name with other content replaces the schedule.
    """
    done = _runner().schedule(
        pipeline,
        pairs or [],
        name=name,
        cron=cron,
        every=10 if keep_alive and every is None and cron is None else every,
        keep_alive=keep_alive,
        start=start,
        end=end,
        disabled=disabled,
        config=config,
        root=root,
        run_id=run_id,
        experiment=experiment,
        service_account=service_account,
        pipeline_root=pipeline_root,
        force=force,
        **connection,
    )
    if as_json:
        return _echo_json(done)
    said = f"schedule {done.schedule.name}: {done.what}"
    _echo(f"{said}; when the run is complete: ratchet unschedule {done.schedule.name}" if keep_alive else said)
    typer.echo(_line(done.schedule))


@app.command()
@with_endpoint
def schedules(as_json: Json = False, *, connection: dict[str, Any]) -> None:
    """List the schedules: name, whether it starts runs, when, the runs' id, its own id."""
    for one in _runner().schedules(**connection):
        _echo_json(one) if as_json else typer.echo(_line(one))


@app.command()
@with_endpoint
def unschedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name or id.")],
    disable: Annotated[bool, typer.Option("--disable", help="Keep it, but let it start nothing.")] = False,
    *,
    connection: dict[str, Any],
) -> None:
    """Delete a schedule. The run that it has started goes on to its end (ratchet terminate ends it)."""
    for one in _runner().unschedule(name, disable=disable, **connection):
        typer.echo(f"schedule {one.name} ({one.id}): {'disabled' if disable else 'deleted'}")


@app.command()
@with_endpoint
def terminate(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The run: ROOT/RUN-ID or its run id; or a pipeline run's id.")
    ],
    delete: Annotated[
        bool,
        typer.Option("--delete", help="Delete the pipeline run from Kubeflow, where it does not end; results stay."),
    ] = False,
    *,
    connection: dict[str, Any],
) -> None:
    """End what works on a run. What is committed stays, and submitting the run again goes on from there."""
    found = _runner().terminate(run, delete=delete, **connection)
    if not found:
        typer.echo(f"run {run}: no pipeline run works on it")
    for one in found:
        typer.echo(f"pipeline run {one.id} ({one.state}): {'deleted' if delete else _ENDING}")
        if one.schedule:
            typer.echo(f"the schedule {one.schedule} will start it again: ratchet unschedule {one.schedule}")


_ENDING = (
    "its pod is told to stop within some 10 s; every iteration of its loop that has not begun takes some 10 s more, "
    "and it ends as FAILED. If it still says CANCELING after 10 minutes: ratchet terminate --delete"
)


def _runner() -> Any:
    from ratchet.flow.runners import find_runner

    return find_runner("kubeflow")


def _echo(*lines: str) -> None:
    for line in filter(None, lines):
        typer.echo(line)


def _line(one: Any) -> str:
    state = "on" if one.is_enabled else "off"
    return f"{one.name}  {state}  {one.when}  {one.run_id or '(own ids)'}  {one.id}"


def _echo_json(record: Any) -> None:
    typer.echo(json.dumps(dataclasses.asdict(record), ensure_ascii=False, default=str))
