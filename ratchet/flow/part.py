"""What every part of a flow is: a small object whose arguments set config keys.

Trap: an argument that was given is binding, and a config that says otherwise is refused; one that was left out yields
to the config. Two parts are equal when they set the same keys to the same values, however they were written.
"""

import difflib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import wraps
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from ratchet.flow.kl import controller_repr

_Class = TypeVar("_Class", bound=type)


def sets(key: str, *, default: Any = MISSING, kw_only: bool = False) -> Any:
    """Return a field that sets the config key `key`; without a default it must be given."""
    return field(default=default, metadata={"key": key}, kw_only=kw_only)


class Part:
    """One part of a flow."""

    name: ClassVar[str]
    name_key: ClassVar[str | None] = None
    """Config key that the part's name sets."""
    given: frozenset[str] = frozenset()
    """Names of the arguments that were passed."""
    live: Any = None
    """A user's object itself, for a run in this process."""

    def keys(self, *, given_only: bool = False) -> dict[str, Any]:
        """Return config key -> value for everything that this part sets, or for the arguments that were passed."""
        found = {self.name_key: self.name} if self.name_key else {}
        for one in declared(self):
            if "key" in one.metadata and (one.name in self.given or not given_only):
                found[one.metadata["key"]] = plain(getattr(self, one.name))
        return found

    def code(self) -> list[dict[str, str]]:
        """Return the Python files that this part needs, as `{path, sha256, source}`."""
        return []

    def stays_here(self) -> str | None:
        """Return why this part cannot be written down and what to do about it, or None if it can."""
        return None

    @classmethod
    def arguments(cls, value: Callable[[str], Any]) -> dict[str, Any]:
        """Return argument -> value from a config; `value` gives a key's."""
        return {one.name: value(one.metadata["key"]) for one in declared(cls) if "key" in one.metadata}

    @classmethod
    def from_config(
        cls, config: Any, stated: frozenset[str] = frozenset(), *, without: frozenset[str] = frozenset()
    ) -> Self:
        """Return the part that sets what `config` holds.

        A value that is neither other than the default nor in `stated`, the dotted keys that the config's author wrote,
        counts as left out, as do the arguments in `without`.
        """
        known = {one.name: one for one in declared(cls)}
        kept = {}
        for name, value in cls.arguments(config.value).items():
            one = known[name]
            if name in without:
                continue
            if plain(value) != plain(one.default) or one.metadata.get("key") in stated:
                kept[name] = tuple(value) if isinstance(one.default, tuple) else value
        return cls(**kept)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Part):
            return NotImplemented
        return self.keys() == other.keys()

    def __hash__(self) -> int:
        return hash(json.dumps(self.keys(), sort_keys=True, default=str))

    def __repr__(self) -> str:
        shown = (f"{one.name}={show(getattr(self, one.name))}" for one in declared(self) if one.name in self.given)
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(sets, field))
def part(cls: _Class) -> _Class:
    """Make `cls` a frozen dataclass that knows its given arguments and names the nearest of an unknown one."""
    made: Any = dataclass(frozen=True, eq=False, repr=False)(cls)
    build: Callable[..., None] = made.__init__
    signature = inspect.signature(build)
    names = list(signature.parameters)[1:]

    @wraps(build)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in names:
                raise TypeError(f"{cls.__name__} has no argument {name!r}; {_nearest(name, names)}")
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{cls.__name__}: {error}") from None
        # Before the arguments are stored, so that a check after them can read it.
        object.__setattr__(self, "given", frozenset(list(bound.arguments)[1:]))
        build(self, *args, **kwargs)

    made.__init__ = init
    return cls


def declared(what: Any) -> tuple[Field[Any], ...]:
    """Return the arguments of a part, or of a class of parts."""
    return fields(what) if is_dataclass(what) else ()


def plain(value: Any) -> Any:
    """Return a value as JSON would hold it: tuples as lists."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return value


def show(value: Any) -> str:
    """Return how an argument is written."""
    return controller_repr(value) if type(value).__name__.endswith("KLController") else repr(value)


def _nearest(name: str, names: list[str]) -> str:
    if not names:
        return "it has none"
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    return f"the nearest is {near}, all are {', '.join(names)}"
