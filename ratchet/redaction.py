"""Secrets taken out of texts that people and files get to see: logs, tracebacks, statuses, messages.

Trap: nobody knows a secret by its looks alone. What is found is what this process was given as a secret, in a variable
that is called like one, and what has the form of one: a login or a signature in an address, a maker's token, a key.
"""

import logging
import os
import re
from collections.abc import Sequence

HIDDEN = "***"
_SHORTEST = 8
"""Characters of a variable's value that is looked for; a shorter one would be found everywhere."""

_LOGIN = re.compile(r"(://)[^/\s@?#'\"]+@")
_SIGNATURE = re.compile(
    r"([?&;](?:x-amz-(?:signature|credential|security-token)|x-goog-(?:signature|credential)|awsaccesskeyid|signature|sig|"
    r"(?:access_?|auth_?|id_?|session_?)?token|api_?key|key|password|secret)=)[^&;#\s'\"]+",
    re.IGNORECASE,
)
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9_-])(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}|"
    r"(?:AKIA|ASIA)[A-Z0-9]{16}|sk-[A-Za-z0-9_-]{20,}|xox[abprs]-[A-Za-z0-9-]{10,}|glpat-[A-Za-z0-9_-]{20,}|"
    r"eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
)
_HEADER = re.compile(
    r"((?:authorization|x-amz-security-token|x-auth-token|(?:set-)?cookie)['\"]?\s*[:=]\s*(?:b(?=['\"]))?['\"]?)[^'\"\r\n]+",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|ACCESS_KEY|API_KEY|AUTHORIZATION|COOKIE|CREDENTIAL")


def hidden(text: str, values: Sequence[str] | None = None) -> str:
    """Return the text with everything that is known or looks like a secret as ***.

    `values` are the known ones; None looks for them among this process's variables.
    """
    for value in _values() if values is None else values:
        text = text.replace(value, HIDDEN)
    text = _HEADER.sub(rf"\g<1>{HIDDEN}", text)
    return by_looks(text)


def by_looks(text: str) -> str:
    """Return the text with logins and signatures of addresses, tokens and private keys as ***."""
    text = _LOGIN.sub(rf"\g<1>{HIDDEN}@", text)
    text = _SIGNATURE.sub(rf"\g<1>{HIDDEN}", text)
    return _TOKEN.sub(HIDDEN, text)


def kind_of(text: str) -> str:
    """Return what kind of secret a text looks like or holds, "" for none."""
    if _LOGIN.search(text):
        return "an address with a login"
    if _SIGNATURE.search(text):
        return "an address with a key or signature"
    return "what looks like a token or a private key" if _TOKEN.search(text) else ""


class HidingFormatter(logging.Formatter):
    """Formats as another formatter does, tracebacks with it, without secrets."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self.inner = inner
        # Pods have hundreds of variables, and a step logs a dozen lines.
        self._values = _values()

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's text."""
        return hidden(self.inner.format(record), self._values)


def _values() -> list[str]:
    """The secrets among this process's variables, the longest first; places of files are none."""
    found = set()
    for name, value in os.environ.items():
        if _VARIABLE.search(name.upper()) and not name.upper().endswith(("_ID", "_FILE", "_PATH", "_ENV")):
            # Of "Bearer 6f..", the token counts by itself.
            found |= {value, value.strip().rpartition(" ")[2]}
    return sorted((value for value in found if len(value) >= _SHORTEST and value[0] != "/"), key=len, reverse=True)
