"""Every key of the schema by its dotted name, and the nearest one to a name that is none."""

import difflib
import types
from collections.abc import Iterator
from functools import cache
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ratchet.config.schema import RunConfig
from ratchet.config.spelling import PREFIXES, SPELLINGS, long_name


def known_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key."""
    return (name for name, _, field in fields(section, prefix) if section_of_field(field) is None)


def fields(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, type[BaseModel], FieldInfo]]:
    """Yield (dotted name, its section, the field) of every section and key, a section before what is in it."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", section, field
        inner = section_of_field(field)
        if inner is not None:
            yield from fields(inner, f"{prefix}{name}.")


def section_of_field(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a field holds, or None for a key."""
    inner = field.annotation
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


@cache
def key_fields() -> dict[str, FieldInfo]:
    """Every key and its field."""
    return {name: field for name, _, field in fields() if section_of_field(field) is None}


@cache
def sections() -> frozenset[str]:
    """Every section, under each of its names."""
    named = {name for name, _, field in fields() if section_of_field(field) is not None}
    parents = {name.rpartition(".")[0] for name in (*SPELLINGS, *PREFIXES, *PREFIXES.values())}
    return frozenset(named | parents | set(PREFIXES)) - {""}


def takes_none(key: str) -> bool:
    """Whether null is a value of the key, rather than another way to ask for its default."""
    annotation: Any = key_fields()[key].annotation
    return get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation)


def mapping_of(key: str) -> str | None:
    """Return the key that holds a free mapping which `key` is in, such as custom_reward_function.reward_kwargs."""
    *parents, _ = key.split(".")
    for length in range(len(parents), 0, -1):
        name = ".".join(parents[:length])
        if name in key_fields():
            return name if get_origin(key_fields()[name].annotation) is dict else None
    return None


def unknown(typed: str) -> str:
    """Return what is to be said about a name that means nothing: the part that is wrong, and the nearest key."""
    parts, full = typed.split("."), long_name(typed).split(".")
    for length in range(1, len(full)):
        name = ".".join(full[:length])
        if name in key_fields():
            return f"{typed}: {name} is one value, not a section"
        if name not in sections():
            # The whole section is misspelt: its own name is what is wrong.
            parts, full = parts[: len(parts) - (len(full) - length)] or parts[:1], full[:length]
            break
    name = ".".join(full)
    names = [*key_fields(), *sorted(sections()), *SPELLINGS]
    same = [known for known in names if known.rpartition(".")[2] == full[-1]]
    # Policy and critic have keys in common; who does not say critic means the policy.
    same = [known for known in same if "critic" in name or not known.startswith("critic.")] or same
    near = difflib.get_close_matches(name, same or names, n=1, cutoff=0.0)[0]
    return f"{'.'.join(parts)}: no such key; the nearest is {near}"
