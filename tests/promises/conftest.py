"""What the tests of promises share: data, a reward model, and the keys of a run that no part of a flow sets."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs import write_problems
from tests.tiny_models import make_tiny_classifier

QUESTIONS = ["How many?", "A baker sells 12 loaves in the morning and 30 in the afternoon. How many is that?"]


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five additions in GSM8K's JSON Lines."""
    return write_problems(tmp_path_factory.mktemp("problems") / "problems.jsonl")


@pytest.fixture(scope="session")
def two_questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short and a long prompt of two data sources, as JSON Lines."""
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    lines = [
        {"data_source": f"promises/{number}", "prompt": question, "ground_truth": str(42 + number)}
        for number, question in enumerate(QUESTIONS)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random sequence classifier of one label."""
    return make_tiny_classifier(tmp_path_factory.mktemp("models") / "classifier")


@pytest.fixture(scope="session")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The keys that no part sets, for two prompts a step: (train_files, section={key: value}, ...) -> config."""
    root = tmp_path_factory.mktemp("runs")

    def make(train_files: Path | str, **sections: dict[str, Any]) -> dict[str, Any]:
        data = {"train_files": str(train_files), "train_batch_size": 2, "max_prompt_length": 256}
        trainer = {"total_training_steps": 1, "device": "cpu", "default_local_dir": str(root)}
        found: dict[str, Any] = {"data": data, "trainer": trainer}
        for name, values in sections.items():
            found[name] = {**found.get(name, {}), **values}
        return found

    return make
