"""What a run used and what that costs: seconds, GPU-seconds, tokens and money, from the provenance of its manifests.

Trap: with `trainer.async_level=1` a step's rollouts are sampled while the step before trains. Both took their time, but
the process was there once: GPU-seconds and money of such a moment belong to the step that trains.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ratchet.errors import ConfigError
from ratchet.store import layout
from ratchet.store.manifest import Manifest
from ratchet.store.run import CRITIC_UPDATE, POLICY_UPDATE, Run
from ratchet.store.status import TaskStatus
from ratchet.tracking.work import ROLLOUT, Work

GPU_SECONDS, MONEY = "cost/gpu_seconds", "cost/money"
"""Of policy_update: what all stages of the step cost."""
CPU = "cpu"
VERSION_0 = "version 0"
"""What the stages count as that commit policy and critic before training."""

_OVER_ROLLOUTS = ("policy_scores", "reference_scores", "values", CRITIC_UPDATE)
"""Stages whose tokens are the rollouts'."""
_K = TypeVar("_K")

Prices = Mapping[str, float]
"""Device, as `Provenance.device` names it -> what an hour of it costs; of cpu, an hour of a process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """What some stages used."""

    stages: int
    seconds: float
    """As each took, added up."""
    gpu_seconds: float
    """Of what ran side by side in one process, counted once."""
    tokens: int | None
    """Prompt and completion tokens; None where nothing says how many."""
    tokens_per_second: float | None
    """`tokens` in `seconds`."""
    money: float | None
    """In the currency of the prices; None where a device that was used has no price."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a run, or a part of it, used."""

    prices: Prices
    total: Used
    """Tokens are those of the steps: each of them counts once."""
    by_stage: Mapping[str, Used]
    """The dearest first."""
    by_step: Mapping[int, Used]
    """With the evaluation and the export of the step's policy; step 0 is what came before training."""
    by_device: Mapping[str, Used]
    """Seconds are counted once, too."""
    unpriced: tuple[str, ...]
    """Devices that were used and have no price."""
    replayed: Used
    """Of all this, what went into replaying committed steps; runs of versions that did not measure it have 0."""
    failed_tasks: int
    """Of pipelines: tasks that last said that they failed or were ended."""
    failed_task_seconds: float
    """In which these committed nothing; beside `total`, since nothing says what they held."""


def cost(works: Iterable[Work], prices: Prices, tasks: Iterable[TaskStatus] = ()) -> Cost:
    """Add up what stages took. `tasks` are what the run's tasks last said of themselves."""
    works = list(works)
    counted = _counted(works)
    by_step = _grouped((one for one in counted if one.work.step is not None), _step)
    by_stage = _grouped(counted, _stage)
    by_device = _grouped((one.part(one.seconds) for one in counted), _device)
    rolled = {one.step: one.tokens for one in works if one.stage == ROLLOUT}
    trained = {one.step: one.tokens for one in works if one.stage == POLICY_UPDATE and one.step}

    def stage_tokens(stage: str, pairs: "Sequence[_Counted]") -> int | None:
        own = [one.work.tokens for one in pairs]
        return _sum([rolled.get(one.work.step) for one in pairs] if stage in _OVER_ROLLOUTS else own)

    used_by_stage = {name: _used(pairs, prices, stage_tokens(name, pairs)) for name, pairs in by_stage.items()}
    replays = [one for one in counted if one.work.replayed > 0]
    failed, failed_seconds = _failed(tasks, works)
    return Cost(
        prices=dict(prices),
        total=_used(counted, prices, _sum(list(trained.values()))),
        by_stage=dict(sorted(used_by_stage.items(), key=_dearest)),
        by_step={step: _used(by_step[step], prices, trained.get(step)) for step in sorted(by_step)},
        by_device={device: _used(by_device[device], prices, None) for device in sorted(by_device)},
        unpriced=tuple(sorted({one.work.device for one in counted if one.money(prices) is None})),
        replayed=_used([one.part(one.work.replayed) for one in replays], prices, None),
        failed_tasks=failed,
        failed_task_seconds=failed_seconds,
    )


def step_metrics(stages: Iterable[Work], before: Iterable[Work], prices: Prices) -> dict[str, float]:
    """Return what a step cost, for its last stage's metrics; no money where a device has no price.

    `before` are the stages of the step before, where rollouts are sampled ahead.
    """
    stages = list(stages)
    steps = {one.step for one in stages}
    found = _used([one for one in _counted([*before, *stages]) if one.work.step in steps], prices, None)
    return {GPU_SECONDS: found.gpu_seconds} | ({} if found.money is None else {MONEY: found.money})


def before_steps(run: Run) -> list[Manifest]:
    """Return the committed manifests that belong to no step: those of the data."""
    found = (run.manifest(f"preprocess/{split}", None) for split in layout.DATA_SPLITS)
    return [one for one in found if one is not None]


