"""The code blocks of a page of the documentation, for the tests that execute them."""

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
_FILE = re.compile(r"# (\w+)\.py\n")


def code_blocks(page: str, language: str = "python") -> list[str]:
    """Return what stands in the fences of one language; `page` is a path from the repository's root."""
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return fence.findall((ROOT / page).read_text(encoding="utf-8"))


def commands(page: str) -> list[tuple[str, list[str]]]:
    """Return what a page's `console` blocks have behind each `$ `: the command, and the lines of its output."""
    found: list[tuple[str, list[str]]] = []
    for block in code_blocks(page, "console"):
        assert block.startswith("$ "), f"{page}: a console block begins with a command: {block[:60]!r}"
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def run_blocks(page: str, blocks: Iterable[str], names: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Execute blocks in order, each with the names of those before it; return the names.

    A block that begins with a file's name, `# mine.py`, is written there for the others to import.
    """
    found: dict[str, Any] = {"__name__": "page", **(names or {})}
    for block in blocks:
        if name := _FILE.match(block):
            Path(f"{name[1]}.py").write_text(block, encoding="utf-8")
            sys.modules.pop(name[1], None)
        else:
            exec(compile(block, page, "exec"), found)
    return found


def enter_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in `folder`, as a reader who types the page's lines there: what lies in it can be imported."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
