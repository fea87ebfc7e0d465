"""How far a run is, from few of its manifests: however long it is, a dozen objects are read.

Trap: the config is read as it was submitted and never parsed, since parsing runs the Python files that it may hold, and
since a run of a newer version must be shown too.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ratchet.data.order import steps_per_epoch
from ratchet.store import layout
from ratchet.store.manifest import Manifest
from ratchet.store.run import POLICY_UPDATE, Run

RECENT = 6
"""Newest commits that the pace is taken from."""
READERS = 16
"""Objects that are read at the same time."""

Item = TypeVar("Item")
Value = TypeVar("Value")

_REWARD = "critic/score/mean"
_LOSS = "actor/loss"
_ACCURACY = "val-core/"
_INTERVAL = "val-aux/{source}/acc/ci95_{end}@{samples}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """What a policy version achieved on held-out prompts."""

    step: int
    """Of the policy version."""
    source: str
    """data_source of the prompts."""
    mean: float
    low: float | None = None
    """Lower end of the 95% interval, where the rewards are in [0, 1]."""
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What is committed."""

    steps: int
    """RL steps whose policy is committed."""
    total: int | None
    """Steps of the whole run; None until the prompts are committed, where their number decides."""
    is_prepared: bool
    """Whether version 0 of the policy and the training prompts are committed."""
    stages: tuple[str, ...] = ()
    """Stages of the next step that are committed."""
    last_commit: float | None = None
    """Unix seconds of the newest commit."""
    seconds_per_step: float | None = None
    """Median over the newest commits."""
    reward: float | None = None
    """Mean reward of the last step."""
    first_reward: float | None = None
    """Mean reward of step 1."""
    loss: float | None = None
    """Loss of the last step, under an objective that learns from examples."""
    first_loss: float | None = None
    """Loss of step 1."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of every stage of the last step."""
    accuracy: tuple[Accuracy, ...] = ()
    """Of the newest evaluation, one entry for each data_source."""
    held_out_loss: tuple[Accuracy, ...] = ()
    """The same of a run whose evaluations measure no accuracy but a loss: each entry's mean."""
    has_held_out: bool = False
    """Whether the run has held-out prompts to be evaluated on."""
    is_evaluated: bool = False
    """Whether the last policy of the whole run is evaluated."""
    export: str = ""
    """Where the export of the whole run's last policy is."""
    export_digest: str = ""

    @property
    def is_trained(self) -> bool:
        """Whether every step is committed."""
        return self.total is not None and 0 < self.total <= self.steps

    @property
    def seconds_left(self) -> float | None:
        """Until the last step, at the present pace."""
        if self.seconds_per_step is None or self.total is None or self.is_trained:
            return None
        return self.seconds_per_step * (self.total - self.steps)


