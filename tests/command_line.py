"""The command line in the test's own process."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from ratchet import cli


@dataclass(frozen=True)
class Finished:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """What was printed, line by line."""
        return self.out.split("\n")[:-1]

    @property
    def words(self) -> str:
        """What was printed, as one line."""
        return " ".join(self.out.split())


Ratchet = Callable[..., Finished]


def in_this_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ratchet:
    """What runs the command line with the arguments that it is given, as its entry point does."""

    def run(*arguments: object) -> Finished:
        monkeypatch.setattr(sys, "argv", ["ratchet", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return Finished(end.value.code, captured.out, captured.err)

    return run
