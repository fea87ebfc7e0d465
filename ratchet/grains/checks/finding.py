"""What a check of preflight says, and what it is told about where the run will be."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ratchet.config.cluster import PlacementConfig

Level = Literal["ok", "warning", "error", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence of a check. Only an error keeps a run from starting."""

    check: str
    """What was looked at: "bucket", "model", "secret", ..."""
    level: Level
    message: str
    """What was expected, what there is, and what to do about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineFacts:
    """Where a run's tasks will run, as far as the config does not say it."""

    grain: str = "segment"
    """How long a process lasts: stage, step or segment."""
    has_critic: bool = True
    """Whether the pipeline has a task that trains a critic."""
    placements: Mapping[str, PlacementConfig] = field(default_factory=dict)
    """Entry of device_map -> what its pods ask for; empty where everything runs in this environment."""
    in_pod: bool = False
    """Whether this is a task's pod, with the same secrets and settings as the other tasks have."""
    asks_cluster: bool = False
    """Whether a cluster is asked through a kubeconfig; this process then has other settings than the pods."""
    namespace: str = ""
    """Where the pods will be; that of the pod or of the kubeconfig where it is not given."""
    secrets: tuple[str, ...] = ("ratchet-object-store", "ratchet-tokens")
    """Secrets that pods get variables from."""
    config_map: str = "ratchet-environment"
    """The same of settings."""
    claim: str = field(default_factory=lambda: os.environ.get("RATCHET_COMPILE_CACHE_CLAIM", ""))
    """Volume claim that pods with models mount."""
    submission_id: str = ""
    """The pipeline run that asks; one that has claimed the run before may always go on."""

    @property
    def on_cluster(self) -> bool:
        """Whether the tasks are pods of a cluster."""
        return self.in_pod or self.asks_cluster