def value_at(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of a dotted key of a nested config, `default` where it has none."""
    found: Any = config
    for part in key.split("."):
        if not isinstance(found, Mapping) or found.get(part) is None:
            return default
        found = found[part]
    return found


def in_parallel(read: Callable[[Item], Value], items: Sequence[Item]) -> list[Value]:
    """Return `read` of each item, in order; the first error that one raises is raised."""
    if len(items) < 2:
        return [read(item) for item in items]
    with ThreadPoolExecutor(min(READERS, len(items))) as pool:
        return list(pool.map(read, items))


def read_progress(run: Run, steps: Sequence[int], config: Mapping[str, Any]) -> Progress:
    """Read how far a run is. `steps` are those that have a folder, `config` the newest submission's."""
    total = _total(run, config)
    last = next((step for step in reversed(steps) if step > 0 and run.manifest(POLICY_UPDATE, step)), 0)
    is_prepared = bool(run.manifest(POLICY_UPDATE, 0) and run.manifest("preprocess/train", None))
    updates = in_parallel(lambda step: run.manifest(POLICY_UPDATE, step), range(max(1, last - RECENT + 1), last + 1))
    done, begun = _stages(run, last), _stages(run, last + 1) if last + 1 in steps else []
    metrics: dict[str, float] = {}
    for manifest in done:
        metrics |= manifest.provenance.metrics
    stages = [one.content.stage for one in done]
    first = run.manifest("reward" if "reward" in stages else POLICY_UPDATE, 1) if last else None
    export = run.manifest("checkpoint_export", total) if total is not None and total == last else None
    evaluated = _newest_evaluation(run, last, config)
    newest = [*done, *begun, *([evaluated] if evaluated else []), *([export] if export else [])]
    return Progress(
        steps=last,
        total=total,
        is_prepared=is_prepared,
        stages=tuple(manifest.content.stage for manifest in begun),
        last_commit=max((manifest.provenance.ended for manifest in newest), default=None),
        seconds_per_step=_pace([update for update in updates if update], done),
        reward=metrics.get(_REWARD),
        first_reward=first.provenance.metrics.get(_REWARD) if first else None,
        loss=None if _REWARD in metrics else metrics.get(_LOSS),
        first_loss=first.provenance.metrics.get(_LOSS) if first else None,
        metrics=metrics,
        accuracy=_accuracy(evaluated),
        held_out_loss=_held_out_loss(evaluated),
        has_held_out=bool(value_at(config, "data.val_files")),
        is_evaluated=evaluated is not None and evaluated.content.step == total,
        export=f"{run.uri}/{export.output('export').folder}" if export else "",
        export_digest=export.output("export").digest if export else "",
    )


def _total(run: Run, config: Mapping[str, Any]) -> int | None:
    stated = value_at(config, "trainer.total_training_steps")
    if stated is not None:
        return int(stated)
    prompts = run.manifest("preprocess/train", None)
    epochs, batch = value_at(config, "trainer.total_epochs"), value_at(config, "data.train_batch_size")
    # Prompts or examples, whatever the run learns from: it is the stage's one output.
    rows = next(iter(prompts.provenance.artifacts.values())).rows if prompts is not None else None
    if rows is None or not epochs or not batch:
        return None
    return int(epochs) * steps_per_epoch(rows, int(batch))


def _stages(run: Run, step: int) -> list[Manifest]:
    """Return the committed manifests of a step, in the order in which they ended."""
    names = run.store.list_folders(layout.step_folder(step))
    found = [one for one in in_parallel(lambda name: run.manifest(name, step), names) if one is not None]
    return sorted(found, key=lambda manifest: (manifest.provenance.ended, manifest.content.stage))


def _pace(updates: Sequence[Manifest], done: Sequence[Manifest]) -> float | None:
    ended = [update.provenance.ended for update in updates]
    between = [later - earlier for earlier, later in itertools.pairwise(ended)]
    if between:
        return max(0.0, statistics.median(between))
    # Of the first step it is known how long it took, and no more.
    return max(0.0, ended[0] - min(manifest.provenance.started for manifest in done)) if ended and done else None


def _newest_evaluation(run: Run, last: int, config: Mapping[str, Any]) -> Manifest | None:
    if not value_at(config, "data.val_files"):
        return None
    every = int(value_at(config, "trainer.test_freq", 0) or 0)
    # Evaluated are the base, every test_freq-th policy and the last one.
    steps = dict.fromkeys((last, *((last - last % every, last - last % every - every) if every > 0 else ()), 0))
    found = (run.manifest("evaluate", step) for step in steps if step >= 0)
    return next((manifest for manifest in found if manifest is not None), None)


def _accuracy(evaluated: Manifest | None) -> tuple[Accuracy, ...]:
    if evaluated is None or evaluated.content.step is None:
        return ()
    metrics, found = evaluated.provenance.metrics, []
    for name, mean in sorted(metrics.items()):
        source, _, samples = name.removeprefix(_ACCURACY).rpartition("/acc/mean@")
        source = source or _source_of(name, "accuracy")
        if not name.startswith(_ACCURACY) or not source:
            continue
        low, high = (metrics.get(_INTERVAL.format(source=source, end=end, samples=samples)) for end in ("low", "high"))
        found.append(Accuracy(step=evaluated.content.step, source=source, mean=mean, low=low, high=high))
    return tuple(found)


def _held_out_loss(evaluated: Manifest | None) -> tuple[Accuracy, ...]:
    if evaluated is None or evaluated.content.step is None or _accuracy(evaluated):
        return ()
    metrics, step = evaluated.provenance.metrics, evaluated.content.step
    found = ((_source_of(name, "loss"), value) for name, value in sorted(metrics.items()))
    return tuple(Accuracy(step=step, source=source, mean=value) for source, value in found if source)


def _source_of(name: str, measured: str) -> str:
    """The data source of a held-out metric of that name, "" for another metric."""
    source, _, last = name.removeprefix(_ACCURACY).rpartition("/")
    return source if name.startswith(_ACCURACY) and last == measured else ""
