"""Keeps the training prompts that a model solves sometimes: the others have groups without any difference.

A group whose completions all fail, or all succeed, has advantages of 0 and teaches nothing. The model answers each
training prompt n times, as it will in training; those that it solved at least once and not every time are written in
verl's Parquet schema, beside the held-out prompts as they are.
"""

import argparse
import logging
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.curves import CONFIGS
from ratchet.config import load_config
from ratchet.data import schemas
from ratchet.data.parquet import read_table
from ratchet.data.sources import load_rows
from ratchet.data.verl_parquet import write_verl_parquet
from ratchet.environment import set_defaults
from ratchet.grains import loop
from ratchet.grains.session import open_session, submit


def main() -> None:
    """Sample, choose and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--task", required=True, help="configs/<task>.yaml says how it is sampled and graded")
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--data", required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--root", default="runs", help="where the evaluation's run lies")
    parser.add_argument("--samples", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument("overrides", nargs="*", help="key=value")
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    set_defaults()
    select(arguments)


def select(arguments: argparse.Namespace) -> None:
    """Evaluate the model on the training prompts, at the temperature of training, and write both files."""
    data = Path(arguments.data)
    sampling = load_config(CONFIGS / f"{arguments.task}.yaml", arguments.overrides).actor_rollout_ref.rollout
    overrides = [
        f"actor_rollout_ref.model.path={arguments.model}",
        f"data.train_files={data / 'train.jsonl'}",
        f"data.val_files={data / 'train.jsonl'}",
        f"actor_rollout_ref.rollout.val_kwargs.n={arguments.samples}",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        f"actor_rollout_ref.rollout.val_kwargs.temperature={sampling.temperature}",
        f"actor_rollout_ref.rollout.val_kwargs.top_p={sampling.top_p}",
        *arguments.overrides,
    ]
    config = load_config(CONFIGS / f"{arguments.task}.yaml", overrides)
    run = submit(arguments.root, f"solvable-{arguments.task}", config)
    with open_session(run, config, echo=lambda line: None) as session:
        loop.prepare(session)
        loop.evaluate_base(session)
    prompts = _table(run, run.require("preprocess/val", None).output("prompts"), schemas.PROMPTS)
    answers = _table(run, run.require("evaluate", 0).output("evaluations"), schemas.EVALUATIONS)
    kept = solved_sometimes(answers)
    if not kept:
        raise SystemExit(f"none of {len(prompts)} prompts was solved in some of {arguments.samples} completions only")
    questions = [prompt["prompt"] for prompt in prompts if prompt["prompt_id"] in kept]
    rows = [row for row in load_rows(str(data), split="train") if row.prompt in questions]
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_verl_parquet(rows, str(arguments.out / "train.parquet"))
    write_verl_parquet(load_rows(str(data), split="test"), str(arguments.out / "test.parquet"))
    rate = sum(answer["reward"] for answer in answers) / len(answers)
    sys.stdout.write(
        f"{len(rows)} of {len(prompts)} prompts are solved in some of {arguments.samples} completions; "
        f"of all completions {rate:.3f} are right, of theirs {sum(kept.values()) / len(kept):.3f}\n"
    )


def solved_sometimes(answers: Iterable[dict[str, Any]]) -> dict[str, float]:
    """prompt_id -> mean reward, of the prompts whose completions do not all have the same reward."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for answer in answers:
        rewards[answer["prompt_id"]].append(answer["reward"])
    return {prompt: sum(found) / len(found) for prompt, found in rewards.items() if min(found) < max(found)}


def _table(run: Any, artifact: Any, schema: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_table(run.store, artifact, schema).to_pylist()
    return rows


if __name__ == "__main__":
    main()
