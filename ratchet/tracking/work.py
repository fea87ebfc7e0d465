"""What one committed stage took, as far as its manifest says that."""

import math
from dataclasses import dataclass

from ratchet.store.manifest import Manifest
from ratchet.store.run import CRITIC_UPDATE, POLICY_UPDATE

ROLLOUT = "rollout"
NUM_TOKENS = "perf/total_num_tokens"
"""Of policy_update: prompt and completion tokens of the step."""
VAL_TOKENS = "val-aux/num_tokens"
"""Of evaluate: prompt and completion tokens of the held-out prompts."""
_REPLAY = {POLICY_UPDATE: "timing_s/replay", CRITIC_UPDATE: "timing_s/replay_critic"}


def replay_metric(stage: str) -> str:
    """Return the metric that says how long replaying committed steps took, of what an update took."""
    return _REPLAY[stage]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one committed stage took.

    Example: Work(stage="rollout", step=3, started=1796031144.6, seconds=8.0, device="NVIDIA H200", gpu_seconds=16.0,
    tokens=81920).
    """

    stage: str
    step: int | None
    started: float
    """Unix seconds."""
    seconds: float
    device: str
    gpu_seconds: float
    tokens: int | None = None
    """Prompt and completion tokens that it went over, where its own manifest says that."""
    replayed: float = 0.0
    """Seconds of it that went into replaying committed steps."""

    @classmethod
    def of(cls, manifest: Manifest) -> "Work":
        """Describe a stage that is committed, or whose commit is under way; nothing is waited for."""
        return cls(
            stage=manifest.stage,
            step=manifest.step,
            started=manifest.started,
            seconds=max(manifest.seconds, 0.0),
            device=manifest.device,
            gpu_seconds=manifest.gpu_seconds,
            tokens=_tokens(manifest),
            replayed=manifest.metrics.get(_REPLAY.get(manifest.stage, ""), 0.0),
        )

    @property
    def ended(self) -> float:
        """Unix seconds."""
        return self.started + self.seconds

    def overlap(self, started: float, ended: float) -> float:
        """Return the seconds of it between two moments."""
        return max(min(self.ended, ended) - max(self.started, started), 0.0)


def _tokens(manifest: Manifest) -> int | None:
    metrics = manifest.metrics
    if manifest.stage == ROLLOUT and manifest.has("rollouts"):
        rows = manifest.output("rollouts").rows
        lengths = [metrics.get(f"{part}_length/mean") for part in ("prompt", "response")]
        return round(rows * math.fsum(lengths)) if rows and None not in lengths else None  # type: ignore[arg-type]
    found = metrics.get({POLICY_UPDATE: NUM_TOKENS, "evaluate": VAL_TOKENS}.get(manifest.stage, ""))
    return None if found is None else round(found)
