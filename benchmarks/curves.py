"""Learning curves of the algorithms in configs/: `run` trains and writes numbers, `draw` makes the chart of them.

The two run on different machines: training on one with an accelerator, drawing where matplotlib is. The generated
problems are the same for all; the training reward of DAPO counts only the groups that it keeps and has a penalty on
length in it, so algorithms are compared by held-out accuracy.
"""

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from ratchet.config import RunConfig, load_config
from ratchet.environment import set_defaults
from ratchet.grains import loop
from ratchet.grains.session import open_session, submit
from ratchet.store.run import Run

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
ALGORITHMS = ("grpo", "ppo", "rloo", "dr_grpo", "dapo", "gspo")
WINDOW = 10
"""Steps of the running mean."""


def main() -> None:
    """Train or draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="train, and write one JSON file an algorithm")
    run.add_argument("--model", required=True, help="folder or hub id")
    run.add_argument("--root", default="runs", help="where runs lie")
    run.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the numbers go")
    run.add_argument("--only", nargs="*", default=ALGORITHMS, help="some of the algorithms")
    run.add_argument("--suffix", default="", help="of run ids and files, for another seed")
    run.add_argument("overrides", nargs="*", help="key=value for every run")
    run.set_defaults(action=_run)
    draw = commands.add_parser("draw", help="draw the numbers")
    draw.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    draw.add_argument("--chart", type=Path, default=Path("docs/algorithms.svg"))
    draw.set_defaults(action=_draw)
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    arguments.action(arguments)


def _run(arguments: argparse.Namespace) -> None:
    set_defaults()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        started = time.time()
        overrides = [f"actor_rollout_ref.model.path={arguments.model}", *arguments.overrides]
        config = load_config(CONFIGS / f"{name}.yaml", overrides)
        run, device = trained(config, arguments.root, f"curve-{name}{arguments.suffix}")
        numbers = {"algorithm": name, "overrides": arguments.overrides, "device": device} | curve(run)
        path = arguments.out / f"curve-{name}{arguments.suffix}.json"
        path.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
        ends = f"{numbers['held_out'][0]['accuracy']:.3f} -> {numbers['held_out'][-1]['accuracy']:.3f}"
        sys.stdout.write(f"{name}: held-out {ends}, {time.time() - started:.0f} s in all\n")
        sys.stdout.flush()


def trained(config: RunConfig, root: str, run_id: str) -> tuple[Run, str]:
    """Train to the end, or go on with the run of that id; return it, and the device that it was trained on."""
    run = submit(root, run_id, config)
    with open_session(run, config, echo=lambda line: None) as session:
        loop.train(session)
        return run, session.residents.torch_device()


def curve(run: Run) -> dict[str, Any]:
    """Return the run's curves: the reward and seconds of each step, and the held-out accuracy with its interval.

    `elapsed` counts from where the first update began: of steps that overlap, it is less than their seconds together.
    """
    steps, held_out = [], []
    began: float | None = None
    for step in run.steps():
        reward, update = run.manifest("reward", step), run.manifest("policy_update", step)
        if reward and update and step:
            metrics = {**reward.provenance.metrics, **update.provenance.metrics}
            names = {"reward": "critic/score/mean", "seconds": "timing_s/step", "tokens": "perf/total_num_tokens"}
            began = update.provenance.started if began is None else began
            found = {short: round(metrics[name], 4) for short, name in names.items()}
            steps.append({"step": step, **found, "elapsed": round(update.provenance.ended - began, 2)})
        evaluation = run.manifest("evaluate", step)
        if evaluation:
            metrics = evaluation.provenance.metrics
            found = {"step": step}
            for name, value in metrics.items():
                short = next((s for s in ("ci95_low", "ci95_high") if s in name), None)
                if short or name.startswith("val-core/"):
                    found[short or "accuracy"] = round(value, 4)
            held_out.append(found)
    return {"steps": steps, "held_out": held_out}


def draw_curve(axes: Any, numbers: dict[str, Any], index: int, seed: str) -> None:
    """Draw what `curve` returned: the reward's running mean, and the held-out accuracy; `index` picks the color."""
    rewards = [step["reward"] for step in numbers["steps"]]
    running = [
        sum(rewards[max(0, i - WINDOW + 1) : i + 1]) / len(rewards[max(0, i - WINDOW + 1) : i + 1])
        for i in range(len(rewards))
    ]
    color = f"C{index}"
    label = f"reward, running mean of {WINDOW} steps, {seed}"
    axes.plot([step["step"] for step in numbers["steps"]], running, color=color, alpha=0.6, label=label)
    held_out = numbers["held_out"]
    accuracy = [one["accuracy"] for one in held_out]
    bars = [
        [value - one["ci95_low"] for value, one in zip(accuracy, held_out, strict=True)],
        [one["ci95_high"] - value for value, one in zip(accuracy, held_out, strict=True)],
    ]
    places = [one["step"] + index for one in held_out]
    label = f"held-out accuracy, 95% interval, {seed}"
    axes.errorbar(places, accuracy, yerr=bars, fmt="s", ms=4, color=color, capsize=3, label=label)


def _draw(arguments: argparse.Namespace) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    mpl.rcParams |= {"svg.hashsalt": "ratchet", "svg.fonttype": "none"}
    figure, panels = pyplot.subplots(2, 3, figsize=(10, 5.5), sharex=True, sharey=True)
    for axes, name in zip(panels.flat, ALGORITHMS, strict=True):
        for index, path in enumerate(sorted(arguments.out.glob(f"curve-{name}*.json"))):
            draw_curve(axes, json.loads(path.read_text(encoding="utf-8")), index, f"seed {index}")
        axes.set(title=name, ylim=(-0.1, 1))
        axes.grid(alpha=0.3)
        axes.set(xlabel="step" if axes in panels[-1] else "")
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="lower center", ncols=2, fontsize="small")
    figure.savefig(arguments.chart, metadata={"Date": None})


if __name__ == "__main__":
    main()
