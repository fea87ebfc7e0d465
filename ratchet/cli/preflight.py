"""The verb `preflight`: what the first task of every pipeline checks, before anything is submitted."""

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from ratchet.cli.app import app

Grain = Literal["stage", "step", "segment"]


@app.command()
def preflight(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config overrides.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML config under verl's key names.")] = None,
    root: Annotated[str | None, typer.Option("--root", help="Where runs lie; trainer.default_local_dir.")] = None,
    run_id: Annotated[str | None, typer.Option("--run-id", help="Name of the run; trainer.experiment_name.")] = None,
    grain: Annotated[Grain | None, typer.Option("--grain", help="How long a pod lasts; trainer.grain.")] = None,
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Where pods will run; the kubeconfig's.")] = "",
    is_local: Annotated[bool, typer.Option("--local", help="The run will be here, on no cluster.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a finding.")] = False,
) -> None:
    """Say in seconds what would keep a run from working. Ends with code 2 if something would."""
    # Asking once or twice is enough for an answer to somebody who waits for it.
    os.environ.setdefault("AWS_MAX_ATTEMPTS", "3")
    from ratchet.config import load_config
    from ratchet.grains.placement import PLACED
    from ratchet.grains.preflight import PipelineFacts, check
    from ratchet.grains.session import place_of

    parsed = load_config(config, [*(overrides or []), *([f"trainer.grain={grain}"] if grain else [])])
    facts = PipelineFacts(grain=parsed.trainer.grain)
    if not is_local:
        stages = (*PLACED[parsed.trainer.grain], "evaluate")
        facts = PipelineFacts(
            grain=parsed.trainer.grain,
            placements={stage: getattr(parsed.device_map, stage) for stage in stages},
            asks_cluster=True,
            namespace=namespace,
        )
    place, name = place_of(parsed, root, run_id)
    findings = check(parsed, root=place, run_id=name, facts=facts)
    for finding in findings:
        if as_json:
            said = {"check": finding.check, "level": finding.level, "message": finding.message}
            typer.echo(json.dumps(said, ensure_ascii=False))
        else:
            typer.echo(f"{finding.level:8}{finding.check}: {finding.message}")
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(2)
