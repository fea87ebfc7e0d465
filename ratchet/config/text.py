"""YAML as configs mean it.

Trap: YAML 1.1 reads `0.5_5` as 0.55, `1:30` as 90 and `1e-5` as text; here numbers are what they look like, so that a
band `lo_hi` stays one.
"""

import re
from typing import Any

import yaml

from ratchet.errors import ConfigError

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_INTEGER = re.compile(r"[-+]?[0-9]+$")
_NUMBER = re.compile(
    r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$|[-+]?[0-9]+[eE][-+]?[0-9]+$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with plain numbers."""

    # Copied, since the table is the parent's.
    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in found if tag not in (_INT, _FLOAT)]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _integer(loader: yaml.SafeLoader, node: yaml.Node) -> int:
    assert isinstance(node, yaml.ScalarNode)
    return int(loader.construct_scalar(node))


# The first of two that match counts.
_Loader.add_implicit_resolver(_INT, _INTEGER, list("-+0123456789"))
_Loader.add_implicit_resolver(_FLOAT, _NUMBER, list("-+.0123456789"))
_Loader.add_constructor(_INT, _integer)


def read_value(text: str, what: str) -> Any:
    """Return the value of YAML text; ConfigError, which `what` begins, where it is none."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} is not YAML: {error}") from error


def read_mapping(text: str, source: str) -> dict[str, Any]:
    """Return the mapping of sections that YAML text is; an empty text is an empty one."""
    tree = read_value(text, source)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expected a mapping of sections, found {type(tree).__name__}")
    return tree
