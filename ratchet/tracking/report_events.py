"""What happened in a run: who submitted it, what failed, what was done again, what was deleted on purpose.

Trap: manifests and records are the chain; what tasks said of themselves (their status files) may be missing or old, so
that a failure is told where it is known and its absence proves nothing.
"""

import itertools
import json
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ratchet.errors import StoreError
from ratchet.redaction import hidden
from ratchet.store import champions, layout
from ratchet.store.objects import ObjectInfo
from ratchet.store.retired import Retired
from ratchet.store.run import Run
from ratchet.store.status import TaskStatus
from ratchet.tracking.metrics import span
from ratchet.tracking.report_data import StepFacts
from ratchet.tracking.show_champions import decision_line

logger = logging.getLogger(__name__)

Kind = Literal["start", "resume", "failure", "retry", "recovery", "pause", "warning", "retired", "decision"]

SHORTEST_PAUSE = 120.0
"""Seconds between two steps, beyond the usual, that are told."""
_PAUSE_IN_STEPS = 3.0
_CHANGES = 6
"""Config keys that are named of a new submission."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One thing that happened.

    Example: Event(kind="resume", step=12, time=1796031144.6, text="submission 2 (segment grain) went on from step 12").
    """

    kind: Kind
    text: str
    step: int | None = None
    time: float | None = None
    """Unix seconds; None where nothing says when."""


def read_events(
    run: Run,
    steps: Sequence[StepFacts],
    submissions: Mapping[int, Mapping[str, Any]],
    tasks: Sequence[TaskStatus],
) -> list[Event]:
    """Return what happened in these steps, in order of time. `submissions` are those of the run by epoch.

    `tasks` are what the run's tasks last said of themselves.
    """
    if not steps:
        return []
    found = [
        *_submitted(run, steps, submissions),
        *_tasks(tasks, steps),
        *_numbers(steps),
        *_pauses(steps),
        *_retired(run, steps),
        *_decisions(run, steps, submissions),
    ]
    end = steps[-1].ended
    return sorted(found, key=lambda event: (event.time if event.time is not None else end, event.step or 0))


