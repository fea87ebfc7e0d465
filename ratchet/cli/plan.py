"""The verb `plan`: what a run will take, before any of it is taken. Code 1 says that something does not fit."""

import json
import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from ratchet.cli.app import PricesOption, app, open_run

Grain = Literal["stage", "step", "segment"]


@app.command()
def plan(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config overrides.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML config under verl's key names.")] = None,
    grain: Annotated[Grain | None, typer.Option("--grain", help="How long a pod lasts; trainer.grain.")] = None,
    accelerator: Annotated[
        str | None, typer.Option("--accelerator", help="Its name, as prices have it: 'NVIDIA H200'.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option("--accelerator-memory", metavar="GIB", help="Of one accelerator.")
    ] = None,
    throughput: Annotated[
        float | None, typer.Option("--throughput", metavar="TOKENS_PER_SECOND", help="perf/throughput.")
    ] = None,
    completion_tokens: Annotated[
        float | None, typer.Option("--completion-tokens", help="Expected length of a completion.")
    ] = None,
    like: Annotated[
        str | None, typer.Option("--like", metavar="RUN", help="A run that measured speed, lengths and deltas.")
    ] = None,
    price: PricesOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; sizes in bytes.")] = False,
) -> None:
    """Say what a run takes: memory, tokens, pods, storage, time, money. No weights are read and nothing is started."""
    from ratchet.config import load_config
    from ratchet.errors import ConfigError
    from ratchet.grains.plan import Wishes, make_plan
    from ratchet.grains.plan.accelerators import memory_of
    from ratchet.grains.plan.measured import Measured, measured_by
    from ratchet.grains.plan.planning import with_measured
    from ratchet.grains.plan.screen import plan_lines
    from ratchet.tracking.cost import parse_prices

    given = {
        "--accelerator-memory": memory,
        "--throughput": throughput,
        "--completion-tokens": completion_tokens,
    }
    for option, value in given.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{option}: expected a number above 0, got {value:g}")
    parsed = load_config(config, [*(overrides or []), *([f"trainer.grain={grain}"] if grain else [])])
    limit = parsed.data.max_response_length
    if completion_tokens is not None and completion_tokens > limit:
        raise ConfigError(
            f"--completion-tokens: expected at most data.max_response_length, {limit}, got {completion_tokens:g}"
        )
    found = Measured(source="nobody") if like is None else measured_by(open_run(like))
    size = None if memory is None else round(memory * 2**30)
    if size is None and accelerator is not None:
        size = memory_of(accelerator)
    wishes = Wishes(
        accelerator=accelerator,
        memory=size,
        prices=parse_prices(price or []),
        measured=with_measured(found, throughput=throughput, completion_tokens=completion_tokens),
    )
    made = make_plan(parsed, wishes)
    typer.echo(json.dumps(made.as_record(), sort_keys=True) if as_json else "\n".join(plan_lines(made)))
    if made.faults:
        raise typer.Exit(1)
