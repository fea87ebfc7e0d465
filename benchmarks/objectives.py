"""Objectives over examples with a real model: `run` trains and writes numbers, `table` compares first and last.

Each objective is one run of configs/<objective>.yaml, which the same command resumes. Trap: DPO begins with every pair
drawn, since the policy is the reference; a draw counts as accuracy 0.
"""

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.curves import CONFIGS, trained
from ratchet.config import load_config
from ratchet.environment import set_defaults
from ratchet.store.run import POLICY_UPDATE, Run

OBJECTIVES = ("sft", "dpo", "reward_model", "hybrid")
RESULTS = Path("benchmarks/results/objectives")
BEGIN, END = "<!-- objectives: begin -->", "<!-- objectives: end -->"
LOSSES = {"actor/loss": "loss", "actor/sft_loss": "sft_loss", "critic/score/mean": "reward"}


def main() -> None:
    """Train or compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="train, and write one JSON file an objective")
    run.add_argument("--model", required=True, help="folder or hub id")
    run.add_argument("--only", nargs="*", choices=OBJECTIVES, default=OBJECTIVES)
    run.add_argument("--root", default="runs", help="where runs lie")
    run.add_argument("--out", type=Path, default=RESULTS)
    run.add_argument("overrides", nargs="*", help="key=value for every run")
    run.set_defaults(action=_run)
    table = commands.add_parser("table", help="print what was measured")
    table.add_argument("--out", type=Path, default=RESULTS)
    table.add_argument("--write", type=Path, help="put the table between the markers of this page")
    table.set_defaults(action=_table)
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    arguments.action(arguments)


def _run(arguments: argparse.Namespace) -> None:
    set_defaults()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for objective in arguments.only:
        overrides = [f"actor_rollout_ref.model.path={arguments.model}", *arguments.overrides]
        config = load_config(CONFIGS / f"{objective}.yaml", overrides)
        run, device = trained(config, arguments.root, objective)
        facts = {"objective": objective, "model": Path(arguments.model).name, "device": device}
        tables.write_json(
            arguments.out / f"{objective}.json", {**facts, "overrides": arguments.overrides, **numbers(run)}
        )


def numbers(run: Run) -> dict[str, Any]:
    """What each step's metrics say of its loss, and what was measured on held-out examples or prompts."""
    steps, held_out = [], []
    for step in run.steps():
        metrics: dict[str, float] = {}
        for stage in ("reward", POLICY_UPDATE):
            manifest = run.manifest(stage, step)
            metrics |= manifest.provenance.metrics if manifest else {}
        found = {short: round(metrics[name], 4) for name, short in LOSSES.items() if name in metrics}
        if step and found:
            steps.append({"step": step, **found})
        evaluation = run.manifest("evaluate", step)
        if evaluation:
            core = {
                name: value for name, value in evaluation.provenance.metrics.items() if name.startswith("val-core/")
            }
            held_out.append({"step": step} | {name.split("/")[3]: round(value, 4) for name, value in core.items()})
    return {"steps": steps, "held_out": held_out}


def markdown(found: list[dict[str, Any]]) -> str:
    """A table with one row an objective."""
    lines = [
        "| objective, steps | in training: mean of the first, last 4 steps | held out: before, after |",
        "|---|---|---|",
    ]
    for one in found:
        steps, held_out = one["steps"], one["held_out"]
        trained = [
            f"{name.replace('_', ' ')} {_mean(steps[:4], name):.3f}, {_mean(steps[-4:], name):.3f}"
            for name in LOSSES.values()
            if name in steps[0]
        ]
        measured = [
            f"{name} {held_out[0][name]:.3f}, {held_out[-1][name]:.3f}" for name in held_out[0] if name != "step"
        ]
        lines.append(f"| {one['objective']}, {len(steps)} | {'; '.join(trained)} | {'; '.join(measured)} |")
    return "\n".join(lines) + "\n"


def _mean(steps: list[dict[str, float]], name: str) -> float:
    return sum(step[name] for step in steps) / len(steps)


def _table(arguments: argparse.Namespace) -> None:
    paths = [arguments.out / f"{objective}.json" for objective in OBJECTIVES]
    text = markdown([json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()])
    sys.stdout.write(text)
    if arguments.write:
        tables.write_between_markers(arguments.write, text, BEGIN, END)


if __name__ == "__main__":
    main()