def _submitted(run: Run, steps: Sequence[StepFacts], submissions: Mapping[int, Mapping[str, Any]]) -> Iterator[Event]:
    begun: dict[int, tuple[float, int]] = {}
    for one in steps:
        for epoch, started in one.by_epoch.items():
            begun[epoch] = min(begun.get(epoch, (started, one.step)), (started, one.step))
    for epoch, (started, step) in sorted(begun.items()):
        now = submissions.get(epoch, {})
        before = submissions.get(max((other for other in submissions if other < epoch), default=0), {})
        by = f" of pipeline run {now['submission_id']}" if now.get("submission_id") else ""
        what = (
            f"submission {epoch}{by} ({now.get('grain') or 'unknown'} grain, Ratchet {now.get('version') or 'unknown'})"
        )
        if epoch == 1:
            yield Event(kind="start", step=step, time=started, text=f"{what} began the run")
            continue
        changes = list(changed_keys(before.get("config") or {}, now.get("config") or {})) if before else []
        more = f" and {len(changes) - _CHANGES} more" if len(changes) > _CHANGES else ""
        told = f"; changed: {', '.join(changes[:_CHANGES])}{more}" if changes else "; with the same config"
        yield Event(kind="resume", step=step, time=started, text=hidden(f"{what} went on at step {step}{told}"))


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield `key: old -> new` of every leaf that differs between two nested configs."""
    for key in sorted(old.keys() | new.keys()):
        left, right = old.get(key), new.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            yield from changed_keys(left, right, f"{path}{key}.")
        elif left != right:
            yield f"{path}{key}: {json.dumps(left, default=str):.80} -> {json.dumps(right, default=str):.80}"


def _tasks(tasks: Sequence[TaskStatus], steps: Sequence[StepFacts]) -> Iterator[Event]:
    """Failures, ends by a signal, and repeated beginnings that tasks told of."""
    first, last = steps[0].step, steps[-1].step
    for one in tasks:
        if one.step is not None and not first <= one.step <= last:
            continue
        if one.attempt > 1:
            yield Event(
                kind="retry",
                step=one.step,
                time=one.started,
                text=f"{one.task} began its work {one.attempt} times: object storage did not answer",
            )
        if one.state in ("failed", "terminated"):
            code = "" if one.exit_code is None else f" with exit code {one.exit_code}"
            said = f": {one.message or one.error}" if one.message or one.error else ""
            yield Event(
                kind="failure", step=one.step, time=one.updated, text=hidden(f"{one.task} {one.state}{code}{said}")
            )


def _numbers(steps: Sequence[StepFacts]) -> Iterator[Event]:
    """What manifests tell by their numbers."""
    for one in steps:
        drift = one.metrics.get("recovery/max_weight_drift")
        if drift is not None:
            text = (
                f"the trainer was rebuilt by replay; its weights differ from the committed ones by at most {drift:.3g}"
            )
            yield Event(kind="recovery", step=one.step, time=one.ended, text=text)
        lost = sorted(name.removeprefix("nonfinite/") for name in one.metrics if name.startswith("nonfinite/"))
        if lost:
            yield Event(kind="warning", step=one.step, time=one.ended, text=f"not finite: {', '.join(lost)}")
    for name, words in (
        ("actor/skipped_mini_batches", "mini-batches had no token in the loss and moved nothing"),
        ("critic/skipped_mini_batches", "mini-batches had nothing for the critic to learn from"),
    ):
        counts = [(one.step, one.metrics.get(name, 0.0)) for one in steps]
        hit = [(step, count) for step, count in counts if count]
        if hit:
            text = f"{sum(count for _, count in hit):.0f} {words}, in {len(hit)} steps"
            yield Event(kind="warning", step=hit[0][0], time=None, text=text)


def _pauses(steps: Sequence[StepFacts]) -> Iterator[Event]:
    """Times in which nothing of the run was under way, between two steps."""
    trained = [one for one in steps if one.step > 0 and "rollout" in one.stages]
    if len(trained) < 2:
        return
    usual = statistics.median(one.ended - one.started for one in trained)
    for before, after in itertools.pairwise(trained):
        pause = after.started - before.ended
        if pause > max(SHORTEST_PAUSE, _PAUSE_IN_STEPS * usual):
            text = f"nothing ran for {span(pause)} before step {after.step}"
            yield Event(kind="pause", step=after.step, time=before.ended, text=text)


def _retired(run: Run, steps: Sequence[StepFacts]) -> Iterator[Event]:
    """What retention gave up, by role; of each role the newest record is read, for its rule."""
    first, last = steps[0].step, steps[-1].step
    by_role: dict[str, dict[int, ObjectInfo]] = {}
    for info in run.store.list_objects("retired"):
        place = layout.parse_retired(info.key)
        step = layout.parse_step_folder(place[0].partition("/")[0]) if place else None
        if place is not None and step is not None and first <= step <= last:
            by_role.setdefault(place[1], {})[step] = info
    for role, records in sorted(by_role.items()):
        newest_step = max(records)
        newest = records[newest_step]
        try:
            why = f": {Retired.from_json(run.store.get(newest.key), place=newest.key).reason}"
        except StoreError as error:
            logger.warning("%s", error)
            why = ""
        counted = (
            f"{len(records)} steps ({min(records)} to {max(records)})" if len(records) > 1 else f"step {newest_step}"
        )
        text = f"{role.replace('_', ' ')} of {counted} deleted on purpose{why}"
        yield Event(kind="retired", step=newest_step, time=newest.modified, text=text)


def _decisions(run: Run, steps: Sequence[StepFacts], submissions: Mapping[int, Mapping[str, Any]]) -> Iterator[Event]:
    """Decisions on policies of these steps as champions."""
    names = {one.get("config", {}).get("promotion", {}).get("name") for one in submissions.values()}
    covered = {one.step for one in steps}
    for name in sorted(name for name in names if name):
        try:
            history = champions.decisions(run.root, name)
        except StoreError as error:
            yield Event(kind="warning", text=f"decisions on {name} cannot be read: {error}")
            continue
        for decision in history:
            if decision.run_id == run.run_id and decision.step in covered:
                by = f" by {decision.by}" if decision.by else ""
                text = hidden(f"{name} {decision_line(decision)}{by}")
                yield Event(kind="decision", step=decision.step, time=decision.time, text=text)
