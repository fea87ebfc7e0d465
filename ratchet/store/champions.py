"""What serves under a name: decisions that are numbered from 1, create-only, the newest of which says who is champion.

Traps: a gate is decided against the champion at the moment of its decision, so whoever loses the race for a number asks
again with the winner's decision before them. And nothing but these records decides: MLflow's aliases repeat them.
"""

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ratchet.errors import ConfigError, StoreError
from ratchet.store import artifacts, layout
from ratchet.store.decision import (
    Bars,
    BaseModel,
    Decision,
    Evaluation,
    Export,
    Improvement,
    TrainingData,
    Verdict,
)
from ratchet.store.manifest import Artifact
from ratchet.store.objects import ObjectNotFoundError, ObjectStore, open_store
from ratchet.store.run import Run

__all__ = [
    "Bars",
    "BaseModel",
    "Decision",
    "Evaluation",
    "Export",
    "Improvement",
    "TrainingData",
    "Verdict",
    "append",
    "champion",
    "decided",
    "decisions",
    "exported",
    "newest_about",
    "placed_by",
    "rollback",
    "serving",
]

logger = logging.getLogger(__name__)

EXPORT_STAGE = "checkpoint_export"


def decisions(root: str, name: str) -> list[Decision]:
    """Return every decision on `name` below `root`, oldest first; StoreError for one that is missing or damaged."""
    store, folder = open_store(root.rstrip("/") or "/"), f"{layout.CHAMPIONS}/{layout.check_champion_name(name)}"
    keys = {info.key for info in store.list_objects(folder)}
    found = (layout.parse_champion(key.rpartition("/")[2]) for key in keys)
    numbers = sorted({number for number in found if number and layout.champion(name, number) in keys})
    missing = set(range(1, max(numbers, default=0))) - set(numbers)
    if missing:
        raise StoreError(f"{store.uri}/{folder}: decision {min(missing)} is missing; decisions are never deleted")
    with ThreadPoolExecutor(8) as pool:
        history = list(pool.map(functools.partial(_read, store, name), numbers))
    for decision in history:
        if decision.targets is not None and history[decision.targets - 1].verdict != "promoted":
            raise StoreError(
                f"{store.uri}/{layout.champion(name, decision.number)} is damaged: it makes decision "
                f"{decision.targets} champion, which promoted nothing"
            )
    return history


def champion(root: str, name: str) -> Decision | None:
    """Return the promoted decision whose policy serves under `name` now; None if none does."""
    return serving(decisions(root, name))


def serving(history: Sequence[Decision]) -> Decision | None:
    """Return the promoted decision whose policy serves after `history`, a name's decisions from the first on."""
    if not history or history[-1].targets is None:
        return None
    return history[history[-1].targets - 1]


def newest_about(history: Sequence[Decision], run: str, step: int) -> Decision | None:
    """Return the newest decision about the policy of a run and step, rollbacks aside; None if none was made."""
    wanted = (run.rpartition("/")[2], step)
    about = (one for one in reversed(history) if one.verdict != "rolled_back" and (one.run_id, one.step) == wanted)
    return next(about, None)


def decided(history: Sequence[Decision], run: str, step: int, export_digest: str) -> Decision | None:
    """Return the decision that stands about an exported policy; None if one is still to be made.

    That is the newest about this run and step, if it was about this very export (a run of the same name may have been
    made anew), else the champion's, if that serves the same export from another run.
    """
    known = newest_about(history, run, step)
    if known is not None and known.export.digest == export_digest:
        return known
    champion = serving(history)
    return champion if champion is not None and champion.export.digest == export_digest else None


def placed_by(history: Sequence[Decision]) -> Decision | None:
    """Return the decision that put the present champion in its place: its own, or a rollback to it."""
    newest: Decision | None = None
    for decision in reversed(history):
        if decision.targets is None or decision.targets != history[-1].targets:
            break
        newest = decision
    return newest


