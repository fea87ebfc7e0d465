"""Learning on a GPU: `run` trains one seed of a task and writes its numbers, `draw` makes the chart of all.

Each seed is one run, which the same command resumes; seeds may train at the same time, as their configs leave room on
the GPU. A command that was cut off wrote no numbers: the next one trains what is left and writes them.
"""

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.curves import CONFIGS, WINDOW, curve, draw_curve
from ratchet.config import load_config
from ratchet.environment import set_defaults
from ratchet.grains import loop
from ratchet.grains.session import open_session, submit
from ratchet.store.run import Run

TASKS = {"word_problems": "generated problems of one sum", "gsm8k": "GSM8K"}
"""configs/<task>.yaml -> title."""
MILESTONE = 0.5


def main() -> None:
    """Train or draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="train one seed to its end, or as far as the time allows")
    run.add_argument("--task", choices=TASKS, required=True)
    run.add_argument("--model", required=True, help="folder or hub id")
    run.add_argument("--root", default="runs", help="where runs lie")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--steps", type=int, help="of the whole run; those of the config where it is not given")
    run.add_argument("--data", help="folder or file of the prompts, where the config's place is not theirs")
    run.add_argument("--suffix", default="", help="of the run's id, for another set of overrides")
    run.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the numbers go")
    run.add_argument("--within", type=float, default=540, help="begin no segment that would probably end later, in s")
    run.add_argument("overrides", nargs="*", help="key=value")
    run.set_defaults(action=_run)
    draw = commands.add_parser("draw", help="draw the numbers, and print them as a table")
    draw.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    draw.add_argument("--chart", type=Path, default=Path("docs/learning-gpu.svg"))
    draw.add_argument("--write", type=Path, help="put the table between the markers of this page")
    draw.add_argument("--block", default="learning", help="the name in those markers")
    draw.set_defaults(action=_draw)
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    arguments.action(arguments)


def _run(arguments: argparse.Namespace) -> None:
    began, longest = time.monotonic(), 0.0
    set_defaults()
    values: dict[str, Any] = {"actor_rollout_ref.model.path": arguments.model, "trainer.seed": arguments.seed}
    if arguments.data:
        values |= {"data.train_files": arguments.data, "data.val_files": arguments.data}
    if arguments.steps:
        values["trainer.total_training_steps"] = arguments.steps
    overrides = [*(f"{key}={value}" for key, value in values.items()), *arguments.overrides]
    config = load_config(CONFIGS / f"{arguments.task}.yaml", overrides)
    name = f"learning-{arguments.task}{arguments.suffix}-seed{arguments.seed}"
    run = submit(arguments.root, name, config)
    with open_session(run, config, echo=lambda line: None) as session:
        loop.prepare(session)
        loop.evaluate_base(session)
        total, size = session.total_steps(), config.trainer.steps_per_segment
        for start in loop.plan(session, total, size, most=total):
            if time.monotonic() - began + longest > arguments.within:
                sys.stdout.write(f"{name}: {start - 1} of {total} steps; the same command goes on from here\n")
                return
            begun = time.monotonic()
            loop.run_segment(session, start, min(start + size, total + 1))
            longest = max(longest, time.monotonic() - begun)
        loop.evaluate_last(session)
        device = session.residents.torch_device()
    numbers = {
        "task": arguments.task,
        "variant": arguments.suffix.strip("-"),
        "seed": arguments.seed,
        "model": Path(arguments.model).name,
        "device": device,
        "overrides": arguments.overrides,
        "cost": cost(run),
        **curve(run),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    tables.write_json(arguments.out / f"{name}.json", numbers)
    accuracy = [one["accuracy"] for one in numbers["held_out"]]
    sys.stdout.write(f"{name}: held-out {accuracy[0]:.3f} -> {accuracy[-1]:.3f}\n")


def cost(run: Run) -> dict[str, float]:
    """What the run took: seconds of its stages, GPU-seconds, trained tokens, and the bytes that lie in its folder."""
    manifests = [manifest for step in run.steps() for manifest in run.step_manifests(step)]
    folder = Path(run.root) / run.run_id
    return {
        "seconds": sum(one.provenance.ended - one.provenance.started for one in manifests),
        "gpu_seconds": sum(one.provenance.gpu_seconds for one in manifests),
        "tokens": sum(one.provenance.metrics.get("perf/total_num_tokens", 0.0) for one in manifests),
        "durable_bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
    }


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Title -> the numbers of its seeds, by task and by variant (another set of overrides)."""
    paths = sorted(folder.glob("learning-*-seed*.json"))
    numbers = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    numbers.sort(key=lambda one: (list(TASKS).index(one["task"]), one.get("variant", ""), one["seed"]))
    found: dict[str, list[dict[str, Any]]] = {}
    for one in numbers:
        variant = f", {one['variant']}" if one.get("variant") else ""
        found.setdefault(f"{TASKS[one['task']]}{variant}", []).append(one)
    return found


