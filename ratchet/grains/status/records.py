"""How a run is, as records: what an operator asks, and nothing of how it was found out."""

from dataclasses import dataclass
from typing import Literal

from ratchet.cluster.causes import ACCIDENTS, Cause
from ratchet.grains.status.chain import Progress

State = Literal[
    "refused",
    "skipped",
    "starting",
    "running",
    "waiting",
    "failed",
    "lost",
    "terminated",
    "stopped",
    "unknown",
    "finished",
]
FINAL = frozenset(("refused", "skipped", "failed", "lost", "terminated", "stopped", "finished"))
"""States that last until somebody does something."""

Doing = Literal["running", "starting", "waiting", "silent", "lost", "ended"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """A task that is under way, or was when it was last heard of."""

    task: str
    """The component."""
    step: int | None
    """The RL step that it was told; a segment's first one."""
    pod: str
    doing: Doing
    since: float | None
    """Unix seconds when its work began, or its pod was made."""
    heard: float | None = None
    """Unix seconds of its last heartbeat."""
    attempt: int = 1
    note: str = ""
    cause: Cause | None = None
    """Why its pod waits, or what ended it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A task that failed."""

    task: str
    step: int | None
    pod: str
    at: float | None
    """Unix seconds."""
    error: str
    """The exception's class, or what Kubernetes calls the end of the pod."""
    message: str
    advice: str
    exit_code: int | None = None
    meaning: str = ""
    """Of the exit code."""
    consequences: int = 0
    """Later tasks that failed because of this one."""
    cause: Cause | None = None
    """What Kubernetes says, where the pod could not say it."""

    @property
    def is_accident(self) -> bool:
        """Whether it says nothing against the run."""
        return self.cause is not None and self.cause.kind in ACCIDENTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What the run trains, as its newest submission says."""

    algorithm: str = ""
    model: str = ""
    grain: str = ""
    steps_per_segment: int | None = None
    prompts: int | None = None
    """Of a step; or examples."""
    completions: int | None = None
    """Of a prompt; None where examples are learnt from, and nothing is sampled."""
    sampler: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ownership:
    """Who may commit."""

    epoch: int
    """The newest claim; those before have lost the run."""
    host: str
    """The pod or machine that made it."""
    pid: int
    submission_id: str = ""
    """The pipeline run; empty outside a pipeline."""
    version: str = ""
    """Ratchet's."""
    is_alive: bool | None = None
    """Whether the process lives, where it is one of this machine."""
    has_damaged_submission: bool = False
    """Whether nobody can know from its submission what was asked for, nor by which pipeline run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Promotion:
    """What was decided about the run's last policy."""

    name: str
    number: int
    verdict: str
    serves: int | None
    """The decision whose policy serves under the name now."""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineRun:
    """What Kubeflow says of the newest submission."""

    id: str
    state: str
    url: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """How a run is."""

    run: str
    """ROOT/RUN-ID."""
    state: State
    at: float
    """Unix seconds when it was asked."""
    setup: Setup
    progress: Progress | None = None
    """None where nothing is committed and nobody has claimed the run."""
    owner: Ownership | None = None
    promotes_as: str = ""
    """promotion.name."""
    promotion: Promotion | None = None
    now: tuple[Activity, ...] = ()
    """What is under way."""
    failure: Failure | None = None
    refused: Failure | None = None
    """Why a submission that came after the owner's was refused."""
    said: str = ""
    """The last thing that a task had to say which succeeded without work, such as why there was none."""
    pipeline_run: PipelineRun | None = None
    namespace: str = ""
    """Where the pods were looked for; empty where no cluster was asked."""
    notes: tuple[str, ...] = ()
    """What could not be asked, and why."""
