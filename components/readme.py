"""`python -m components.readme`: write each component's README from what it is told; `--check` fails on a difference.

Trap: the descriptions live in ratchet/grains/tasks.py (what a component is told) and in its own docstring (outputs);
whoever edits a README by hand loses the edit.
"""

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Return every component, by its folder."""
    return sorted(path.parent.name for path in FOLDER.glob("*/component.py"))


def function_of(name: str) -> Any:
    """Return the Python function of a component."""
    return getattr(importlib.import_module(f"components.{name}"), name).python_func


def descriptions(name: str) -> dict[str, str]:
    """Return parameter or output -> description, as the docstring has them, and what is returned under `return`."""
    text = inspect.getdoc(function_of(name)) or ""
    _, _, arguments = text.partition("Args:\n")
    arguments, _, returned = arguments.partition("Returns:\n")
    found = re.findall(r"^    (\w+): (.+)$", arguments, re.MULTILINE)
    return dict(found) | {"return": " ".join(returned.split())}


def readme(name: str) -> str:
    """Return the README of a component."""
    function, described = function_of(name), descriptions(name)
    summary = (inspect.getdoc(function) or "").partition("\n")[0]
    (image,) = re.findall(r'image\("(\w+)"\)', (FOLDER / name / "component.py").read_text(encoding="utf-8"))
    inputs, outputs = [], []
    for one in inspect.signature(function).parameters.values():
        if one.name.startswith("output_"):
            kind = re.sub(r".*\b(\w+)\W*$", r"\1", str(getattr(one.annotation, "__args__", [one.annotation])[0]))
            outputs.append(f"| `{one.name}` | {kind} | {described[one.name]} |")
        else:
            kind = inspect.formatannotation(one.annotation).replace("typing.", "")
            default = "" if one.default is inspect.Parameter.empty else f"`{one.default!r}`".replace("'", '"')
            inputs.append(f"| `{one.name}` | `{kind}` | {default} | {described[one.name]} |")
    lines = [
        f"# {name}",
        "",
        summary,
        "",
        f"Image: `{image}`. The work is `{_work(name)}`.",
        "",
        "| input | type | default | meaning |",
        "|---|---|---|---|",
        *inputs,
        "",
        "| output | type | meaning |",
        "|---|---|---|",
        f"| returned | `{_returned(function)}` | {described['return']} |",
        *outputs,
        "",
        "Written by `make component-docs`.",
    ]
    return "\n".join(lines) + "\n"


def _returned(function: Any) -> str:
    kind = function.__annotations__["return"]
    if hasattr(kind, "_fields"):
        return ", ".join(kind._fields)
    return inspect.formatannotation(kind)


def _work(name: str) -> str:
    source = (FOLDER / name / "component.py").read_text(encoding="utf-8")
    (work,) = re.findall(r"program\.run\(\s*\"\w+\",\s+(entry\.\w+)", source)
    return f"ratchet.grains.{work}"


def main(arguments: list[str]) -> int:
    """Write the files, or with `--check` compare them. Returns the exit code."""
    stale = 0
    for name in names():
        path, text = FOLDER / name / "README.md", readme(name)
        if arguments == ["--check"]:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                sys.stderr.write(f"{path} is out of date; run: make component-docs\n")
                stale += 1
        else:
            path.write_text(text, encoding="utf-8")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
