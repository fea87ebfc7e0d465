"""The requests that a run sends to an S3 server, and the harm that a rule does to some of them."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

Fault = Literal[
    "500",  # before or after the server did the work
    "503 SlowDown",  # likewise
    "timeout",  # likewise: accepted, and never answered
    "latency",  # answered, `seconds` later
    "reset",  # before: nothing reached the server; after: the work is done and the answer is lost
    "reset mid-request",  # half of the request's body is taken, and nothing reached the server
    "request truncated",  # half of the request's body reaches the server, and the connection ends
    "answer truncated",  # half of the answer's body reaches the client
    "answer headless",  # of the answer's head, its first line reaches the client
    "request flipped",  # one bit of the request's body is another one
    "answer flipped",  # one bit of the answer's body is another one
    "create-only ignored",  # the server does not see If-None-Match
    "outage",  # this request and every other one is refused, for `seconds`
]
FAULTS: tuple[Fault, ...] = get_args(Fault)
FOREVER = 10**9


@dataclass(slots=True)
class Request:
    """What a client asked for."""

    method: str
    target: str
    """Key without the bucket, and the query behind a question mark: `runs/a/run.json`, `?list-type=2&prefix=runs/`."""
    length: int
    """Bytes of the request's body."""
    is_create: bool = False
    """Whether it is a create-only put."""
    answered: int = 0
    """Bytes of the answer's body; 0 as long as there is none."""


@dataclass(kw_only=True)
class Rule:
    """Harm to some of the requests: to `times` of those that match, from the `nth` on (from 1)."""

    fault: Fault
    method: str = ""
    """A regular expression of the whole method; empty for every one."""
    target: str = ""
    """A regular expression that is searched in the target."""
    nth: int = 1
    times: int = 1
    is_after: bool = False
    """Whether the server does the work first, where a fault can come before and after it."""
    seconds: float = 0.5
    """Of latency, or of an outage."""
    seen: int = 0
    """Requests that matched."""
    done: int = 0
    """Requests that were harmed."""

    def strikes(self, request: Request) -> bool:
        """Count the request; whether it is one of those to harm."""
        if not re.fullmatch(self.method or ".*", request.method) or not re.search(self.target, request.target):
            return False
        if (self.fault == "create-only ignored") > request.is_create:
            return False
        self.seen += 1
        is_due = self.nth <= self.seen < self.nth + self.times
        self.done += is_due
        return is_due


_OBJECTS = {
    "run.json": r"/run\.json",
    "a claim": r"/owner/\d+\.json",
    "a submission": r"/submissions/\d+\.json",
    "a manifest": r"/manifest\.json",
    "where prompts were prepared": r"/prepared/[^/?]+",
    "a table": r"\.parquet",
    "a delta": r"/policy/[^?]+\.delta",
    "weights": r"/policy/[^?]+(?<!\.delta)",
    "a trainer state": r"/trainer_state/[^?]+",
    "an export": r"/export/[^?]+",
}
_VERBS = {method: (method, "$") for method in ("PUT", "GET", "HEAD", "DELETE")} | {
    "begin in parts": ("POST", r"\?uploads=$"),
    "PUT a part": ("PUT", r"\?.*partNumber="),
    "end in parts": ("POST", r"\?uploadId=[^&]*$"),
}
KINDS: dict[str, tuple[str, str]] = {
    f"{verb} of {name}": (method, f"{target}{query}")
    for name, target in _OBJECTS.items()
    for verb, (method, query) in _VERBS.items()
} | {"listing": ("GET", r"^\?list-type=2")}
"""Name -> method and pattern of the target, of every kind of request there may be."""
