"""A sampler in a process of its own: `python -m ratchet.engines.sampler_process`, started by `dedicated_samplers`.

It does what it is told over its connection, one call after another, and ends when that is closed: with its starter, or
when it is told to.
"""

import os
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from ratchet.errors import RatchetError

ADDRESS, KEY = "RATCHET_SAMPLER_ADDRESS", "RATCHET_SAMPLER_KEY"
"""Variables that hold the place of the starter's connection, and its key in hexadecimal."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a process is told first."""

    name: str
    """Of the sampler: "hf" or "vllm"."""
    model_folder: Path
    settings: dict[str, Any]
    device: str
    """"cpu", or "cuda" for the one GPU that the process sees."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the group meets that weights are sent in."""

    host: str
    port: int
    rank: int
    """Of `size`; rank 0 sends."""
    size: int


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong in a call."""

    message: str
    is_known: bool
    """Whether it is an error of Ratchet's own, whose message says all."""


def main() -> None:
    """Connect and serve."""
    from ratchet.environment import set_defaults, set_log_level

    set_defaults()
    set_log_level()
    with Client(os.environ.pop(ADDRESS), authkey=bytes.fromhex(os.environ.pop(KEY))) as connection:
        _serve(connection)


def _serve(connection: Connection) -> None:
    served = _Served()
    try:
        while True:
            try:
                method, arguments = connection.recv()
            except EOFError:
                return
            answer: Any
            try:
                answer = getattr(served, method)(*arguments)
            except RatchetError as error:
                answer = Failure(str(error), is_known=True)
            except Exception as error:  # its starter decides what it means
                sys.stderr.write(traceback.format_exc())
                answer = Failure(f"{type(error).__name__}: {error}", is_known=False)
            connection.send(answer)
            if method == "close":
                return
    finally:
        served.close()


class _Served:
    """The methods that can be called."""

    def __init__(self) -> None:
        self._sampler: Any = None
        self._group: Any = None
        self._device: Any = None

    def start(self, start: Start) -> None:
        from ratchet.engines.open_sampler import open_sampler
        from ratchet.engines.process_group import local_device

        self._device = local_device(start.device)
        self._sampler = open_sampler(start.name, start.model_folder, **start.settings)

    def meet(self, meeting: Meeting) -> None:
        from ratchet.engines.broadcast import WeightGroup, rendezvous

        store = rendezvous(meeting.host, meeting.port, meeting.size, is_server=False)
        self._group = WeightGroup(store, meeting.rank, meeting.size, self._device)

    def load_weights(self, packed: Any) -> None:
        self._sampler.load_weights(self._group.receive(packed).items())

    def __getattr__(self, name: str) -> Any:
        if name not in ("sample", "fingerprint", "prompt_log_probs", "sleep"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def close(self) -> None:
        sampler, self._sampler, self._group = self._sampler, None, None
        if sampler is not None:
            sampler.close()


if __name__ == "__main__":
    # By the name under which its starter knows the types of the answers.
    from ratchet.engines import sampler_process

    sampler_process.main()
