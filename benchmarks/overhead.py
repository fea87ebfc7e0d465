"""`python -m benchmarks.overhead`: what Ratchet itself costs, measured against a real S3 server on this machine.

Prints seconds for: `ratchet --help`; a stage that does nothing but read and write a small table (fence, read, write,
commit, and with MLflow on SQLite); and `ratchet preprocess` of a GSM8K file, if one is given.
"""

import argparse
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from demo.servers import seaweedfs
from ratchet.config import RunConfig, parse_config, semantic
from ratchet.data import schemas
from ratchet.data.parquet import read_table, table_from_rows, write_table
from ratchet.grains.session import open_session, submit
from ratchet.stages.base import Context, Input, Result, Stage
from ratchet.store.run import Run

REPEATS = 20


class Idle(Stage):
    """Reads the table that it wrote a step earlier, and writes it again."""

    name = "idle"
    config_keys = ("trainer.seed",)

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        assert step is not None
        return {"table": Input(run.require(self.name, step - 1), "table")} if step > 1 else {}

    def compute(self, context: Context) -> Result:
        if "table" in context.inputs:
            table = read_table(context.run.store, context.inputs["table"].artifact, schemas.REWARDS)
        else:
            row = {"reward": 1.0, "reward_breakdown": [], "extracted": "1", "is_parseable": True, "error": None}
            rows = [{"group_id": "000001/train-0000000", "sample_index": index, **row} for index in range(256)]
            table = table_from_rows(rows, schemas.REWARDS)
        return Result(
            outputs={"table": write_table(context.store, f"{context.folder}/table", table)}, metrics={"x": 1.0}
        )


def stage_seconds(root: str, run_id: str, loggers: list[str]) -> list[float]:
    """Return the seconds of each idle stage after the first."""
    config = parse_config({"trainer": {"logger": loggers}})
    # A run that exists is asked for neither model nor prompts.
    Run(root, run_id).create_or_check(semantic(config))
    run = submit(root, run_id, config)
    seconds = []
    with open_session(run, config) as session:
        for step in range(1, REPEATS + 2):
            started = time.perf_counter()
            session.run(Idle(), step)
            seconds.append(time.perf_counter() - started)
    return seconds[1:]


def command_seconds(*arguments: str) -> list[float]:
    """Return the seconds of five runs of the command line."""
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "ratchet.cli", *arguments], check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    """Measure and print medians with their spread."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gsm8k", help="folder with GSM8K's train.jsonl and test.jsonl")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    results = {"ratchet --help (target 0.5)": command_seconds("--help")}
    with tempfile.TemporaryDirectory() as folder, seaweedfs(Path(folder) / "s3") as server:
        os.environ.update(server.env())
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        server.create_bucket("overhead")
        results["a stage's own cost on S3 (target 0.3)"] = stage_seconds("s3://overhead", "plain", [])
        results["the same with MLflow on SQLite (target 0.3)"] = stage_seconds("s3://overhead", "mlflow", ["mlflow"])
        if arguments.gsm8k:
            target = str(Path(folder) / "gsm8k")
            results["ratchet preprocess of GSM8K (target 5)"] = command_seconds(
                "preprocess", "--source", arguments.gsm8k, "--local_dir", target
            )
    for name, seconds in results.items():
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        sys.stdout.write(f"{name}: median {statistics.median(seconds):.3f} s ({spread}, {len(seconds)} runs)\n")


if __name__ == "__main__":
    main()
