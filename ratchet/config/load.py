"""From YAML and dotted overrides to a checked RunConfig; errors name the key that was typed and the nearest that is."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ratchet.config import user_code
from ratchet.config.checks import config_warnings
from ratchet.config.keys import known_keys
from ratchet.config.reading import Reading, leaves
from ratchet.config.resolve import resolve
from ratchet.config.schema import RunConfig
from ratchet.config.secrets import shown
from ratchet.config.text import read_mapping, read_value
from ratchet.config.verl_keys import VALUES
from ratchet.errors import ConfigError
from ratchet.redaction import by_looks

__all__ = [
    "copy_tree",
    "known_keys",
    "load_config",
    "parse_config",
    "parse_text",
    "read_config_text",
    "section_of",
]

logger = logging.getLogger(__name__)


def load_config(path: str | Path | None = None, overrides: Sequence[str] = (), *, is_quiet: bool = False) -> RunConfig:
    """Read a YAML file, if one is given, then apply `key.subkey=value` overrides in order; values are YAML.

    Python files that the config names are read, and run. What has no effect is logged as a warning, unless `is_quiet`.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"cannot read the config file {path}: it is not UTF-8 ({error})") from error
        tree = read_mapping(text, str(path))
    source = str(path) if path else "the command line"
    folder = Path(path).parent if path else None
    return parse_config(tree, overrides, source=source, folder=folder, is_quiet=is_quiet)


def parse_config(
    tree: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    source: str = "the config",
    folder: Path | None = None,
    is_quiet: bool = False,
    is_stored: bool = False,
) -> RunConfig:
    """Check a nested mapping plus overrides; every fault is named in one ConfigError.

    Python files are looked for in the working directory, then in `folder`. `is_quiet` logs no warning, for what has
    been read before and what makes no run. `is_stored` takes what looks like a secret, too: a run that has stored it
    can still go on.
    """
    reading = Reading()
    reading.read(leaves(tree))
    reading.read(_overrides(overrides))
    resolve(reading)
    embedded = user_code.embed(reading.tree(), folder=folder)
    user_code.load_all(embedded)
    faults, config = reading.all_faults(with_secrets=not is_stored), None
    try:
        config = RunConfig.model_validate(embedded)
    except ValidationError as error:
        faults = [*faults, *_faults(error, reading)]
    if faults or config is None:
        listed = by_looks("\n".join(f"  {fault}" for fault in faults))
        raise ConfigError(f"{source} does not make a run:\n{listed}")
    if is_quiet:
        return config
    if reading.ignored:
        listed = "; ".join(f"{', '.join(keys)} ({reason})" for reason, keys in reading.ignored.items())
        logger.warning("%s: keys of verl that change nothing here: %s", source, listed)
    for warning in config_warnings(config):
        logger.warning("%s: %s", source, warning)
    return config


def parse_text(text: str, overrides: Sequence[str] = (), *, source: str = "the config") -> RunConfig:
    """Check YAML text plus overrides."""
    return parse_config(read_mapping(text, source), overrides, source=source)


def read_config_text(source: str, overrides: Sequence[str] = (), *, name: str = "the config") -> RunConfig:
    """Check what a config is given as: YAML text, which messages call `name`, or the path of a YAML file; "" is empty.

    Text is what begins with a brace, has several lines, or has a colon where YAML has one: before a space or at the
    end. Everybody who is given a config asks here, so that the same value is the same thing everywhere.
    """
    stripped = source.strip()
    if "\n" in source or ": " in stripped or stripped.startswith("{") or stripped.endswith(":"):
        return parse_text(source, overrides, source=name)
    return load_config(source or None, overrides)


def _overrides(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for override in overrides:
        key, separator, text = override.partition("=")
        # Hydra's way to add a key; here every key can be set.
        name = key.strip().lstrip("+")
        if not separator or not name or name.startswith("~"):
            raise ConfigError(f"override {shown('', override)}: expected key.subkey=value")
        value = read_value(text, f"override {shown('', override)}: the value")
        if isinstance(value, Mapping):
            found = list(leaves({name: value}))
            yield from found
        else:
            yield name, value


def _faults(error: ValidationError, reading: Reading) -> Iterator[str]:
    for fault in error.errors():
        parts = [str(part) for part in fault["loc"] if part != "[key]"]
        key, value = ".".join(parts), fault["input"]
        if key in reading.inherited:
            # Said of the key that it has its value from.
            continue
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            message = "no such key"
        known = next((found for name, found in VALUES.items() if key == name or key.startswith(f"{name}.")), ())
        if value in known:
            message = f"verl has {value!r}, Ratchet has not. {message}"
        if key and not isinstance(value, Mapping):
            message = f"{message}, but it is {shown(key, value)}"
        yield f"{reading.label(key)}: {message}" if key else message


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
