"""`make demo`: three GRPO steps of a real small model through the compiled pipeline, on this machine alone.

Everything it starts listens on loopback and is stopped at the end; everything it writes lies in .cache/demo.
"""

import argparse
import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import yaml

from demo.servers import seaweedfs
from demo.smollm2 import smollm2_folder
from pipelines.local import run_locally
from ratchet.data.sources import preprocess
from ratchet.environment import set_defaults
from ratchet.errors import DataError
from ratchet.store.run import Run
from ratchet.tracking.show import graded_completions, step_lines

REPOSITORY = Path(__file__).resolve().parents[1]
CACHE = REPOSITORY / ".cache"
FOLDER = CACHE / "demo"
BUCKET = "ratchet-demo"
ROOT = f"s3://{BUCKET}/runs"


def say(text: str = "") -> None:
    """Write a line for the person who runs this."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--data", help="GSM8K: a JSONL or Parquet file, a folder, s3://..., or a dataset id")
    parser.add_argument("--steps", type=int, default=3, help="RL steps")
    parser.add_argument("--run-id", default=time.strftime("demo-%Y%m%d-%H%M%S"), help="the same id again resumes")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    FOLDER.mkdir(parents=True, exist_ok=True)
    set_defaults()
    say("model: SmolLM2-135M-Instruct, converted once and kept in .cache")
    model = smollm2_folder(CACHE)
    # Before the demo's own S3 server takes over the AWS variables: the user's data may lie on theirs.
    files = converted_data(arguments.data, FOLDER / "data") if arguments.data else {}
    os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{FOLDER / 'mlflow.db'}")
    with seaweedfs(FOLDER / "s3") as server:
        os.environ.update(server.env())
        server.create_bucket(BUCKET)
        say(f"run: {ROOT}/{arguments.run_id}, through pipelines/grpo/pipeline.yaml on kfp.local")
        run_locally(
            REPOSITORY / "pipelines" / "grpo" / "pipeline.yaml",
            {
                "root": ROOT,
                "run_id": arguments.run_id,
                "config": config_text(model, files),
                "total_steps": arguments.steps,
                "steps_per_segment": 2,
            },
            pipeline_root=FOLDER / "kfp",
        )
        report(Run(ROOT, arguments.run_id), arguments.steps)


def converted_data(source: str, folder: Path) -> dict[str, str]:
    """Write the user's data as Parquet to `folder`; return data.train_files and data.val_files.

    Without a split of its own for tests nothing is held out, and nothing is evaluated.
    """
    shutil.rmtree(folder, ignore_errors=True)
    splits = {Path(path).stem: path for path in preprocess(source, str(folder))}
    if "train" not in splits:
        raise DataError(f"{source}: expected training problems, found only {', '.join(splits)}")
    if "test" not in splits:
        say(f"{source} has no test split: nothing is held out, so nothing is evaluated")
    return {"train_files": splits["train"], "val_files": splits.get("test", "")}


def config_text(model: Path, files: Mapping[str, str]) -> str:
    """Return the demo's config as YAML text, with the model's folder and the user's data, if there is any."""
    config = yaml.safe_load((REPOSITORY / "configs" / "demo.yaml").read_text(encoding="utf-8"))
    config["actor_rollout_ref"]["model"]["path"] = str(model)
    config["data"] |= files
    return yaml.safe_dump(config, sort_keys=False)


def report(run: Run, steps: int) -> None:
    """Print where the run is, each step's metrics, one completion with its reward, and what to look at next."""
    say()
    for line in step_lines(run):
        say(line)
    sample = max(graded_completions(run, steps), key=lambda row: row["reward"])
    say()
    say(f"one completion of step {steps}: reward {sample['reward']:g}, answer read as {sample['extracted']}")
    say("    " + sample["completion"].strip().replace("\n", "\n    "))
    say()
    say(f"run:        {run.uri}")
    say(f"look again: .venv/bin/python -m demo.look {run.run_id} [--step {steps}]")
    say(f"MLflow:     .venv/bin/mlflow ui --backend-store-uri {os.environ['MLFLOW_TRACKING_URI']}")


if __name__ == "__main__":
    main()
