"""Why a pod waits or what ended it, as one record, and the ways in which Kubernetes' messages are shortened."""

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "accelerator",
    "capacity",
    "node_selector",
    "taint",
    "volume",
    "no_node",
    "admission",
    "quota",
    "forbidden",
    "settings",
    "image",
    "sandbox",
    "scaling_up",
    "starting",
    "start_error",
    "out_of_memory",
    "evicted",
    "deadline",
    "preempted",
    "node_lost",
    "deleted",
    "rejected",
    "killed",
    "exit",
]
ACCIDENTS = frozenset(("preempted", "node_lost", "deleted", "rejected", "killed"))
"""Kinds that say nothing against the run: the same submission may well end otherwise."""
ENDED = ACCIDENTS | {"start_error", "out_of_memory", "evicted", "deadline", "exit"}
"""Kinds after which the pod does not come back by itself; the others wait."""
HARMLESS = frozenset(("starting", "scaling_up"))
"""Kinds of waiting that nobody has to do anything about."""

_PREEMPTION = re.compile(r",? (?:no new claims to deallocate, )?preemption: ")


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a pod waits, or what ended it."""

    kind: Kind
    message: str
    """What Kubernetes says, shortened."""
    advice: str
    """What to do, naming the command, the config key or the manifest."""

    @property
    def has_ended(self) -> bool:
        """Whether the pod is over; otherwise it waits."""
        return self.kind in ENDED


def shorten(text: str, limit: int = 400) -> str:
    """Return the message on one line, without what the scheduler says about preemption."""
    line = _PREEMPTION.split(" ".join(text.split()))[0].removesuffix(".")
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
