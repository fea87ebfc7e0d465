"""`make learn`: GRPO on the easiest generated problems until the reward has risen far beyond noise; the README's curve.

Runs in this process at segment grain over local folders; killed, it goes on where it was.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

from demo.run import CACHE, REPOSITORY, converted_data, say
from demo.smollm2 import smollm2_folder
from ratchet.config import load_config
from ratchet.environment import set_defaults
from ratchet.grains import loop
from ratchet.grains.session import open_session, submit
from ratchet.store.run import Run


def main() -> None:
    """Train, then write the curve."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--data", help="other training and held-out problems than the generated ones")
    parser.add_argument("--run-id", default="learn", help="the same id again resumes")
    parser.add_argument("--chart", type=Path, default=CACHE / "learn.svg", help="where the curve is written")
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    set_defaults()
    os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{CACHE / 'mlflow.db'}")
    files = converted_data(arguments.data, CACHE / "learn-data") if arguments.data else {}
    data = [f"data.{name}={place}" for name, place in files.items()]
    config = load_config(
        REPOSITORY / "configs" / "learn.yaml",
        [f"actor_rollout_ref.model.path={smollm2_folder(CACHE)}", *data],
    )
    run = submit(str(CACHE / "runs"), arguments.run_id, config)
    with open_session(run, config, echo=say) as session:
        loop.train(session)
    draw(run, arguments.chart)
    say(f"run: {run.uri}\ncurve: {arguments.chart}")


def draw(run: Run, chart: Path) -> None:
    """Draw the mean reward of every step, its running mean, and the held-out accuracy with its interval."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    steps = [step for step in run.steps() if step > 0 and run.manifest("reward", step)]
    rewards = [run.require("reward", step).provenance.metrics["critic/score/mean"] for step in steps]
    window = 10
    running = [
        sum(rewards[max(0, i - window + 1) : i + 1]) / len(rewards[max(0, i - window + 1) : i + 1])
        for i in range(len(rewards))
    ]
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot(steps, rewards, ".", alpha=0.5, label="mean reward of a step (64 completions)")
    axes.plot(steps, running, label=f"running mean of {window} steps")
    held_out = [
        (step, manifest.provenance.metrics) for step in run.steps() if (manifest := run.manifest("evaluate", step))
    ]
    for index, (step, metrics) in enumerate(held_out):
        low, high = (next(value for name, value in metrics.items() if f"ci95_{end}" in name) for end in ("low", "high"))
        accuracy = next(value for name, value in metrics.items() if name.startswith("val-core/"))
        bars = [[accuracy - low], [high - accuracy]]
        label = "held-out accuracy, greedy, 95% interval" if index == 0 else None
        axes.errorbar([step], [accuracy], yerr=bars, fmt="s", color="black", capsize=3, label=label)
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1))
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    chart.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(chart, metadata={"Date": None})


if __name__ == "__main__":
    main()
