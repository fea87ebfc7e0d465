from pathlib import Path
from typing import Any

import pytest

from ratchet.stages import preprocess
from tests.runs import write_problems


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """One problem, whose answer is 1."""
    return write_problems(tmp_path / "problems.jsonl", 1)


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The prompts that are tokenised from here on, by a process that remembers nothing of the tests before."""
    from ratchet.engines import model

    original, seen = model.chat_prompts_ids, []

    def note(tokenizer: Any, conversations: Any) -> list[list[int]]:
        seen.extend(conversations)
        return original(tokenizer, conversations)

    monkeypatch.setattr(model, "chat_prompts_ids", note)
    monkeypatch.setattr(preprocess, "_known_overlong", {})
    return seen
