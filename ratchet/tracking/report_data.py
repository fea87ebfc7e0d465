"""The numbers of a report: what every step of a run, or of a part of it, says in its manifests.

Trap: a run of 1,000 steps has 6,000 manifests. They are read side by side, and only what a page shows of them is kept.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ratchet.store.manifest import Manifest
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.tracking.cost import Used
from ratchet.tracking.work import Work

MAX_POINTS = 2000
"""Of one curve; of a longer run each point is the mean of several steps."""
_READERS = 16

Points = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """What a report keeps of the manifests of one step."""

    step: int
    metrics: dict[str, float]
    """Of all its stages."""
    started: float
    """Unix seconds; of its first stage."""
    ended: float
    works: tuple[Work, ...]
    """What each of its stages took."""
    by_epoch: dict[int, float]
    """Claim under which something was committed -> when the first such stage began."""
    made_by: frozenset[tuple[str, str, str]]
    """(device, code revision, image) of its stages."""
    policy: str
    """Digest of the policy that it published; empty where it published none."""
    stages: frozenset[str]
    """Those that are committed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """Curves over steps: P points each.

    Example: Numbers(steps=[0, 1, 2], series={"critic/score/mean": [nan, 0.1, 0.3]}, stride=1).
    """

    steps: npt.NDArray[np.int32]
    """(P,) the step of each point, or the last of those that it is the mean of."""
    series: dict[str, Points]
    """Metric -> (P,) values, NaN where a step has none."""
    stride: int
    """Steps of one point."""

    def has(self, name: str) -> bool:
        """Whether there is a number of that name."""
        return name in self.series

    def first_and_last(self, name: str) -> tuple[float, float] | None:
        """Return the first and the last value that is there, None without any."""
        values = self.series.get(name)
        there = values[np.isfinite(values)] if values is not None else np.zeros(0)
        return (float(there[0]), float(there[-1])) if there.size else None


def read_steps(run: Run, first: int, last: int | None) -> list[StepFacts]:
    """Return the steps from `first` to `last` (the newest for None) that have committed something, in order.

    Of the step before `first` its evaluation is there, to compare with, and nothing else.
    """
    wanted = [step for step in run.steps() if step >= first - 1 and (last is None or step <= last)]
    with ThreadPoolExecutor(_READERS) as pool:
        found = list(pool.map(run.step_manifests, [step for step in wanted if step >= first]))
    before = run.manifest("evaluate", first - 1) if first - 1 in wanted else None
    kept = [[before]] if before is not None else []
    return [_facts(manifests) for manifests in [*kept, *found] if manifests]


def numbers(steps: Sequence[StepFacts], used: Mapping[int, Used]) -> Numbers:
    """Return the metrics of these steps as curves, and `gpu_hours` and `money` added up from the first of them on.

    `used` is what each step used. There is no `money` where that of a step is not known.
    """
    stride = math.ceil(len(steps) / MAX_POINTS) if steps else 1
    names = sorted({name for one in steps for name in one.metrics})
    series = {name: _series((one.metrics.get(name, math.nan) for one in steps), len(steps), stride) for name in names}
    per_step: dict[str, list[float | None]] = {
        "gpu_hours": [used[one.step].gpu_seconds / 3600 if one.step in used else 0.0 for one in steps],
        "money": [used[one.step].money if one.step in used else 0.0 for one in steps],
    }
    for name, amounts in per_step.items():
        known = [amount for amount in amounts if amount is not None]
        if sum(known) > 0 and len(known) == len(steps):
            series[name] = _series(np.cumsum(known).tolist(), len(steps), stride)
    places = np.array([one.step for one in steps], np.int32)
    ends = np.minimum(np.arange(stride - 1, len(steps) + stride - 1, stride), len(steps) - 1)
    return Numbers(steps=places[ends] if steps else places, series=series, stride=stride)


def smoothed(values: Points, width: int) -> Points:
    """Return the mean over `width` points (odd) around each, of those that are there; NaN where none is."""
    is_there = np.isfinite(values)
    kernel = np.ones(width)
    total = np.convolve(np.where(is_there, values, 0.0), kernel, mode="full")
    count = np.convolve(is_there.astype(float), kernel, mode="full")
    middle = slice(width // 2, width // 2 + len(values))
    with np.errstate(invalid="ignore"):
        return (total[middle] / count[middle]).astype(np.float32)


def _series(values: Iterable[float], count: int, stride: int) -> Points:
    raw = np.fromiter(values, np.float64, count)
    if stride > 1:
        padded = np.full(math.ceil(count / stride) * stride, np.nan)
        padded[:count] = raw
        bins = padded.reshape(-1, stride)
        there = np.isfinite(bins)
        with np.errstate(invalid="ignore"):
            raw = np.where(there, bins, 0.0).sum(axis=1) / there.sum(axis=1)
    return raw.astype(np.float32)


def _facts(manifests: Sequence[Manifest]) -> StepFacts:
    """`manifests` are those of one step, at least one."""
    metrics: dict[str, float] = {}
    by_epoch: dict[int, float] = {}
    for manifest in manifests:
        metrics |= manifest.metrics
        provenance = manifest.provenance
        by_epoch[provenance.epoch] = min(provenance.started, by_epoch.get(provenance.epoch, math.inf))
    policies = [one.content.outputs.get("policy", "") for one in manifests if one.stage == POLICY_UPDATE]
    return StepFacts(
        step=manifests[0].step or 0,
        metrics=metrics,
        started=min(one.provenance.started for one in manifests),
        ended=max(one.provenance.ended for one in manifests),
        works=tuple(Work.of(one) for one in manifests),
        by_epoch=by_epoch,
        made_by=frozenset(_maker(one) for one in manifests),
        policy=policies[0] if policies else "",
        stages=frozenset(one.stage for one in manifests),
    )


def _maker(manifest: Manifest) -> tuple[str, str, str]:
    return manifest.provenance.device, manifest.provenance.code_revision, manifest.provenance.image
