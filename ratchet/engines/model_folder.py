"""What a model folder in Hugging Face's layout must hold, and what it must not.

Trap: the name of a file is all that is asked for before it is read, so that a folder in object storage is refused
before its gigabytes travel; whether the files fit each other is the loaders' to find.
"""

import json
from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ratchet.data.files import outside
from ratchet.errors import EngineError

WEIGHTS = ".safetensors"
TEXTS = (".json", ".jinja", ".model", ".txt")
"""Endings of everything else that belongs to a model: configuration, tokenizer, chat template."""

_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")
_PICKLED_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def check_model_folder(folder: Path) -> Path:
    """Return `folder` if it holds config.json, safetensors weights and a tokenizer, and no link that leads elsewhere.

    Weights in pickle files are refused: loading them would run code. A snapshot in the hub's cache may link to its own
    repository's blobs.
    """
    if not folder.is_dir():
        raise EngineError(f"expected a model folder, got {str(folder)!r}, which is no folder")
    _check_links(folder)
    check_file_names(str(folder), _files(folder))
    weight_files(folder)
    return folder


def check_file_names(place: str, names: Collection[str]) -> None:
    """Raise EngineError unless the files directly in a folder, here `names`, can be a model's."""
    if "config.json" not in names:
        raise EngineError(f"model folder {place!r} has no config.json")
    if not any(name.endswith(WEIGHTS) for name in names):
        pickled = sorted(name for name in names if any(fnmatch(name, pattern) for pattern in _PICKLED_WEIGHTS))
        found = f"only pickled weights ({', '.join(pickled)}), which are not loaded" if pickled else "no weights"
        raise EngineError(f"model folder {place!r} has {found}; expected *.safetensors")
    if not any(name in names for name in _TOKENIZER_FILES):
        raise EngineError(f"model folder {place!r} has no tokenizer; expected tokenizer.json")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model: those of the index where there is one, else all in the folder."""
    return [folder / name for name in weight_names(folder, _files(folder), place=str(folder))]


def weight_names(folder: Path, names: Collection[str], *, place: str) -> list[str]:
    """Those of the files `names` that hold the model's weights, by the index in `folder` where there is one.

    `place` is what errors call the folder.
    """
    index = folder / _INDEX
    if not index.is_file():
        return sorted(name for name in names if name.endswith(WEIGHTS))
    table = read_json(index).get("weight_map", {})
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise EngineError(f"expected the names of files by weight as weight_map of '{place}/{_INDEX}'")
    weights = sorted(set(table.values()))
    for name in weights:
        if name not in names:
            raise EngineError(f"'{place}/{_INDEX}' names {name!r}, which is no file of the model folder")
    return weights


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file of a model folder holds; EngineError where it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise EngineError(f"expected a JSON object in {str(path)!r}, got {type(content).__name__}")
    return content


def _files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}


def _check_links(folder: Path) -> None:
    for path in folder.rglob("*"):
        target = outside(path, folder) if path.is_symlink() else None
        if target is not None:
            raise EngineError(f"{str(path)!r} links to {str(target)!r}, outside the model folder")
