"""What of a run may go: old trainer states, old versions of policy and critic, never the last that can be resumed from.

A version stays as long as something needs it: a later version that is stored as a delta on it, a trainer state of its
step, an evaluation or an export. (What a champion names is an export.) Everything else of a run is kept for good.

Traps: what is due is recorded (`ratchet.store.retired`) before its first file is deleted, so that a deletion that was
cut short is known for one, and is finished by whoever comes next. And nothing goes on the word of a manifest alone:
before a trainer state goes, one that stays has been read back whole.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ratchet.store import artifacts, stored_files
from ratchet.store.objects import ObjectStore
from ratchet.store.retired import TRAINER_STATE, WEIGHTS, describe
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.store.survey import Item, Survey, survey

logger = logging.getLogger(__name__)

NEWEST = 2
"""Trainer states, and versions, that always stay: the next step may read the last two."""
_THREADS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What a config wants kept, beside what must be."""

    versions: int | None = None
    """How many of the newest versions; all of them where it is None."""
    save_freq: int = -1
    """Trainer states of every so many steps are kept, beside the last two."""
    states: Mapping[str, int | None] = field(default_factory=dict)
    """Stage -> most states that save_freq keeps; all where it is None."""
    test_freq: int = -1
    """Policies of every so many steps are kept: they are evaluated, or are to be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """An item that may go."""

    item: Item
    reason: str
    """Empty where it was recorded before, and only its deletion is to be finished."""


def plan(found: Survey, rules: Rules | None) -> list[Due]:
    """Say what is due, oldest first, with what was recorded before; nothing is asked of storage.

    Without rules, only that which was recorded before and is not deleted yet.
    """
    due: list[Due] = []
    for stage, role in WEIGHTS.items():
        states, weights = found.of(stage, TRAINER_STATE), found.of(stage, role)
        kept = _kept_states(states, rules or Rules())
        staying = _staying(weights, kept, found.named, rules or Rules())
        due += _due(states, kept, _why_a_state(stage, rules))
        due += _due(
            weights, staying, f"trainer.keep_policies={rules and rules.versions}, and nothing that stays needs it"
        )
    return sorted((one for one in due if rules is not None or not one.reason), key=lambda one: one.item.step)


def retire(run: Run, found: Survey, rules: Rules | None, *, proven: set[str]) -> list[Item]:
    """Record and delete what is due; return what went, and take note of it in `found`.

    What cannot go safely stays, with a warning. `proven` are the folders of trainer states that this process has read
    back whole; where none of those that stay is among them, the newest is read, and added. OwnershipLostError where
    another runner has claimed the run in the meantime.
    """
    due = plan(found, rules)
    if not due:
        return []
    store = Run(run.root, run.run_id).store
    safe = _safe_kinds(store, found, due, proven)
    going = [one for one in due if (one.item.stage, one.item.role) in safe]
    if not going:
        return []
    epoch = run.check_ownership().epoch if run.owner is not None else 0
    for one in going:
        if one.reason:
            record = describe(*one.item.key, one.item.artifact, reason=one.reason, epoch=epoch)
            body = record.to_json()
            # Where there is one already, another process has decided the same.
            found.bytes += len(body) if store.put_create(record.key, body) else 0
        found.change(one.item, "leaving")
    # Whoever took the run over while the records were put may have read what they name, and published what it made.
    if run.owner is not None:
        run.check_ownership()
    else:
        found.named |= survey(run, with_weights=False).named
    still = {one.item.key for one in plan(found, None)}
    items = [one.item for one in going if one.item.key in still]
    with ThreadPoolExecutor(_THREADS) as pool:
        for item, _ in zip(items, pool.map(lambda item: artifacts.delete(store, item.artifact), items), strict=True):
            found.change(item, "gone")
            logger.info("retired %s, %d bytes", item.place, item.bytes)
    return items


def _due(items: Sequence[Item], staying: set[int], reason: str) -> Iterator[Due]:
    for item in items:
        if item.step not in staying and item.condition in ("here", "leaving"):
            yield Due(item=item, reason=reason if item.condition == "here" else "")


def _why_a_state(stage: str, rules: Rules | None) -> str:
    if rules is None or rules.save_freq <= 0:
        return f"not one of the last {NEWEST} trainer states"
    limit = rules.states.get(stage)
    which = "those" if limit is None else f"the newest {limit} of those"
    return (
        f"neither one of the last {NEWEST} trainer states nor of {which} that trainer.save_freq={rules.save_freq} keeps"
    )


def _kept_states(newest_first: Sequence[Item], rules: Rules) -> set[int]:
    """Return the steps whose trainer state stays."""
    steps = [item.step for item in newest_first if item.condition == "here"]
    saved = [step for step in steps if rules.save_freq > 0 and step % rules.save_freq == 0]
    limit = rules.states.get(newest_first[0].stage) if newest_first else None
    return {*steps[:NEWEST], *saved[:limit]}


def _staying(newest_first: Sequence[Item], states: set[int], named: set[int], rules: Rules) -> set[int]:
    """Return the steps whose weights stay: those that are wanted, and all that these build on."""
    versions = {item.step: item for item in newest_first}
    live = [item.step for item in newest_first if item.condition in ("here", "damaged")]
    wanted = {0, *live[: None if rules.versions is None else max(rules.versions, NEWEST)], *states & set(live)}
    if newest_first and newest_first[0].stage == POLICY_UPDATE:
        wanted |= named | {step for step in live if rules.test_freq > 0 and step % rules.test_freq == 0}
    staying: set[int] = set()
    for wanted_step in wanted:
        step: int | None = wanted_step
        while step is not None and step in versions and step not in staying:
            staying.add(step)
            delta = versions[step].artifact.delta
            step = None if delta is None else delta.step
    return staying


def _safe_kinds(store: ObjectStore, found: Survey, due: Sequence[Due], proven: set[str]) -> set[tuple[str, str]]:
    """Return each (stage, role) of which enough stays, as it should be, to do without what is due."""
    safe = set()
    going = {one.item.key for one in due}
    for stage, role in sorted({(one.item.stage, one.item.role) for one in due}):
        staying = [item for item in found.of(stage, role) if item.condition != "gone" and item.key not in going]
        is_state = role == TRAINER_STATE
        is_safe = _is_proven(store, found, staying, proven) if is_state else _is_whole(store, found, staying)
        if is_safe:
            safe.add((stage, role))
        else:
            logger.warning("no %s of %s that stays is known to be whole, so none is retired", role, stage)
    return safe


def _is_proven(store: ObjectStore, found: Survey, newest_first: Sequence[Item], proven: set[str]) -> bool:
    """Whether the newest state is there with its size, and one of the states has been read back whole."""
    states = [item.artifact for item in newest_first if item.condition == "here"]
    if not states or states[0].folder in found.doubtful or not artifacts.is_present(store, states[0]):
        return False
    if proven.isdisjoint(state.folder for state in states):
        if not stored_files.is_whole(store, states[0]):
            # Every commit asks, and reading it all again would say the same.
            found.doubtful.add(states[0].folder)
            return False
        proven.add(states[0].folder)
    return True


def _is_whole(store: ObjectStore, found: Survey, newest_first: Sequence[Item]) -> bool:
    """Whether the newest version, and all that it builds on, is there with its size."""
    item: Item | None = newest_first[0] if newest_first else None
    while item is not None:
        if item.condition != "here" or not artifacts.is_present(store, item.artifact):
            return False
        delta = item.artifact.delta
        if delta is None:
            return True
        item = found.items.get((item.stage, delta.step, item.role))
    return False