def prices_of(config: Mapping[str, Any], given: Prices | None = None) -> dict[str, float]:
    """Return the price table of a config as it was submitted, with what is `given` in place of its prices."""
    table = (config.get("trainer") or {}).get("prices") or {}
    return {str(device): float(price) for device, price in table.items()} | dict(given or {})


def parse_prices(texts: Iterable[str]) -> dict[str, float]:
    """Read prices as people type them: NVIDIA H200=3.5; ConfigError for what is none."""
    found: dict[str, float] = {}
    for text in texts:
        device, equals, number = (part.strip() for part in text.rpartition("="))
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if not (equals and device and math.isfinite(price) and price >= 0):
            raise ConfigError(f"--price: expected DEVICE=PRICE of an hour, such as 'NVIDIA H200=3.5'; found {text!r}")
        if device in found:
            raise ConfigError(f"--price: {device} is given twice, as {found[device]:g} and as {price:g}")
        found[device] = price
    return found


@dataclass(frozen=True, slots=True)
class _Counted:
    """A stage, and how many of its seconds the process was there for it."""

    work: Work
    seconds: float

    @property
    def gpu_seconds(self) -> float:
        work = self.work
        return work.gpu_seconds * self.seconds / work.seconds if work.seconds else work.gpu_seconds

    def money(self, prices: Prices) -> float | None:
        hours = (self.gpu_seconds if self.work.device != CPU else self.seconds) / 3600
        if hours == 0:
            return 0.0
        price = prices.get(self.work.device)
        return None if price is None else price * hours

    def part(self, seconds: float) -> "_Counted":
        """Return what `seconds` of it used, as a stage of its own."""
        if seconds == self.work.seconds:
            return self
        share = min(seconds / self.work.seconds, 1.0) if self.work.seconds else 1.0
        work = replace(self.work, seconds=self.work.seconds * share, gpu_seconds=self.work.gpu_seconds * share)
        return _Counted(work, work.seconds)


def _counted(works: Sequence[Work]) -> list[_Counted]:
    """Take from rollouts that were sampled ahead what the step before ran beside them."""
    others: defaultdict[int | None, list[Work]] = defaultdict(list)
    for one in works:
        if one.stage != ROLLOUT:
            others[one.step].append(one)
    return [_Counted(one, max(one.seconds - _beside(one, others), 0.0)) for one in works]


def _beside(one: Work, others: Mapping[int | None, Sequence[Work]]) -> float:
    if one.stage != ROLLOUT or not one.step:
        return 0.0
    return math.fsum(one.overlap(other.started, other.ended) for other in others[one.step - 1])


def _step(one: _Counted) -> int:
    return one.work.step or 0


def _stage(one: _Counted) -> str:
    # What commits the base model is no update.
    is_base = one.work.step == 0 and one.work.stage in (POLICY_UPDATE, CRITIC_UPDATE)
    return VERSION_0 if is_base else one.work.stage


def _device(one: _Counted) -> str:
    return one.work.device


def _dearest(item: tuple[str, Used]) -> tuple[float, float, str]:
    stage, used = item
    return -used.gpu_seconds, -used.seconds, stage


def _grouped(counted: Iterable[_Counted], key: Callable[[_Counted], _K]) -> dict[_K, list[_Counted]]:
    groups: defaultdict[_K, list[_Counted]] = defaultdict(list)
    for one in counted:
        groups[key(one)].append(one)
    return dict(groups)


def _used(counted: Sequence[_Counted], prices: Prices, tokens: int | None) -> Used:
    money = [one.money(prices) for one in counted]
    seconds = math.fsum(one.work.seconds for one in counted)
    return Used(
        stages=len(counted),
        seconds=seconds,
        gpu_seconds=math.fsum(one.gpu_seconds for one in counted),
        tokens=tokens,
        tokens_per_second=tokens / seconds if tokens and seconds else None,
        money=math.fsum(one for one in money if one is not None) if None not in money else None,
    )


def _sum(tokens: Sequence[int | None]) -> int | None:
    """Add up tokens; those of a part of the stages would pass for all of them."""
    known = [one for one in tokens if one is not None]
    return sum(known) if known and len(known) == len(tokens) else None


def _failed(tasks: Iterable[TaskStatus], works: Sequence[Work]) -> tuple[int, float]:
    """Count tasks that did not succeed, and their seconds beyond the stages that were committed meanwhile."""
    ended = [one for one in tasks if one.state in ("failed", "terminated")]
    seconds = 0.0
    for task in ended:
        own = [one for one in works if task.task in ("segment", "step", one.stage)]
        done = math.fsum(one.overlap(task.started, task.updated) for one in own)
        seconds += max(task.updated - task.started - done, 0.0)
    return len(ended), seconds
