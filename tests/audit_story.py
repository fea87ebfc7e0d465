"""Two nights of a champion that adds, as the tasks of the nightly pipeline run them: what an audit walks back through.

The model is tiny and real: it was taught the form of the answers and some of the sums before the first night, and each
night makes it better by GRPO. While the second night trains, MLflow is away.
"""

import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ratchet.data.prompt_rows import INSTRUCTION
from ratchet.grains import entry
from ratchet.grains.tasks import (
    EvaluateTask,
    ExportTask,
    PlanTask,
    PreflightTask,
    PreprocessTask,
    PromoteTask,
    SegmentTask,
)
from ratchet.store.artifacts import write_bytes
from ratchet.store.objects import open_store
from tests.runs import tiny_config
from tests.tiny_models import make_tiny_model

BUCKET = "team"
ROOT = f"s3://{BUCKET}/runs"
NAME = "sums"
NIGHTS = {"night-1": 3, "night-2": 10}
"""Run -> its steps."""
PRICE = 0.05
"""Of an hour of a processor."""
REVISION = "4f1c09be7d52"
IMAGE = "registry.example.org/team/ratchet-segment:0.1.0"
_PIPELINE_RUNS = {"night-1": "6f0c7a52-91f4-4c7e-a3d0-5f2f8c1f0b11", "night-2": "b2d9e413-07c8-4f6b-9a86-cc41d0a7be22"}
_LARGEST = 5
"""Of two numbers that are added."""


@dataclass
class Shown:
    """One of KFP's output artifacts: what the UI shows of a task."""

    path: str
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """What it holds."""
        return Path(self.path).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Story:
    """What was done, and what Kubeflow's UI has of it."""

    shown: dict[str, Shown]
    """<run>/<task>/<output> -> artifact."""


def tell(folder: Path, *, during_the_second: Callable[[], Any] = lambda: None) -> Story:
    """Let both nights pass below ROOT; AWS and MLflow variables are set. `folder` is for models and artifacts.

    `during_the_second` is called before the second night trains, and what it returns after that, if it is callable.
    """
    store = open_store(f"s3://{BUCKET}")
    held_out, first, second = (_problems(names) for names in (["Ben", "Tom"], ["Ann"], ["Ann", "Mia"]))
    model = taught_model(folder / "model", [*held_out, *second])
    write_bytes(store, "models/tiny-adder", {path.name: path.read_bytes() for path in model.iterdir()})
    write_bytes(store, "data", {"held-out.jsonl": _lines(held_out)})
    shown: dict[str, Shown] = {}
    # The second night has problems that the first one had not: without news nothing would be trained.
    for run_id, training in zip(NIGHTS, (first, second), strict=True):
        write_bytes(store, "data", {"train.jsonl": _lines(training)})
        is_second = training is second
        for task, made in _night(folder, run_id, during_the_second if is_second else lambda: None):
            shown |= {f"{run_id}/{task}/{name}": output for name, output in made.items()}
    return Story(shown=shown)


def taught_model(folder: Path, problems: Sequence[dict[str, str]], *, steps: int = 110) -> Path:
    """Write a tiny model that has seen the answers so rarely that it is often wrong; the same one every time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_tiny_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = []
    for problem in problems:
        messages = [{"role": "user", "content": f"{problem['question']} {INSTRUCTION}"}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        rows.append(
            (tokenizer(text)["input_ids"], [*tokenizer(problem["answer"])["input_ids"], tokenizer.eos_token_id])
        )
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    labels = torch.full((len(rows), length), -100)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randperm(len(rows), generator=generator)[:16]
        # What follows an answer is masked by its labels, and nothing before it attends to it.
        loss = model(input_ids=ids[chosen], labels=labels[chosen]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


def _problems(names: Sequence[str]) -> list[dict[str, str]]:
    numbers = range(1, _LARGEST + 1)
    return [
        {
            "question": f"{name} has {first} pears and buys {second} more. How many has {name} now?",
            "answer": f"{name} has {first + second}.\n#### {first + second}",
        }
        for first in numbers
        for second in numbers
        for name in names
    ]


def _lines(problems: Sequence[dict[str, str]]) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in problems).encode()


def _config(steps: int) -> str:
    import yaml

    config = tiny_config(
        f"s3://{BUCKET}/models/tiny-adder",
        f"s3://{BUCKET}/data/train.jsonl",
        **{
            "data.val_files": f"s3://{BUCKET}/data/held-out.jsonl",
            "data.train_batch_size": 25,
            "data.max_response_length": 16,
            "actor_rollout_ref.rollout.n": 8,
            "actor_rollout_ref.actor.optim.lr": 5e-4,
            "actor_rollout_ref.actor.entropy_coeff": 0.0,
            "trainer.total_training_steps": steps,
            "trainer.steps_per_segment": steps,
            "trainer.test_freq": 5,
            "trainer.log_completions_freq": 5,
            "trainer.project_name": NAME,
            "trainer.prices": {"cpu": PRICE},
            "trainer.logger": ["mlflow"],
            "promotion.name": NAME,
            "promotion.significant": False,
        },
    )
    return yaml.safe_dump(config.model_dump(mode="json"))


def _night(folder: Path, run_id: str, during: Callable[[], Any]) -> Iterator[tuple[str, dict[str, Shown]]]:
    """Yield each task of the nightly pipeline with what it shows in the UI."""
    at = {"root": ROOT, "run_id": run_id, "submission_id": _PIPELINE_RUNS[run_id]}

    def outputs(task: str, *names: str) -> dict[str, Any]:
        place = folder / "artifacts" / run_id / task
        return {name: Shown(str(place / name)) for name in names}

    with _pod(run_id, "preflight"):
        shown = outputs("preflight", "report")
        entry.preflight(PreflightTask(**at, config=_config(NIGHTS[run_id]), champion=NAME, from_champion=True), **shown)
        yield "preflight", shown
    with _pod(run_id, "preprocess"):
        shown = outputs("preprocess", "metrics")
        entry.preprocess(PreprocessTask(**at), **shown)
        yield "preprocess", shown
    with _pod(run_id, "plan"):
        [iteration] = entry.plan(PlanTask(**at))
    with _pod(run_id, "segment"):
        afterwards = during()
        shown = outputs("segment", "metrics", "report", "page")
        entry.segment(SegmentTask(**at, start=iteration["start"]), **shown)
        yield "segment", shown
        if callable(afterwards):
            afterwards()
    with _pod(run_id, "evaluate"):
        shown = outputs("evaluate", "metrics", "report")
        entry.evaluate(EvaluateTask(**at), **shown)
        yield "evaluate", shown
    with _pod(run_id, "checkpoint-export"):
        shown = outputs("checkpoint_export", "metrics", "report", "page", "model")
        entry.checkpoint_export(ExportTask(**at), **shown)
        yield "checkpoint_export", shown
    with _pod(run_id, "promote"):
        shown = outputs("promote", "metrics", "report", "model")
        entry.promote(PromoteTask(**at), **shown)
        yield "promote", shown


@contextmanager
def _pod(run_id: str, task: str) -> Iterator[None]:
    """Be the pod of a task, as far as a record says where it was made."""
    name = f"ratchet-{run_id}-{task}"
    variables = {"RATCHET_POD_NAME": name, "RATCHET_REVISION": REVISION, "RATCHET_IMAGE": IMAGE}
    variables["KF_PIPELINES_UI_ENDPOINT"] = "https://kubeflow.example.org/pipeline"
    with mock.patch.dict(os.environ, variables), mock.patch.object(socket, "gethostname", return_value=name):
        yield