def append(root: str, name: str, decision_for: Callable[[Sequence[Decision]], Decision]) -> Decision:
    """Publish the decision that `decision_for` makes of the history, and return it.

    `decision_for` numbers its decision by the history's length plus one; it may also return one of the history, which
    then stands and nothing is written. Where another decision takes the number first, it is asked again with that one
    in the history. A put whose answer was lost is recognised as one's own; after a StoreError it is open whether the
    decision was published, and the history says.
    """
    store = open_store(root.rstrip("/") or "/")
    history = decisions(root, name)
    while True:
        decision = decision_for(tuple(history))
        if decision.number <= len(history):
            return decision
        assert (decision.number, decision.name) == (len(history) + 1, name), decision
        if _create(store, layout.champion(name, decision.number), decision.to_json()):
            logger.info("%s: decision %d is %s", name, decision.number, decision.verdict)
            return decision
        logger.info("%s: another decision %d was first; deciding again", name, decision.number)
        # By number and not by listing: what refused the put is there to be read.
        with contextlib.suppress(ObjectNotFoundError):
            while True:
                history.append(_read(store, name, len(history) + 1))


def rollback(
    root: str, name: str, to: int | None = None, *, reason: str = "", submission_id: str = "", by: str = ""
) -> Decision:
    """Make an earlier promoted decision the champion again; by default the one that served before the present one.

    The export that is to serve must be whole (StoreError otherwise). Where decision `to` serves already, nothing is
    written. ConfigError for a number that was never promoted, and where there is nothing to go back to.
    """

    meant: list[int] = []

    def decide(history: Sequence[Decision]) -> Decision:
        present, placed = serving(history), placed_by(history)
        if present is None or placed is None:
            raise ConfigError(f"nothing serves as {name} below {root}, so there is nothing to roll back")
        meant.append(present.number)
        if to is None and present.number != meant[0]:
            # Somebody else was first: the champion that was meant is gone, and the next one was not.
            return placed
        target = _rollback_target(history, present, to)
        exported(root, target)
        if target.number == present.number:
            logger.info("%s: decision %d serves already", name, target.number)
            return placed
        return dataclasses.replace(
            target,
            number=len(history) + 1,
            verdict="rolled_back",
            compared_with=present.number,
            improvement=None,
            reasons=(reason or f"rolled back from decision {present.number} to decision {target.number}",),
            submission_id=submission_id,
            by=by,
            time=time.time(),
            targets=target.number,
        )

    return append(root, name, decide)


def _rollback_target(history: Sequence[Decision], present: Decision, to: int | None) -> Decision:
    number = to if to is not None else history[present.number - 2].targets if present.number > 1 else None
    promoted = [decision.number for decision in history if decision.verdict == "promoted"]
    if number is None:
        raise ConfigError(f"decision {present.number} is the first champion of {present.name}: none served before it")
    if number not in promoted:
        raise ConfigError(
            f"decision {number} of {present.name} promoted nothing; these did: {', '.join(map(str, promoted))}"
        )
    return history[number - 1]


def exported(root: str, decision: Decision) -> Artifact:
    """Return the files of a decision's export; StoreError where they are gone or not those that were decided on."""
    run = Run(root, decision.run_id)
    manifest = run.manifest(EXPORT_STAGE, decision.step)
    if manifest is None:
        raise StoreError(
            f"decision {decision.number} of {decision.name}: {run.uri} has no export of step {decision.step}"
        )
    artifact = manifest.output("export")
    if artifact.digest != decision.export.digest:
        raise StoreError(
            f"decision {decision.number} of {decision.name} is about another export than the one in {run.uri}: "
            f"its digest is {decision.export.digest}, the run's {artifact.digest}"
        )
    if not artifacts.is_present(run.store, artifact):
        raise StoreError(
            f"decision {decision.number} of {decision.name}: files of its export {run.uri}/{artifact.folder} are "
            "missing or cut short"
        )
    return artifact


def _read(store: ObjectStore, name: str, number: int) -> Decision:
    key = layout.champion(name, number)
    place = f"{store.uri}/{key}"
    decision = Decision.from_json(store.get(key), place=place)
    if (decision.name, decision.number) != (name, number):
        raise StoreError(f"{place} is decision {decision.number} of {decision.name}: a copy in the wrong place")
    target = decision.targets
    is_own, is_known = target == number, target is None or 0 < target <= number
    if is_own != (decision.verdict == "promoted") or not is_known:
        raise StoreError(f"{place} is damaged: a {decision.verdict} decision cannot make {decision.targets} champion")
    return decision


def _create(store: ObjectStore, key: str, body: bytes) -> bool:
    """Whether the record under `key` is now this one."""
    try:
        if store.put_create(key, body):
            return True
    except StoreError:
        # It is open whether it was written; a second decision for the same cause must not follow it.
        with contextlib.suppress(StoreError):
            if store.get(key) == body:
                return True
        raise
    return store.get(key) == body
