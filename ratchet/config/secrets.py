"""What looks like a secret in a config: refused before it is stored, and never repeated in a message.

A run keeps its config, and so does MLflow. Trap: nobody can know all secrets by their looks; a password that is typed
as the value of a harmless key passes. What is found here is what people paste: addresses with a login or a signature,
tokens with a maker's prefix, and values of keys that are called like secrets.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ratchet.redaction import HIDDEN, by_looks, kind_of

_SECRET_NAME = re.compile(
    r"(?:^|[._-])(?:password|passwd|passphrase|secret|credentials?|authorization|private_?key|"
    r"(?:api|access|secret|account)_?key|(?:access|auth|bearer|session|api|hf)_?token)$",
    re.IGNORECASE,
)
LONGEST = 200
"""Characters of a value that a message repeats."""


def shown(key: str, value: Any) -> str:
    """Return `repr(value)` as a message may show it: without what looks like a secret, and not at any length."""
    if isinstance(value, str) and _SECRET_NAME.search(key):
        return repr(HIDDEN)
    text = by_looks(repr(value))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"


def secret_faults(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is to be said about each key whose value would store a secret with the run; no value is repeated.

    Python files (`code`) are left alone: an example in a comment is no secret, and what they hold is their author's.
    """
    for key, value in values.items():
        if key.partition(".")[0] != "code":
            yield from _faults(key, value)


def _faults(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _faults(f"{key}.{name}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _faults(f"{key}[{index}]", inner)
    elif isinstance(value, str):
        kind = kind_of(value)
        if not kind and value and _SECRET_NAME.search(key):
            kind = "the value of a key that is called like a secret"
        if kind:
            yield (
                f"{key}: {kind}, which would be stored with the run and in MLflow; keep it in the environment "
                "(docs/security.md, Secrets)"
            )
