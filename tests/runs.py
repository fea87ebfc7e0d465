"""Whole runs of a tiny model on problems that the test writes, for every test that needs a run.

Trap: a random model earns the same reward for every completion, so that GRPO's loss alone would move no weight; a
little entropy in the loss does, and policy digests that stay equal cannot hide a bug.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ratchet.config import RunConfig, load_config
from ratchet.data.parquet import read_table
from ratchet.engines.sampler import Completion, SampleRequest, SamplingParams
from ratchet.grains import loop
from ratchet.grains.session import Listener, Session, open_session, submit
from ratchet.store.manifest import Manifest
from ratchet.store.run import Run
from tests.warm import Warm

# The tokens themselves do not matter to the stages: any ids of the vocabulary will do.
RIGHT = Completion([60, 61, 2], [-0.5, -1.0, -0.1], "#### 1", "stop")
WRONG = Completion([60, 62, 2], [-0.5, -1.5, -0.1], "#### 8", "stop")
CUT = Completion([70, 71, 72, 73, 74, 75], [-2.0] * 6, "apples and pears and", "length")
EMPTY = Completion([], [], "", "stop")

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def write_problems(path: Path, count: int = 5, *, words: int = 0) -> Path:
    """Write `count` additions in GSM8K's JSON Lines, each with `words` words of padding."""
    lines = []
    for number in range(count):
        question = f"Ann has {number} pears and buys {number + 1} more.{' pear' * words} How many has she?"
        lines.append(json.dumps({"question": question, "answer": f"She has {2 * number + 1}.\n#### {2 * number + 1}"}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def tiny_config(model_folder: Path | str, data_file: Path | str, **overrides: Any) -> RunConfig:
    """configs/tiny.yaml, smaller still; `overrides` are dotted keys: `**{"trainer.grain": "step"}`."""
    values: dict[str, Any] = {
        "actor_rollout_ref.model.path": str(model_folder),
        "data.train_files": str(data_file),
        "data.train_batch_size": 2,
        "data.max_response_length": 6,
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.actor.entropy_coeff": 0.01,
        "trainer.logger": [],
    }
    settings = [f"{key}={json.dumps(value)}" for key, value in {**values, **overrides}.items()]
    return load_config(CONFIGS / "tiny.yaml", settings)


def train_tiny(root: Path | str, run_id: str, config: RunConfig, listener: Listener | None = None) -> Run:
    """Train, or resume, in this process; return the run."""
    run = submit(str(root), run_id, config)
    with open_session(run, config, listener) as session:
        loop.train(session)
    return run


def train_in_a_process(
    root: str, run_id: str, config: str, overrides: Sequence[str], folder: Path, warm: Warm | None = None
) -> Run:
    """Train with the command line in a process of its own, on one thread: digests depend on the number of threads.

    With `warm` that process is a fork.
    """
    place, log = folder / f"{run_id}.yaml", folder / f"{run_id}.log"
    place.write_text(config, encoding="utf-8")
    arguments = ["train", "--config", str(place), "--root", root, "--run-id", run_id, *overrides]
    if warm is not None:
        assert warm.run(log, os.environ, "ratchet.cli", *arguments) == 0, log.read_text(errors="replace")[-3000:]
        return Run(root, run_id)
    command = [sys.executable, "-m", "ratchet.cli", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, cwd=CONFIGS.parent, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return Run(root, run_id)


class Stopped(Exception):
    """Raised on purpose in the middle of a run."""


def stop_at(place: str, *, is_committed: bool) -> Listener:
    """A listener that ends the run when the stage at `place` starts, or when it has been committed."""

    def listen(seen: str, seen_committed: bool) -> None:
        if seen == place and seen_committed == is_committed:
            raise Stopped(place)

    return listen


def manifests(run: Run) -> dict[str, Manifest]:
    """Place -> manifest of everything that is committed, read from storage again."""
    fresh = Run(run.root, run.run_id)
    found = {f"data/{split}": fresh.manifest(f"preprocess/{split}", None) for split in ("train", "val", "sft")}
    for step in fresh.steps():
        found |= {f"{step}/{item.content.stage}": item for item in fresh.step_manifests(step)}
    return {place: manifest for place, manifest in found.items() if manifest is not None}


def content_digests(run: Run) -> dict[str, str]:
    """Place -> content digest of everything that is committed."""
    return {place: manifest.content_digest for place, manifest in manifests(run).items()}


def attempts(run: Run) -> dict[str, str]:
    """Place -> the attempt that was committed."""
    return {place: manifest.provenance.attempt for place, manifest in manifests(run).items()}


class ScriptedSampler:
    """A Sampler that answers every request with the next of `completions`, over and over."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self.completions = completions

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Completion]:
        return [self.completions[index % len(self.completions)] for index in range(len(requests))]

    def load_weights(self, weights: Any) -> None:
        """Forget nothing: there is nothing."""

    def fingerprint(self) -> int | None:
        return None

    def prompt_log_probs(self, token_ids: Sequence[int]) -> list[float]:
        raise NotImplementedError

    def sleep(self) -> None:
        """Stay as it is."""

    def close(self) -> None:
        """Give nothing back."""


def use_sampler(session: Session, sampler: ScriptedSampler) -> None:
    """Make the session's stages sample from `sampler`."""
    session.residents._sampler = sampler
    session.residents._held["sampler"] = ("", None, "")
    # What is scripted answers like no trainer.
    session.residents._drift = lambda policy: None  # type: ignore[method-assign]


def one_step_config(model: Path, problems: Path, **overrides: Any) -> RunConfig:
    """A run of one prompt and one step."""
    return tiny_config(model, problems, **{"data.train_batch_size": 1, "trainer.total_training_steps": 1, **overrides})


@contextmanager
def prepared(root: Path, config: RunConfig, *completions: Completion) -> Iterator[Session]:
    """A session whose prompts are committed; its sampler says `completions`, where there are any."""
    with open_session(submit(str(root), "run", config), config) as session:
        loop.prepare(session)
        if completions:
            use_sampler(session, ScriptedSampler(completions))
        yield session


def table_rows(run: Run, stage: str, role: str, schema: Any, step: int = 1) -> list[dict[str, Any]]:
    """The committed table of a stage as rows."""
    rows: list[dict[str, Any]] = read_table(run.store, run.require(stage, step).output(role), schema).to_pylist()
    return rows
