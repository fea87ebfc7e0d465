"""From YAML and dotted overrides to a checked RunConfig; errors name the key and the nearest one that exists."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ratchet.config.schema import RunConfig
from ratchet.errors import ConfigError


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, if one is given, then apply `key.subkey=value` overrides in order; values are YAML."""
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"cannot read the config file {path}: it is not UTF-8 ({error})") from error
        tree = _mapping(text, str(path))
    return parse_config(tree, overrides, source=str(path) if path else "the command line")


def parse_config(tree: Mapping[str, Any], overrides: Sequence[str] = (), *, source: str = "the config") -> RunConfig:
    """Check a nested mapping plus overrides; every fault is named in one ConfigError."""
    merged = copy_tree(tree)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"override {override!r}: expected key.subkey=value")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {override!r}: the value is not YAML: {error}") from error
        section, name = section_of(merged, key.strip(), what=f"override {key.strip()}")
        section[name] = value
    try:
        return RunConfig.model_validate(_drop_empty(merged))
    except ValidationError as error:
        faults = "\n".join(f"  {line}" for line in _faults(error))
        raise ConfigError(f"{source} does not make a run:\n{faults}") from error


def parse_text(text: str, overrides: Sequence[str] = (), *, source: str = "the config") -> RunConfig:
    """Check YAML text plus overrides."""
    return parse_config(_mapping(text, source), overrides, source=source)


def known_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key."""
    for name in section.model_fields:
        inner = _section(section, name)
        if inner is not None:
            yield from known_keys(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _mapping(text: str, source: str) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expected a mapping of sections, found {type(tree).__name__}")
    return tree


def _faults(error: ValidationError) -> Iterator[str]:
    keys = list(known_keys())
    names = keys + sorted({key.rpartition(".")[0] for key in keys})
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            same_name = [known for known in names if known.rpartition(".")[2] == key.rpartition(".")[2]]
            near = difflib.get_close_matches(key, same_name or names, n=1, cutoff=0.0)[0]
            yield f"{key}: no such key; the nearest is {near}"
        else:
            message = fault["msg"].removeprefix("Value error, ")
            yield f"{key}: {message}, but it is {fault['input']!r}" if key else message


def section_of(tree: dict[str, Any], key: str, *, what: str, place: str = "") -> tuple[dict[str, Any], str]:
    """Return the mapping that holds the dotted `key`, making what is missing of it, and the key's last name.

    A section that is no mapping is a ConfigError, which `what` begins and `place` says where.
    """
    *sections, last = key.split(".")
    for name in sections:
        inner = tree.get(name)
        if inner is None:
            inner = tree[name] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{what}: {name} is {inner!r}{place}, not a section")
        tree = inner
    return tree, last


def copy_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested mappings as dicts of their own."""
    return {key: copy_tree(value) if isinstance(value, Mapping) else value for key, value in tree.items()}


def _drop_empty(tree: Mapping[str, Any], section: type[BaseModel] = RunConfig) -> dict[str, Any]:
    """Leave out sections that a YAML file names without content."""
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        inner = _section(section, key)
        if inner is not None and isinstance(value, Mapping):
            kept[key] = _drop_empty(value, inner)
        elif inner is None or value is not None:
            kept[key] = value
    return kept


def _section(section: type[BaseModel], key: str) -> type[BaseModel] | None:
    field = section.model_fields.get(key)
    inner = field.annotation if field else None
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None
