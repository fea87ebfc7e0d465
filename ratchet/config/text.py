"""YAML as configs mean it.

Traps: YAML 1.1 reads `0.5_5` as 0.55, `1:30` as 90 and `1e-5` as text; here numbers are what they look like, so that a
band `lo_hi` stays one. Of two equal keys it keeps the last, and a few hundred bytes of aliases can mean terabytes: here
the first is refused, and what a text means is counted before it is made.
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from ratchet.errors import ConfigError
from ratchet.redaction import by_looks, kind_of

MAX_CHARACTERS = 8 * 2**20
"""Of one text: configs carry Python files, of a MiB each."""
MAX_NODES = 20_000
"""Values and keys of one text, an alias counted as all that it stands for."""
MAX_DEPTH = 50
"""Lists and mappings in each other."""

_INT, _FLOAT, _TEXT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:str"
_INTEGER = re.compile(r"[-+]?[0-9]+$")
_NUMBER = re.compile(
    r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$|[-+]?[0-9]+[eE][-+]?[0-9]+$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


class _Loader(yaml.SafeLoader):
    """SafeLoader with plain numbers, unequal keys and limits."""

    # Copied, since the table is the parent's.
    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in found if tag not in (_INT, _FLOAT)]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[int, int] = {}
        """Identity of a finished node -> how many nodes it means."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias = self.check_event(yaml.AliasEvent)
        start = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ComposerError(None, None, f"more than {MAX_DEPTH} lists and mappings in each other", start)
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if not is_alias:
            self._sizes[id(node)] = self._size(node, start)
        elif id(node) not in self._sizes:
            raise ComposerError(None, None, "an alias of what it is in", start)
        return node

    def _size(self, node: Any, start: Any) -> int:
        inner = [] if isinstance(node, yaml.ScalarNode) else node.value
        inner = [each for pair in inner for each in pair] if isinstance(node, yaml.MappingNode) else inner
        size = 1 + sum(self._sizes[id(each)] for each in inner)
        if size > MAX_NODES:
            raise ComposerError(None, None, f"more than {MAX_NODES} values, aliases counted as what they mean", start)
        return size


def _integer(loader: yaml.SafeLoader, node: yaml.Node) -> int:
    assert isinstance(node, yaml.ScalarNode)
    text = loader.construct_scalar(node)
    try:
        return int(text)
    except ValueError:
        # Python takes no more digits than are read in a moment.
        raise ConstructorError(None, None, f"an integer of {len(text)} digits", node.start_mark) from None


def _string(loader: yaml.SafeLoader, node: yaml.Node) -> str:
    assert isinstance(node, yaml.ScalarNode)
    text = str(loader.construct_scalar(node))
    if _NO_TEXT.search(text):
        # JSON escapes what is beyond 16 bits as two characters, which YAML takes one by one.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if _NO_TEXT.search(text):
        raise ConstructorError(None, None, "a character that no text can hold", node.start_mark)
    return text


def _mapping(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    assert isinstance(node, yaml.MappingNode)
    seen: set[Hashable] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, Hashable):
            if key in seen:
                raise ConstructorError(None, None, f"the key {key!r:.80} for the second time", key_node.start_mark)
            seen.add(key)
    made: dict[Hashable, Any] = {}
    yield made
    made.update(loader.construct_mapping(node))


# The first of two that match counts.
_Loader.add_implicit_resolver(_INT, _INTEGER, list("-+0123456789"))
_Loader.add_implicit_resolver(_FLOAT, _NUMBER, list("-+.0123456789"))
_Loader.add_constructor(_INT, _integer)
_Loader.add_constructor(_TEXT, _string)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def read_value(text: str, what: str) -> Any:
    """Return the value of YAML text; ConfigError, which `what` begins, where it is none or over a limit."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{what}: expected at most {MAX_CHARACTERS} characters, got {len(text)}")
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date of the month 13
        for mark in (getattr(error, "context_mark", None), getattr(error, "problem_mark", None)):
            if mark is not None and kind_of(text):
                # The excerpt of a line may begin within a secret, which would look like none.
                mark.buffer = None
        raise ConfigError(by_looks(f"{what} is not YAML: {error}")) from error


def read_mapping(text: str, source: str) -> dict[str, Any]:
    """Return the mapping of sections that YAML text is; an empty text is an empty one."""
    tree = read_value(text, source)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expected a mapping of sections, found {type(tree).__name__}")
    return tree
