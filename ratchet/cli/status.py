"""The verbs that look at a run on a cluster: status, logs."""

import dataclasses
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ratchet.cli.app import RunArgument, app
from ratchet.cli.connection import with_endpoint
from ratchet.errors import ClusterError, ConfigError, NotCommittedError, RatchetError, StoreError, StoreUnavailableError

if TYPE_CHECKING:
    from ratchet.cluster.kube import Cluster
    from ratchet.grains.status import RunStatus
    from ratchet.store.run import Run
    from ratchet.store.status import TaskStatus

_LABELS = {"failed": "red", "lost": "red", "refused": "red", "waiting": "yellow", "terminated": "yellow"}
_LABELS |= {"stopped": "yellow", "unknown": "yellow", "running": "cyan", "starting": "cyan"}
_LABELS |= {"finished": "green", "skipped": "green"}
"""State -> its colour."""


@app.command()
@with_endpoint
def status(
    run: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Look again until the run ends or stands still.")
    ] = False,
    every: Annotated[float, typer.Option("--every", min=1.0, help="Seconds between two looks.")] = 10.0,
    *,
    connection: dict[str, Any],
) -> None:
    """Show how a run is on one screen: what is committed, what runs, why it failed or waits, what to do next."""
    from ratchet.grains.status import FINAL, Sources, collect

    opened = _run_at(run)
    sources = Sources(
        open_cluster=lambda: _cluster(connection["namespace"], connection["kube_context"]),
        pipeline_run=lambda submission_id: _kubeflow(connection).kfp_run(submission_id, **connection),
        active_runs=lambda: _kubeflow(connection).active_runs(opened.uri, **connection),
    )
    has_read = False
    while True:
        try:
            found = collect(opened, sources=sources)
        except NotCommittedError:
            raise
        except (StoreError, ClusterError) as error:
            # What never could be read will not be; what could may be again.
            if not watch or not (has_read or isinstance(error, StoreUnavailableError | ClusterError)):
                raise
            typer.echo(f"ratchet: this look failed, and the next one is in {every:g} s: {error}", err=True)
        else:
            has_read = True
            _show(found, as_json, clear=watch and sys.stdout.isatty())
            if not watch or found.state in FINAL:
                return
        time.sleep(every)


@app.command()
@with_endpoint
def logs(
    run: RunArgument,
    task: Annotated[str | None, typer.Option("--task", help="Component; the one that failed or runs.")] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="RL step of the task.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the pod ends.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", min=0, help="Only the last lines.")] = None,
    container: Annotated[str, typer.Option("--container", help="Container of the pod.")] = "main",
    submission: Annotated[
        str | None, typer.Option("--submission", help="Pipeline run; the newest that claimed it.")
    ] = None,
    *,
    connection: dict[str, Any],
) -> None:
    """Print the log of a task of the run's newest submission; without its pod, what the task said last."""
    from ratchet.grains.status.log import find_log
    from ratchet.grains.status.tasks import read_statuses, view_pods

    opened = _run_at(run)
    statuses: list[TaskStatus] = []
    try:
        submission_id = submission or _newest_submission(opened)
        statuses, _ = read_statuses(opened.store, submission_id)
    except StoreError as error:
        submission_id = submission or _active_submission(opened, connection, error)
        typer.echo(f"what tasks said of themselves cannot be read from here: {error}", err=True)
    cluster, pods, why_not = None, [], ""
    try:
        cluster = _cluster(connection["namespace"], connection["kube_context"])
        pods = view_pods(cluster, submission_id, with_nodes=False)
    except RatchetError as error:
        if not statuses:
            raise
        why_not = f"pods cannot be asked: {error}"
    source = find_log(statuses, pods, task=task, step=step)
    if cluster is not None and source.pod is not None and source.has_log:
        for line in cluster.logs(source.pod.name, container=container, tail=tail, follow=follow):
            typer.echo(line)
        return
    ui = os.environ.get("KF_PIPELINES_UI_ENDPOINT") or os.environ.get("KF_PIPELINES_ENDPOINT") or ""
    page = f"{ui.rstrip('/')}/#/runs/details/{submission_id}" if ui else ""
    for line in [*([why_not] if why_not else []), *source.instead(submission_id, page, is_asked=not why_not)]:
        typer.echo(line, err=True)
    raise typer.Exit(1)


def _run_at(place: str) -> "Run":
    """Open a run that may never have been claimed: its first preflight may have failed."""
    from ratchet.store.place import run_at

    return run_at(place)


def _cluster(namespace: str | None, context: str | None) -> "Cluster":
    from ratchet.cluster.kube import Cluster

    return Cluster.open(namespace=namespace or os.environ.get("KF_PIPELINES_NAMESPACE"), context=context)


def _kubeflow(connection: dict[str, Any]) -> Any:
    """Return what asks Kubeflow; ConfigError where nothing says where that is, as its client takes a second to load."""
    kubeconfig = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    has_kubeconfig = any(Path(place).is_file() for place in kubeconfig.split(os.pathsep) if place)
    places = (connection["host"], os.environ.get("KF_PIPELINES_ENDPOINT"), os.environ.get("KUBERNETES_SERVICE_HOST"))
    if not any(places) and not has_kubeconfig:
        raise ConfigError("no endpoint is configured (--endpoint, KF_PIPELINES_ENDPOINT)")
    from ratchet.flow.runners import find_runner

    return find_runner("kubeflow")


def _newest_submission(run: "Run") -> str:
    """Return the pipeline run of the newest claim; of a run that nobody has claimed, that of the newest preflight."""
    from ratchet.grains.status.tasks import read_preflights

    newest = run.newest_submission()
    if newest is not None:
        if newest.get("submission_id"):
            return str(newest["submission_id"])
        raise ConfigError(f"run {run.uri} was submitted outside a pipeline last: its log is where that process writes")
    told = read_preflights(run.store, run.store.list_folders("status"))
    if not told:
        raise ConfigError(f"nothing is known of a run at {run.uri}")
    return told[-1].submission_id


def _active_submission(run: "Run", connection: dict[str, Any], error: StoreError) -> str:
    """Return the pipeline run that works on the run now, as Kubeflow says; `error` is raised where none is known."""
    try:
        active = _kubeflow(connection).active_runs(run.uri, **connection)
    except RatchetError as asked:
        raise StoreError(f"{error}; nor was Kubeflow asked: {asked}") from error
    if not active:
        raise error
    return str(active[0].id)


def _show(found: "RunStatus", as_json: bool, *, clear: bool) -> None:
    from ratchet.grains.status.advice import next_step
    from ratchet.grains.status.screen import LABEL, screen_lines

    if as_json:
        typer.echo(json.dumps({**dataclasses.asdict(found), "next": next_step(found)}, sort_keys=True))
        return
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    lines = screen_lines(found, shutil.get_terminal_size((100, 24)).columns if is_terminal else 100)
    if not is_terminal:
        typer.echo("\n".join(lines))
        return
    state = found.state.upper()
    coloured = lines[0].removesuffix(state) + typer.style(state, fg=_LABELS[found.state], bold=True)
    body = [typer.style(line[:LABEL], bold=True) + line[LABEL:] for line in lines[1:]]
    typer.echo(("\x1b[H\x1b[2J" if clear else "") + "\n".join([coloured, *body]))
