"""Config trees of a flow: what its user gave, with what its parts set laid over it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ratchet.errors import ConfigError
from ratchet.flow.part import Part, plain

_ALIASED = frozenset({"algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"})
"""Keys whose values have other names; they are compared once parsed."""


def read(config: Any) -> dict[str, Any]:
    """Return a mapping, a YAML file or a RunConfig as a nested dict of its own, of what was given."""
    from ratchet.config.load import copy_tree
    from ratchet.config.user_code import embed

    if config is None:
        return {}
    if isinstance(config, (str, Path)):
        path = Path(config)
        return embed(_yaml(path), folder=path.parent)
    if not isinstance(config, Mapping):
        config = config.model_dump(mode="json", exclude_unset=True)
    return copy_tree(config)


def lay_over(tree: dict[str, Any], part: Part) -> None:
    """Set the keys of `part` in `tree`; ConfigError where the tree says otherwise than an argument that was given.

    A default of the part's yields to the tree, under whatever spelling it has the key.
    """
    from ratchet.config import RunConfig
    from ratchet.config.load import section_of
    from ratchet.config.reading import Reading, leaves

    defaults, reading = RunConfig(), Reading()
    reading.read(leaves(tree))
    given = part.keys(given_only=True)
    for key, value in part.keys().items():
        if key in reading.values:
            if key in given and plain(reading.values[key]) != value:
                raise ConfigError(
                    f"{reading.label(key)} is {reading.values[key]!r} in the config and {_says(part, key)}"
                )
        elif key in given or plain(defaults.value(key)) != value:
            section, name = section_of(tree, key, what=key, place=" in the config")
            section[name] = value


def check_agreement(parsed: Any, part: Part) -> None:
    """Raise ConfigError if the parsed config, whatever spelling it came in, says otherwise than a given argument."""
    for key, value in part.keys(given_only=True).items():
        found = plain(parsed.value(key))
        if found != value:
            raise ConfigError(f"{key} is {found!r} in the config and {_says(part, key)}")


def embedded(entries: Sequence[Any]) -> list[dict[str, str]]:
    """Return Python files (paths, or mappings) as `{path, sha256, source}`, each once."""
    if not entries:
        return []
    from ratchet.config.user_code import embed

    found: list[dict[str, str]] = embed({"code": list(entries)})["code"]
    return found


def stop_if_loading() -> None:
    """End the loading of a user's file where it would start or write a run."""
    from ratchet.config.user_code import stop_if_loading

    stop_if_loading()


def stated(config: Any, prefix: str = "") -> frozenset[str]:
    """Return the dotted keys that a RunConfig was given."""
    found: set[str] = set()
    for name in config.model_fields_set:
        value = getattr(config, name)
        found |= stated(value, f"{prefix}{name}.") if hasattr(value, "model_fields_set") else {f"{prefix}{name}"}
    return frozenset(found)


def flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of what a RunConfig holds beside defaults; files by path and digest."""
    for name, one in type(config).model_fields.items():
        value = getattr(config, name)
        if hasattr(value, "model_fields_set"):
            yield from flat(value, f"{prefix}{name}.")
        elif prefix == "" and name == "code":
            yield from (("code", f"{entry.path} ({entry.sha256[:12]})") for entry in value)
        elif value != one.get_default(call_default_factory=True):
            yield f"{prefix}{name}", value


def _says(part: Part, key: str) -> str:
    return f"{part.keys()[key]!r} in {type(part).__name__}"


def _yaml(path: Path) -> dict[str, Any]:
    from ratchet.config.text import read_mapping

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from error
    return read_mapping(text, str(path))
