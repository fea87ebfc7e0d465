"""The verbs that prove what is stored and tidy it: verify, gc, replay. Code 1 says that a proof failed."""

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ratchet.cli.app import RunArgument, StepOption, app, newest_config, open_run, stage_of_a_step
from ratchet.errors import ConfigError

if TYPE_CHECKING:
    from ratchet.store.chain import Leftover
    from ratchet.store.retention import Rules
    from ratchet.store.run import Run
    from ratchet.store.survey import Item

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
            f"{found.retired} retired on purpose"
        )
    if found.faults:
        raise typer.Exit(1)


@app.command()
def gc(
    run: RunArgument,
    is_meant: Annotated[bool, typer.Option("--delete", help="Delete; without it, all is only listed.")] = False,
    is_retiring: Annotated[
        bool, typer.Option("--retire", help="Also old policies and trainer states, as the newest submission has it.")
    ] = False,
    keep_policies: Annotated[
        int | None,
        typer.Option("--keep-policies", min=1, metavar="N", help="With --retire: in place of trainer.keep_policies."),
    ] = None,
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
    """Show what a run holds; list, or delete, what dead attempts left and what retention lets go.

    What a manifest names is never touched, but for what --retire names, with a record.
    """
    from ratchet.store import leftovers, retention
    from ratchet.store.survey import survey
    from ratchet.store.usage import in_words, readable

    if keep_policies is not None and not is_retiring:
        raise ConfigError("--keep-policies says what --retire keeps: give both")
    opened = open_run(run)
    rules = _rules(opened, keep_policies) if is_retiring else None
    planned = leftovers.plan(opened, older_than=None if older_than is None else older_than * 3600)
    found = survey(opened, with_weights=True)
    retiring = [one.item for one in retention.plan(found, rules)]
    # Refuses a run with faults, before anything is retired.
    deleted = leftovers.delete(opened, planned) if is_meant else ()
    retired = retention.retire(opened, found, rules, proven=set()) if is_meant else []
    if as_json:
        said: dict[str, Sequence[Leftover | Item]] = {
            "due": planned.due,
            "kept": planned.kept,
            "deleted": deleted,
            "retire": retiring,
            "retired": retired,
        }
        shown = {key: [dataclasses.asdict(one) for one in ones] for key, ones in said.items()}
        typer.echo(json.dumps({"sizes": planned.sizes, **shown}))
        return
    typer.echo(f"{opened.uri} holds {readable(sum(planned.sizes.values()))}: {in_words(planned.sizes)}")
    for leftover in planned.due:
        verb = "due" if not is_meant else "deleted" if leftover in deleted else "changed meanwhile"
        typer.echo(f"{verb}: {_described(leftover)}")
    for leftover in planned.kept:
        typer.echo(f"kept, may be under way: {_described(leftover)}")
    gone = {item.key for item in retired}
    for item in retiring:
        verb = "to retire" if not is_meant else "retired" if item.key in gone else "kept, see the warning"
        typer.echo(f"{verb}: {item.place}, {item.bytes} bytes")
    attempts, items = (deleted, retired) if is_meant else (planned.due, retiring)
    typer.echo(
        f"{opened.uri}: {sum(one.bytes for one in attempts)} bytes of {len(attempts)} attempts and "
        f"{sum(item.bytes for item in items)} bytes of {len(items)} artifacts "
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


def _rules(run: "Run", keep_policies: int | None) -> "Rules":
    """Return what the newest submission wants kept."""
    from ratchet.grains.storage import rules_of

    rules = rules_of(newest_config(run))
    return rules if keep_policies is None else dataclasses.replace(rules, versions=keep_policies)


def _described(leftover: "Leftover") -> str:
    hours = (time.time() - leftover.modified) / 3600
    return f"{leftover.folder} | {len(leftover.objects)} objects, {leftover.bytes} bytes, quiet for {hours:.1f} h"
