"""From the keys that users type to those of the schema: other spellings, verl's other keys, contradictions.

Trap: within one source (a file, or the command line) two names of one key must agree; from one source to the next the
later one counts, under whatever name it comes.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from ratchet.config.keys import key_fields, mapping_of, sections, takes_none, unknown
from ratchet.config.secrets import LONGEST, secret_faults, shown
from ratchet.config.spelling import DROP, note_of, spelled
from ratchet.config.verl_keys import OFF, RULES, rule_of

PSEUDO_KEYS: Mapping[str, tuple[str, ...]] = {
    "critic.enable": (),
    "data.seq_length": ("data.max_prompt_length", "data.max_response_length"),
}
"""Names that say something about other keys, and the keys of an earlier source that they count over;
`ratchet.config.resolve` takes them out again."""

_MOST_UNKNOWN = 20
"""Keys that mean nothing and are named one by one, with the nearest that does; it is searched for among hundreds."""

_PARENTS = frozenset(name.rpartition(".")[0] for rule in RULES for name in rule.names) - {"", "*"}


@dataclass(slots=True)
class Reading:
    """What was read so far."""

    values: dict[str, Any] = field(default_factory=dict)
    """Key of the schema, or of something below a free mapping -> value."""
    typed: dict[str, str] = field(default_factory=dict)
    """Key -> the name it came under."""
    inherited: set[str] = field(default_factory=set)
    """Keys whose value is another key's."""
    faults: list[str] = field(default_factory=list)
    unknown: int = 0
    """Keys that mean nothing."""
    ignored: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> keys of verl that were taken for it."""

    def read(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Take the (name, value) pairs of one source."""
        here: dict[str, tuple[str, Any]] = {}
        for typed, value in pairs:
            if isinstance(value, str) and "${" in value:
                self.faults.append(f"{typed}: {shown(typed, value)} refers to another key; write the value itself")
                continue
            key, meant = spelled(typed, value)
            if key in sections() or any(fnmatchcase(key, parent) for parent in _PARENTS):
                self._read_section(typed, key, meant, here)
            elif key in PSEUDO_KEYS or key in key_fields() or mapping_of(key) is not None:
                self._read_key(typed, key, meant, here)
            else:
                self._read_other(typed, key, meant)
        for pseudo, keys in PSEUDO_KEYS.items():
            if keys and pseudo not in here and all(key in here for key in keys):
                # An earlier source's word on keys that this one has all given itself.
                self.values.pop(pseudo, None)

    def _read_section(self, typed: str, key: str, value: Any, here: Mapping[str, Any]) -> None:
        if value is not None and value != {}:
            self.faults.append(f"{typed}: expected a section of keys, but it is {shown(typed, value)}")
        elif value is None:
            # On a command line, back to the defaults; in a file, a section without content.
            for name in [name for name in self.values if name.startswith(f"{key}.") and name not in here]:
                del self.values[name]

    def _read_key(self, typed: str, key: str, value: Any, here: dict[str, tuple[str, Any]]) -> None:
        first, known = here.get(key, (typed, None))
        if value is DROP or (value is None and known is not None and first != typed):
            return
        if known is not None and first != typed and known != value:
            notes = [note for note in (note_of(first), note_of(typed)) if note]
            because = f" ({notes[0]})" if notes else ""
            said = f"{first} is {shown(key, known)} and {typed} is {shown(key, value)}"
            self.faults.append(f"{said}, and both mean {key}{because}")
            return
        here[key] = (typed, value)
        older = [name for name in PSEUDO_KEYS.get(key, ()) if name not in here]
        for name in [name for name in self.values if name in (key, *older) or name.startswith(f"{key}.")]:
            del self.values[name]
        if value is None and (key in PSEUDO_KEYS or (key in key_fields() and not takes_none(key))):
            return
        self.values[key], self.typed[key] = value, typed

    def _read_other(self, typed: str, key: str, value: Any) -> None:
        rule = rule_of(key)
        if rule is None:
            self._add_unknown(typed)
        elif not rule.accepts(value):
            self.faults.append(f"{typed}: verl has it, Ratchet has not: {rule.reason}; it is {shown(key, value)}")
        elif rule.takes is not OFF and value is not None:
            self.ignored.setdefault(rule.reason, []).append(typed)

    def _add_unknown(self, typed: str) -> None:
        self.unknown += 1
        if self.unknown > _MOST_UNKNOWN:
            return
        said = unknown(typed) if len(typed) <= LONGEST else f"{typed[:LONGEST]}...: no such key"
        if said not in self.faults:
            self.faults.append(said)

    def all_faults(self, *, with_secrets: bool) -> list[str]:
        """Return what is wrong with what was read, what looks like a secret among it if that is asked for."""
        more = self.unknown - _MOST_UNKNOWN
        rest = [f"and {more} more keys that do not exist"] if more > 0 else []
        return [*self.faults, *rest, *(secret_faults(self.values) if with_secrets else ())]

    def label(self, key: str) -> str:
        """Return the name that a key, or something in it, was typed as, with the key where that is another."""
        for known, typed in self.typed.items():
            if key == known or key.startswith(f"{known}."):
                return key if typed == known else f"{typed} ({key})"
        return key

    def tree(self) -> dict[str, Any]:
        """Return the values as nested sections."""
        nested: dict[str, Any] = {}
        for key, value in self.values.items():
            *parents, last = key.split(".")
            section = nested
            for name in parents:
                section = section.setdefault(name, {})
            section[last] = dict(value) if isinstance(value, Mapping) else value
        return nested


def leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of everything in nested sections; a key whose value is a mapping stays whole."""
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and spelled(path, None)[0] not in key_fields():
            yield from leaves(value, f"{path}.")
        else:
            yield path, value
