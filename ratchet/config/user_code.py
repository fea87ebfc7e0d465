"""A user's Python files as part of the configuration: read once, known by digest, executed once a process.

Trap: a config that names code executes that code when it is read. A file that this process has imported already, or is
running as its main program, is never executed a second time: its names and registrations are there.
"""

import hashlib
import linecache
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ratchet.errors import ConfigError

MAX_BYTES = 2**20
"""Most bytes of one file; a config is read by every pod and stored with every submission."""

LIVE = "<live>"
"""In place of a file's path: the object lives in the process that made the config, and nowhere else."""

_REWARD = "custom_reward_function"
_lock = threading.RLock()
_loading = threading.local()


class ProgramStart(BaseException):
    """Ends the execution of a user's file where its main program would start a run; what stands above it is defined.

    No Exception, so that a file's own error handling lets it through.
    """


def stop_if_loading() -> None:
    """Called by everything that starts or writes a run: a file that is only being loaded goes no further."""
    if getattr(_loading, "depth", 0):
        raise ProgramStart


def read_code(path: str | Path, *, shown: str | None = None) -> dict[str, str]:
    """Return `{path, sha256, source}` of a Python file; ConfigError if it cannot travel. `shown` replaces the path."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the Python file {path}: {error.strerror}") from error
    return _checked({"path": shown or str(path)}, data)


def embed(tree: Mapping[str, Any], *, folder: Path | None = None) -> dict[str, Any]:
    """Return the config tree with every Python file that it names in `code`: path, sha256 and source.

    Files are named by `code` (paths alone, or mappings with `path`) and by `custom_reward_function.path`, relative to
    the working directory or else to `folder`, which is the config file's. Where source and sha256 are both given they
    must agree, and the file is not read. The tree that was passed stays as it is.
    """
    given = tree.get("code")
    if given is None:
        given = []
    if isinstance(given, str):
        given = [given]
    if isinstance(given, Mapping) or not isinstance(given, Sequence):
        raise ConfigError(f"code is {given!r}: expected a list of Python files")
    entries = [_embedded(item, folder) for item in given]
    hook = tree.get(_REWARD)
    path = hook.get("path") if isinstance(hook, Mapping) else None
    if path and isinstance(path, str) and path not in {LIVE, *(entry["path"] for entry in entries)}:
        entries.append(_embedded(path, folder))
    merged = merge(entries)
    return {**tree, "code": merged} if merged else {key: value for key, value in tree.items() if key != "code"}


def merge(entries: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return the embedded files without repetition; ConfigError where one path stands for two texts."""
    found: dict[str, dict[str, str]] = {}
    for entry in entries:
        known = found.setdefault(entry["path"], dict(entry))
        if known["sha256"] != entry["sha256"]:
            raise ConfigError(f"code: two different files are called {entry['path']}; rename one")
    return list(found.values())


def load_all(tree: Mapping[str, Any]) -> list[ModuleType]:
    """Execute the files of an embedded tree in order, so that what they register exists; return their modules."""
    return [load_module(entry["source"], entry["sha256"], entry["path"]) for entry in tree.get("code") or ()]


def load_object(entries: Iterable[Any], path: str, name: str) -> Any:
    """Return `name` (dots for what is nested) of the file `path`, from the `code` of a config or of a tree."""
    if path == LIVE:
        raise ConfigError(f"{name} was a live object of the process that made this config, and is in no file")
    plain = [entry if isinstance(entry, Mapping) else entry.model_dump() for entry in entries]
    entry = next((entry for entry in plain if entry["path"] == path), None)
    if entry is None:
        known = ", ".join(entry["path"] for entry in plain) or "nothing"
        raise ConfigError(f"the config's code does not hold {path!r}; it holds {known}")
    found: Any = load_module(entry["source"], entry["sha256"], path)
    for part in name.split("."):
        if not hasattr(found, part):
            names = [known for known in vars(found) if not known.startswith("_")]
            raise ConfigError(f"{path} has no {name!r}; it defines {', '.join(names) or 'nothing'}")
        found = getattr(found, part)
    return found