def halfway(numbers: dict[str, Any]) -> tuple[float, float] | None:
    """Trained tokens, and seconds since the first step began, when the mean reward of WINDOW steps reaches MILESTONE.

    None where it never does.
    """
    steps = numbers["steps"]
    for end in range(WINDOW, len(steps) + 1):
        if sum(step["reward"] for step in steps[end - WINDOW : end]) / WINDOW >= MILESTONE:
            seconds = steps[end - 1].get("elapsed") or sum(step["seconds"] for step in steps[:end])
            return sum(step["tokens"] for step in steps[:end]), seconds
    return None


def markdown(found: dict[str, list[dict[str, Any]]]) -> str:
    """A table with one row a seed."""
    lines = [
        "| task, seed | steps | reward, first and last 10 steps | held-out accuracy (95% interval): before, after | "
        f"to a mean reward of {MILESTONE} | GPU-hours | million tokens | GiB kept |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for title, seeds in found.items():
        for numbers in seeds:
            rewards = [step["reward"] for step in numbers["steps"]]
            ends = [sum(part) / len(part) for part in (rewards[:10], rewards[-10:])]
            before, after = (
                f"{one['accuracy']:.3f} ({one['ci95_low']:.3f} to {one['ci95_high']:.3f})"
                for one in (numbers["held_out"][0], numbers["held_out"][-1])
            )
            spent, way = numbers["cost"], halfway(numbers)
            tokens = sum(step["tokens"] for step in numbers["steps"])
            reached = "-" if way is None else f"{way[0] / 1e6:.2f} million tokens, {way[1]:.0f} s"
            lines.append(
                f"| {title}, {numbers['seed']} | {len(rewards)} | {ends[0]:.2f}, {ends[1]:.2f} "
                f"| {before}, {after} | {reached} "
                f"| {_in(spent.get('gpu_seconds'), 3600, 2)} | {tokens / 1e6:.1f} "
                f"| {_in(spent.get('durable_bytes'), 2**30, 1)} |"
            )
    return "\n".join(lines) + "\n"


def _in(value: float | None, unit: float, digits: int) -> str:
    """A value in a unit; a run that was cut off has steps and no sums of its own."""
    return "-" if value is None else f"{value / unit:.{digits}f}"


def _draw(arguments: argparse.Namespace) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    mpl.rcParams |= {"svg.hashsalt": "ratchet", "svg.fonttype": "none"}
    found = read(arguments.out)
    figure, panels = pyplot.subplots(1, len(found), figsize=(max(8, 5 * len(found)), 4), squeeze=False)
    for axes, (title, seeds) in zip(panels[0], found.items(), strict=True):
        for index, numbers in enumerate(seeds):
            draw_curve(axes, numbers, index, f"seed {numbers['seed']}")
        axes.set(title=title, xlabel="step")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.tight_layout(rect=(0, 0.16, 1, 1))
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="lower center", ncols=2, fontsize="small")
    figure.savefig(arguments.chart, metadata={"Date": None})
    text = markdown(found)
    sys.stdout.write(text)
    if arguments.write:
        name = arguments.block
        tables.write_between_markers(arguments.write, text, f"<!-- {name}: begin -->", f"<!-- {name}: end -->")


if __name__ == "__main__":
    main()
