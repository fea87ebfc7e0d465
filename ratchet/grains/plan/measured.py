"""What an earlier run measured, for a plan of one that is like it: lengths, speed, how much of a version changes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

from ratchet.errors import ConfigError
from ratchet.store.manifest import FileEntry
from ratchet.store.run import POLICY_UPDATE, Run

_MOST_STEPS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """None where the run does not say it."""

    source: str
    """The run, or what else the numbers come from."""
    completion_tokens: float | None = None
    """Mean tokens of a completion."""
    throughput: float | None = None
    """Tokens of a step, prompts included, per second of the step and trainer process."""
    start_seconds: float = 0.0
    """By how much a process's first step takes longer."""
    evaluation_seconds: float | None = None
    """Of one evaluation, per held-out completion."""
    export_seconds: float | None = None
    delta_share: float | None = None
    """Of a version's bytes, what a delta stores."""


def measured_by(run: Run) -> Measured:
    """Read the last steps of a run; ConfigError where it has none."""
    last = run.last_step()
    if last < 1:
        raise ConfigError(f"--like {run.uri}: expected a run that has trained a step, found none")
    lengths, shares, evaluations = [], [], []
    steps: list[tuple[float, float]] = []
    for step in range(max(1, last - _MOST_STEPS + 1), last + 1):
        metrics: dict[str, float] = {}
        for manifest in run.step_manifests(step):
            metrics |= manifest.metrics
            artifacts = manifest.provenance.artifacts
            for artifact in artifacts.values():
                if artifact.delta is not None:
                    shares.append(_bytes(artifact.delta.files) / _bytes(artifact.files))
            if manifest.stage == "evaluate":
                rows = next(iter(artifacts.values())).rows or 1
                evaluations.append((manifest.provenance.ended - manifest.provenance.started) / rows)
        if "response_length/mean" in metrics:
            lengths.append(metrics["response_length/mean"])
        if metrics.get("perf/throughput"):
            tokens = metrics["perf/total_num_tokens"]
            steps.append((tokens, tokens / metrics["perf/throughput"]))
    # A process's first step starts its engines.
    steady = steps[1:] or steps
    speed = sum(one for one, _ in steady) / sum(one for _, one in steady) if steady else None
    export = run.manifest("checkpoint_export", last)
    return Measured(
        source=f"run {run.uri}",
        completion_tokens=fmean(lengths) if lengths else None,
        throughput=speed,
        start_seconds=_start_seconds(run, median(one for _, one in steady)) if steady else 0.0,
        evaluation_seconds=median(evaluations) if evaluations else None,
        export_seconds=None if export is None else export.provenance.ended - export.provenance.started,
        delta_share=fmean(shares) if shares else None,
    )


def _start_seconds(run: Run, usual: float) -> float:
    first = run.manifest(POLICY_UPDATE, 1)
    took = math.nan if first is None else first.metrics.get("timing_s/step", math.nan)
    return max(0.0, took - usual) if math.isfinite(took) else 0.0


def _bytes(files: Iterable[FileEntry]) -> int:
    return sum(entry.bytes for entry in files)
