"""`python -m ratchet.config.reference` writes docs/configuration.md from the schema and the tables of names.

Trap: what is not in the schema's docstrings is not in the reference; a key without one is a fault of the schema.
"""

import json
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ratchet.config.keys import fields, section_of_field
from ratchet.config.schema import CodeFile, RunConfig
from ratchet.config.section import Section
from ratchet.config.spelling import INHERITED, PREFIXES, SPELLINGS
from ratchet.config.verl_keys import GROUPS, OFF, VALUES, Rule

PLACE = Path("docs/configuration.md")

_INTRODUCTION = """# Configuration

Written by `make config-reference` from the schema; edit the docstrings in `ratchet/config/` instead.

A run is configured by a YAML file, by `key.subkey=value` overrides, or by both; overrides are YAML and count over the
file, and the last one counts:

    ratchet train --config grpo.yaml data.train_batch_size=256 trainer.total_epochs=15

`python -m ratchet.trainer.main_ppo` and `torchrun -m ratchet.trainer.main_ppo` do the same, and
`ratchet.config.load_config(path, overrides)` returns what they read. `--num_gpus N` is `trainer.n_gpus_per_node=N`;
under torchrun the first process trains, with as many processes as torchrun started.

Keys are verl's wherever verl has them. A null stands for the default. Hydra's `+key=value` is read as `key=value`;
`${...}` is not expanded, and refused. An unknown key is an error that names the nearest one, and every fault is named
at once.

Batch sizes are global: `data.train_batch_size` prompts a step, `ppo_mini_batch_size` prompts an optimizer step. A size
that does not divide is no error: an epoch's last batch and a batch's last mini-batch are smaller; nothing is dropped.
"""

_RULES = """## Keys of verl that are none here

Three things can become of such a key: the value is what Ratchet does anyway or changes no result, and it is taken, with
one warning that lists all of them; the value switches something off (null, false, 0, an empty text or list, `disabled`)
that is not there, and it is taken; anything else is refused, with the reason below.
"""


def reference() -> str:
    """Return the whole page."""
    parts = [_INTRODUCTION, *_sections(), _spellings(), _RULES, *_rules(), _values()]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _sections() -> Iterator[str]:
    yield from _section("", RunConfig, "## Python files")
    for name, _, field in fields():
        inner = section_of_field(field)
        if inner is not None and any(section_of_field(item) is None for item in inner.model_fields.values()):
            yield from _section(name, inner, f"## `{name}`")
    yield from _section("code[]", CodeFile, "### A file of `code`")


def _section(name: str, section: type[BaseModel], heading: str) -> Iterator[str]:
    keys = {key: field for key, field in section.model_fields.items() if section_of_field(field) is None}
    about = _text(section.__doc__) if section is not RunConfig and section.__doc__ != Section.__doc__ else ""
    yield "\n\n".join(part for part in (heading, about) if part) + "\n"
    rows = [
        (f"`{key}`", _type(field), _default(name, key, field), _text(field.description)) for key, field in keys.items()
    ]
    yield _table(("key", "type", "default", "meaning"), rows)


def _spellings() -> str:
    rows = [(f"`{short}.*`", f"`{full}.*`", "") for short, full in PREFIXES.items()]
    rows += [(f"`{name}`", f"`{item.key}`", item.note) for name, item in SPELLINGS.items() if name != item.key]
    rows += [(f"`{name}`", "", item.note) for name, item in SPELLINGS.items() if name == item.key]
    table = _table(("also", "is", "note"), rows)
    return (
        "## Other spellings\n\nWhere verl has moved a key, and the short names of tutorials. Two names of one key\n"
        "with different values in one file, or on one command line, are an error that names both; an override counts\n"
        f"over the file, whatever the name.\n\n{table}"
    )


def _rules() -> Iterator[str]:
    for heading, rules in GROUPS.items():
        rows = [(_names(rule), _taken(rule), rule.reason) for rule in rules if rule.names != ("*._target_",)]
        yield f"### {heading}\n"
        yield _table(("keys", "taken", "reason"), rows)


def _values() -> str:
    rows = [(f"`{key}`", ", ".join(f"`{value}`" for value in values)) for key, values in VALUES.items()]
    table = _table(("key", "refused by name"), rows)
    return f"### Values\n\nThe tables of keys say what there is instead.\n\n{table}"


def _names(rule: Rule) -> str:
    """The names of a rule, those of several sections said once."""
    places: dict[str, list[str]] = {}
    for name in rule.names:
        section, _, last = name.rpartition(".")
        places.setdefault(last, []).append(section)
    groups: dict[tuple[str, ...], list[str]] = {}
    for last, found in places.items():
        groups.setdefault(tuple(found), []).append(last)
    parts = []
    for sections, lasts in groups.items():
        prefix = f"{sections[0]}." if len(sections) == 1 and sections[0] else ""
        where = "" if len(sections) == 1 else " of " + ", ".join(f"`{section or 'the top'}`" for section in sections)
        parts.append(", ".join(f"`{prefix}{last}`" for last in lasts) + where)
    return "; ".join(parts)


def _taken(rule: Rule) -> str:
    if rule.takes is None:
        return "any value"
    if rule.takes is OFF:
        return "off"
    values = [value for value in rule.takes if value is not None]
    return ", ".join(f"`{json.dumps(value)}`" for value in values) or "null"


def _default(section: str, key: str, field: FieldInfo) -> str:
    inherited = INHERITED.get(f"{section}.{key}")
    value = field.get_default(call_default_factory=True)
    shown = f"`{json.dumps(value, default=str)}`"
    return f"that of `{inherited}`, or {shown}" if inherited else shown


def _type(field: FieldInfo) -> str:
    shown = _type_name(field.annotation)
    for item in field.metadata:
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
            bound = getattr(item, name, None)
            shown += f", {sign} {bound}" if bound is not None else ""
    return shown


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = FieldInfo.from_annotation(annotation)
        return _type(bounds)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if item is type(None) else _type_name(item) for item in arguments)
    if origin is tuple:
        items = arguments[:1] if arguments[-1] is Ellipsis else arguments
        return "list of " + ("" if arguments[-1] is Ellipsis else f"{len(items)} ") + _type_name(items[0])
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation.__name__.removesuffix("Config").removesuffix("File").lower() or "file"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}.get(annotation, "")


def _text(text: str | None) -> str:
    return " ".join((text or "").split())


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def main() -> None:
    """Write the page to the place that is given, or to docs/."""
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else PLACE
    place.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
