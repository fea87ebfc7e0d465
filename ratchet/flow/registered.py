"""Advantages and policy losses that a user registered: known by name, written down as the file that registers them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from ratchet.errors import ConfigError
from ratchet.flow.user_object import StaysHere, file_of, name_of, write_down

if TYPE_CHECKING:
    from ratchet.algorithms.catalog import Catalog


@dataclass(frozen=True)
class Registered:
    """One entry of a catalog, and its function where a user wrote it."""

    name: str
    function: Callable[..., Any] | None

    @classmethod
    def advantage(cls, thing: Any) -> Self:
        """Return the estimator of that name, or that is that function."""
        from ratchet.algorithms.catalog import ADVANTAGES

        return cls._find(ADVANTAGES, thing, "register_advantage")

    @classmethod
    def policy_loss(cls, thing: Any) -> Self:
        """Return the policy loss of that name, or that is that function."""
        from ratchet.algorithms.catalog import POLICY_LOSSES

        return cls._find(POLICY_LOSSES, thing, "register_policy_loss")

    @classmethod
    def _find(cls, catalog: "Catalog", thing: Any, decorator: str) -> Self:
        if isinstance(thing, str):
            try:
                entry = catalog.get(thing)
            except ValueError as error:
                raise ConfigError(f"{error}; your own is known once its module is imported") from error
        else:
            found = (catalog.get(name) for name in catalog.names())
            entries = [one for one in found if one.home is thing]
            if not entries:
                raise ConfigError(f"{name_of(thing)} is not registered: write @{decorator}(name) above it")
            entry = entries[0]
        return cls(entry.name, None if isinstance(entry.home, str) else entry.home)

    def code(self) -> list[dict[str, str]]:
        """Return the file that registers it, if a user wrote it and the file can be read."""
        if self.function is None:
            return []
        try:
            return [file_of(self.function)]
        except StaysHere:
            return []

    def stays_here(self) -> str | None:
        """Return why another process could not register it, or None if it can."""
        if self.function is None:
            return None
        try:
            write_down(self.function)
        except StaysHere as error:
            return str(error)
        return None
