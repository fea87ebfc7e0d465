"""What each component of a pipeline is told: one frozen record each, which the component's interface repeats.

Trap: a component's parameters, their order, their defaults and their descriptions are these; `tests/components`
compares them, and `make component-docs` writes the README files from here.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTask:
    """A task of one submission to one run."""

    root: str
    """Where runs lie: s3://bucket/prefix, or a folder that every pod sees."""
    run_id: str
    """The run's name below the root; empty takes the submission's id. The same name again resumes the run."""
    submission_id: str
    """The pipeline run that this task belongs to."""

    @property
    def name(self) -> str:
        """The run's name."""
        return self.run_id or self.submission_id


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightTask(RunTask):
    """Refuse what cannot work, create the run or find it, and claim it for this submission."""

    config: str
    """The run's config: YAML text, or the place of a YAML file (s3:// or a path)."""
    grain: str = "segment"
    """How long a process lasts: stage, step or segment."""
    total_steps: int = 0
    """RL steps of the whole run; 0 takes what the config says."""
    steps_per_segment: int = 0
    """RL steps of one segment; 0 takes what the config says."""
    device_map: dict[str, Any] = field(default_factory=dict)
    """Stage -> what its pod asks for, over the config's section device_map."""
    champion: str = ""
    """Name that the policy may become the champion of; empty promotes nothing."""
    min_accuracy: float = 0.0
    """Held-out accuracy below which nothing is promoted."""
    from_champion: bool = False
    """Start from the champion's weights; do nothing where the data are those of the last decision."""
    images: dict[str, str] = field(default_factory=dict)
    """Image of each stage, where device_map and config name none."""
    has_critic: bool = True
    """Whether the pipeline has a task that trains a critic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessTask(RunTask):
    """Commit policy version 0 and the prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTask(RunTask):
    """List what is still to run: the first step of every segment (at stage grain every step) and where its pods run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentTask(RunTask):
    """Run a segment of RL steps with the sampler and the trainer in memory."""

    start: int
    """First step of the segment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTask(RunTask):
    """Run every stage of one RL step in one process."""

    step: int
    """The RL step, from 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTask(RunTask):
    """Run one stage of one RL step."""

    step: int
    """The RL step, from 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateTask(RunTask):
    """Measure the held-out accuracy of one policy version."""

    version: str = "last"
    """Which one: base, last, or the step that published it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportTask(RunTask):
    """Export the last policy as a Hugging Face folder, proven to reload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromoteTask(RunTask):
    """Decide whether the last policy becomes the champion of its name, and record the decision with its numbers."""
