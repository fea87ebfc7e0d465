"""How a user's object is written down: its file's text, its name in there, and its arguments as JSON.

Trap: what cannot be written down may still train here; it is refused when a run is compiled or submitted, with the
reason and what to do instead.
"""

import ast
import functools
import inspect
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

_TO_A_FILE = "move it to the top level of a Python file"


class StaysHere(Exception):
    """An object cannot be written down; the message says why, and what to do."""


@dataclass(frozen=True)
class Written:
    """An object as text: `name` in the file `code`, with `arguments`."""

    name: str
    code: dict[str, str]
    arguments: dict[str, Any] = field(default_factory=dict)


def write_down(thing: Any) -> Written:
    """Return a function, a `functools.partial` of one, or an instance of a user's class as text; or StaysHere."""
    if isinstance(thing, functools.partial):
        if thing.args:
            raise StaysHere("a partial of positional arguments: give them by name")
        inner = write_down(thing.func)
        return Written(inner.name, inner.code, inner.arguments | _json(thing.keywords, inner.name))
    if inspect.ismethod(thing):
        raise StaysHere(f"{name_of(thing)} is a method of a live object: pass the object, with __call__")
    if inspect.isfunction(thing):
        return Written(_qualified_name(thing), file_of(thing))
    kind = type(thing)
    if any(base.__module__.startswith("torch.nn.") for base in kind.__mro__):
        raise StaysHere(f"{name_of(thing)} is a live model: save it to a folder and pass RewardModel(path=folder)")
    name = _qualified_name(kind)
    return Written(name, file_of(kind), _json(_arguments(thing), name))


def name_of(thing: Any) -> str:
    """Return what messages call an object."""
    if isinstance(thing, functools.partial):
        return name_of(thing.func)
    return str(getattr(thing, "__qualname__", None) or type(thing).__qualname__)


def file_of(thing: Any) -> dict[str, str]:
    """Return the file of a function or class as `{path, sha256, source}`, or raise StaysHere."""
    from ratchet.config.user_code import read_code
    from ratchet.errors import ConfigError

    try:
        found = inspect.getsourcefile(inspect.unwrap(thing) if inspect.isfunction(thing) else thing)
    except (TypeError, OSError):
        found = None
    if found is None or not Path(found).is_file():
        raise StaysHere(f"{name_of(thing)} is in no file (a notebook, a prompt or a built-in): {_TO_A_FILE}")
    path = Path(found)
    try:
        entry = read_code(path, shown=_shown(path))
    except ConfigError as error:
        raise StaysHere(str(error)) from error
    _check_alone(entry["source"], path)
    return entry


def _qualified_name(thing: Any) -> str:
    name = str(thing.__qualname__)
    if "<lambda>" in name:
        raise StaysHere("a lambda has no name to find it by: write it as a function at the top level of a Python file")
    if "<locals>" in name:
        raise StaysHere(f"{name} is defined inside a function and may close over its variables: {_TO_A_FILE}")
    found: Any = sys.modules.get(thing.__module__)
    for one in name.split("."):
        found = getattr(found, one, None)
    if found is not thing:
        raise StaysHere(f"{thing.__module__} does not hold this {name} under its name: give each its own name there")
    return name


def _arguments(thing: Any) -> dict[str, Any]:
    """Return the arguments that make an equal object: a dataclass's fields, or attributes of the parameters' names."""
    kind = type(thing)
    if is_dataclass(thing):
        return {one.name: getattr(thing, one.name) for one in fields(thing) if one.init}
    state = getattr(thing, "__dict__", {})
    if kind.__init__ is object.__init__:
        if state:
            raise StaysHere(
                f"{name_of(thing)} was given {', '.join(state)} from outside: make them arguments of its __init__"
            )
        return {}
    found = {}
    for name, one in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        holder = next((attribute for attribute in (name, f"_{name}") if hasattr(thing, attribute)), None)
        if holder is None or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
            raise StaysHere(
                f"what {name_of(thing)} was given as {name} is not known: keep it as self.{name}, or make the class a "
                "dataclass"
            )
        found[name] = getattr(thing, holder)
    return found


def _json(arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
    for key, value in arguments.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise StaysHere(
                f"the argument {key} of {name} is a {type(value).__name__}, which JSON does not hold ({error}): pass "
                "a path, a name or numbers, and build it in __init__"
            ) from error
    found: dict[str, Any] = json.loads(json.dumps(dict(arguments)))
    return found


def _shown(path: Path) -> str:
    """Return a path that means the same on another machine: relative to the working directory, else the name alone."""
    try:
        return path.resolve().relative_to(Path.cwd().resolve()).as_posix()
    except (ValueError, OSError):
        return os.path.basename(path)


def _check_alone(source: str, path: Path) -> None:
    """Refuse a file that imports what lies beside it: one file travels."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            raise StaysHere(f"{path.name}, line {node.lineno} imports relatively, and one file travels: {_ALONE}")
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and (path.parent / f"{top}.py").is_file():
                raise StaysHere(
                    f"{path.name}, line {node.lineno} imports {top}.py beside it, and one file travels: {_ALONE}"
                )


_ALONE = "put both into one file, or install the package where the pods run"
