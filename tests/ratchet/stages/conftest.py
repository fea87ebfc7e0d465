from pathlib import Path

import pytest

from tests.runs import write_problems


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """One problem, whose answer is 1."""
    return write_problems(tmp_path / "problems.jsonl", 1)