def load_module(source: str, sha256: str, name: str) -> ModuleType:
    """Return the module of a user's file; each distinct digest is executed once a process.

    `name` is the file's path, which tracebacks show. A fault of the file's own is a ConfigError that names the line.
    """
    key = f"ratchet_user_{sha256}"
    with _lock:
        known = sys.modules.get(key) or _running(sha256, name)
        if known is not None:
            return known
        module = ModuleType(key)
        # Tracebacks show source lines only of files that linecache knows; the path may be another machine's.
        shown = f"<{name}>" if not Path(name).is_file() else name
        linecache.cache[shown] = (len(source), None, source.splitlines(keepends=True), shown)
        module.__file__ = shown
        sys.modules[key] = module
        try:
            _execute(module, source, shown)
        except BaseException:
            del sys.modules[key]
            raise
        return module


def _execute(module: ModuleType, source: str, shown: str) -> None:
    _loading.depth = getattr(_loading, "depth", 0) + 1
    try:
        # As bytes, so that a byte order mark or a coding line is read as Python reads files.
        exec(compile(source.encode(), shown, "exec", dont_inherit=True), module.__dict__)
    except ProgramStart:
        pass
    except SyntaxError as error:
        raise ConfigError(f"{shown}, line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        # A user's file may raise anything; its own line says more than where it was loaded from.
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == shown]
        place = f", line {lines[-1]}" if lines else ""
        raise ConfigError(f"{shown}{place}: {type(error).__name__}: {error}") from error
    finally:
        _loading.depth -= 1


def _running(sha256: str, path: str) -> ModuleType | None:
    """Return the module of this very text that the process has imported, or runs as its main program."""
    name = Path(path).name
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        # A process has thousands of modules, and a Path takes its time.
        if not isinstance(file, str) or not file.endswith(name) or Path(file).name != name:
            continue
        try:
            data = Path(file).read_bytes()
        except OSError:
            continue
        if hashlib.sha256(data).hexdigest() == sha256:
            return module
    return None


def _embedded(item: Any, folder: Path | None) -> dict[str, str]:
    entry: dict[str, Any] = {"path": item} if isinstance(item, (str, Path)) else dict(_mapping(item))
    unknown = set(entry) - {"path", "sha256", "source"}
    if unknown:
        raise ConfigError(f"code: {sorted(unknown)[0]!r} is no key of a file; it has path, sha256 and source")
    for key, value in entry.items():
        if not isinstance(value, (str, Path)):
            raise ConfigError(f"code: {key} is {value!r}, not text")
    path, source = str(entry.get("path") or ""), entry.get("source") or ""
    if not path:
        raise ConfigError("code: a file has no path")
    if source:
        return _checked({"path": path, "sha256": entry.get("sha256") or ""}, str(source).encode())
    here = Path(path).expanduser()
    found = here if here.is_file() or folder is None else folder / here
    read = read_code(found if found.is_file() else here, shown=path)
    return _checked({"path": path, "sha256": entry.get("sha256") or ""}, read["source"].encode())


def _mapping(item: Any) -> Mapping[str, Any]:
    if not isinstance(item, Mapping):
        raise ConfigError(f"code: {item!r} is no Python file; expected a path, or path, sha256 and source")
    return item


def _checked(entry: Mapping[str, str], data: bytes) -> dict[str, str]:
    path = entry["path"]
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{path} has {len(data)} bytes, and a config carries files of at most {MAX_BYTES}; keep data out of it, "
            "or install the code in the image"
        )
    sha256 = hashlib.sha256(data).hexdigest()
    if entry.get("sha256") and entry["sha256"] != sha256:
        raise ConfigError(f"{path}: its sha256 is {sha256}, and the config says {entry['sha256']}")
    try:
        source = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error
    return {"path": path, "sha256": sha256, "source": source}
