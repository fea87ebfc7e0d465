"""The verbs that prove what is stored and tidy it: verify, gc, replay. Code 1 says that a proof failed."""

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from ratchet.cli.app import RunArgument, StepOption, app, newest_config, open_run, stage_of_a_step

if TYPE_CHECKING:
    from ratchet.store.chain import Leftover

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]


@app.command()
def verify(
    run: RunArgument,
    fast: Annotated[
        bool, typer.Option("--fast", help="Manifests alone, and that every file is there with its size.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Prove that a run is what was committed, from the promoted model to single completions. Code 1: it is not."""
    from ratchet.store import verification

    found = verification.verify(open_run(run), fast=fast)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), sort_keys=True))
    else:
        for fault in found.faults:
            typer.echo(f"fault: {fault}")
        for leftover in found.leftovers:
            typer.echo(f"left over: {_described(leftover)}")
        done = "listed" if found.is_fast else "hashed"
        typer.echo(
            f"{found.run}: {len(found.faults)} faults | {found.manifests} manifests, {found.files} files of "
            f"{found.bytes} bytes {done}, {found.decisions} decisions on champions | "
            f"{found.deleted_states} trainer states deleted by retention"
        )
    if found.faults:
        raise typer.Exit(1)


@app.command()
def gc(
    run: RunArgument,
    is_meant: Annotated[bool, typer.Option("--delete", help="Delete; without it, they are only listed.")] = False,
    older_than: Annotated[
        float | None,
        typer.Option(
            "--older-than",
            min=0.0,
            metavar="HOURS",
            help="How long an attempt must have been quiet; 24, and 1 for those of earlier submissions.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List, or delete, what attempts left behind that committed nothing. What a manifest names is never touched."""
    from ratchet.store import leftovers

    opened = open_run(run)
    planned = leftovers.plan(opened, older_than=None if older_than is None else older_than * 3600)
    deleted = leftovers.delete(opened, planned) if is_meant else ()
    if as_json:
        said = {"due": planned.due, "kept": planned.kept, "deleted": deleted}
        typer.echo(json.dumps({key: [dataclasses.asdict(one) for one in ones] for key, ones in said.items()}))
        return
    for leftover in planned.due:
        verb = "due" if not is_meant else "deleted" if leftover in deleted else "changed meanwhile"
        typer.echo(f"{verb}: {_described(leftover)}")
    for leftover in planned.kept:
        typer.echo(f"kept, may be under way: {_described(leftover)}")
    shown = deleted if is_meant else planned.due
    typer.echo(
        f"{opened.uri}: {sum(one.bytes for one in shown)} bytes of {len(shown)} attempts "
        f"{'deleted' if is_meant else 'to delete (--delete)'}"
    )


@app.command()
def replay(
    run: RunArgument,
    step: StepOption,
    stage: Annotated[str, typer.Option("--stage", help="rollout, reward, advantage, policy_update, ...")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object an output.")] = False,
) -> None:
    """Compute a committed stage again and compare its outputs; nothing is published. Code 1: one is different."""
    from ratchet.grains import replay as again

    opened = open_run(run)
    config = newest_config(opened)
    outputs = again.replay(stage_of_a_step(opened, config, stage), opened, config, step)
    for output in outputs:
        if as_json:
            typer.echo(json.dumps({**dataclasses.asdict(output), "is_equal": output.is_equal}, sort_keys=True))
            continue
        drift = output.largest_difference
        typer.echo(
            f"{output.role}: {'equal' if output.is_equal else 'different'} "
            f"(committed {output.committed[:12]}, computed {output.computed[:12]})"
            + ("" if drift is None else f", the largest difference of a weight is {drift:g}")
        )
    if not all(output.is_equal for output in outputs):
        raise typer.Exit(1)


def _described(leftover: "Leftover") -> str:
    hours = (time.time() - leftover.modified) / 3600
    return f"{leftover.folder} | {len(leftover.objects)} objects, {leftover.bytes} bytes, quiet for {hours:.1f} h"
