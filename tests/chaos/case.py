"""What a case of fault injection is, what became of it, and what every case is given."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from demo.servers import S3Server
from ratchet.config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One fault at one boundary of one program."""

    kind: str
    """"process", "storage", "mlflow", "rivals", "resume"."""
    fault: str
    """"SIGKILL", "disk full", "503 SlowDown", ..."""
    grain: str
    """"segment", "step", "stage", or "-" where it does not matter."""
    boundary: str
    """Where it strikes, readable and stable: "step-000002/rollout manifest, before", "PUT of a part, 3rd", ..."""
    params: tuple[tuple[str, Any], ...] = ()
    """What else the case is told, in pairs."""

    @property
    def name(self) -> str:
        """Unique among all cases, and a file's name."""
        words = re.sub(r"[^A-Za-z0-9]+", "-", f"{self.kind} {self.fault} {self.grain} {self.boundary}").strip("-")
        digest = hashlib.sha256(repr((self.kind, self.fault, self.grain, self.boundary, self.params)).encode())
        return f"{words[:100]}-{digest.hexdigest()[:8]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a run that a fault struck."""

    survived: bool
    redone_seconds: float
    """Seconds of stages that were computed again because of the fault, 0 where nothing was."""
    redone_stages: int
    detail: str = ""
    """Why it did not survive, or what was seen."""


class Bench(Protocol):
    """What every case needs; made once for each worker process."""

    model: Path
    """A tiny model's folder."""
    problems: Path
    """Problems in GSM8K's JSON Lines."""
    folder: Path
    """Scratch of this worker."""

    def config(self, grain: str, **overrides: Any) -> RunConfig:
        """Return a fixed tiny config: a few steps, deltas, trainer states, evaluation, export; keys are dotted."""

    def reference(self, grain: str, **overrides: Any) -> dict[str, str]:
        """Return place -> content digest of an uninterrupted run under this config; it is run once."""

    def s3(self) -> S3Server:
        """Return a real SeaweedFS, started when first asked for; the bucket "chaos" is there."""

    def check(self, root: str, run_id: str, grain: str, **overrides: Any) -> Outcome:
        """Submit the run once more, let it finish, and say whether everything holds that must hold."""
