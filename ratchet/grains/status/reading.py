"""How a run is: read from its chain, from what its tasks say of themselves, from its pods and from Kubeflow.

Each of these may be missing, and the answer then says less. Trap: the chain is the truth, and the rest only explains
it: a run is finished because everything is committed, whatever a pod said last.
"""

import json
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ratchet.config.algorithm import OFFLINE
from ratchet.errors import DamagedError, NotCommittedError, RatchetError, StoreError
from ratchet.grains.status.chain import in_parallel, read_progress, value_at
from ratchet.grains.status.explaining import Sources, explained, is_finished, judged
from ratchet.grains.status.records import FINAL, Ownership, Promotion, RunStatus, Setup
from ratchet.grains.status.tasks import read_preflights
from ratchet.store import layout
from ratchet.store.run import Run
from ratchet.store.status import TaskStatus

logger = logging.getLogger(__name__)

_MOST_SUBMISSIONS = 200


def collect(run: Run, *, sources: Sources | None = None, now: float | None = None) -> RunStatus:
    """Return how a run is; NotCommittedError where nothing is known of it.

    A run outside a pipeline and a finished one are read from object storage alone. Where that cannot be read, pods and
    Kubeflow are asked about a pipeline run that works on it now; its StoreError is raised where there is none.
    """
    sources, at = sources or Sources(), time.time() if now is None else now
    try:
        return _collected(run, sources, at)
    except NotCommittedError:
        raise
    except StoreError as error:
        note = f"object storage cannot be read from here, so what is committed is not known: {error}"
        status = RunStatus(run=run.uri, state="unknown", at=at, setup=Setup(), notes=(note,))
        found = _submitted_again(None, status, sources, set())
        if found is None:
            raise
        # No task could say whether it has begun.
        return replace(found, state="running") if found.state == "starting" else found


def _collected(run: Run, sources: Sources, at: float) -> RunStatus:
    folders = run.store.list_folders("")
    if not folders:
        return _before_any_word(run, sources, at)
    owner = _owner(run) if "owner" in folders else None
    submissions, damaged = _submissions(run, owner.epoch) if owner is not None else ([], {})
    newest: Mapping[str, Any] = submissions[0] if submissions else {}
    config: Mapping[str, Any] = newest.get("config") or {}
    if owner is not None and newest.get("epoch") == owner.epoch:
        owner = replace(
            owner,
            submission_id=newest.get("submission_id") or "",
            version=newest.get("version") or "",
            has_damaged_submission=owner.epoch in damaged,
        )
    steps = sorted(step for name in folders if (step := layout.parse_step_folder(name)) is not None)
    status = RunStatus(
        run=run.uri,
        state="unknown",
        at=at,
        setup=_setup(config),
        progress=read_progress(run, steps, config) if owner is not None or steps else None,
        owner=owner,
        promotes_as=value_at(config, "promotion.name", ""),
        notes=tuple(damaged[epoch] for epoch in sorted(damaged, reverse=True)),
    )
    status = _with_promotion(run, status)
    known = run.store.list_folders("status") if "status" in folders else []
    claimed = [str(one["submission_id"]) for one in submissions if one.get("submission_id")]
    later = _unclaimed(run, [one for one in known if one not in claimed], status)
    asked = owner.submission_id if owner is not None else (later.submission_id if later is not None else "")
    read = status
    if asked and not is_finished(status):
        read = explained(run, status, config, asked, sources)
    judgement = judged(read, later)
    if asked and judgement.state in FINAL - {"finished", "skipped"}:
        return _submitted_again(run, status, sources, {*known, *claimed}) or judgement
    return judgement


def _before_any_word(run: Run, sources: Sources, at: float) -> RunStatus:
    """The status of a run whose first pod has not said a word yet: it may wait for its image."""
    status = RunStatus(run=run.uri, state="unknown", at=at, setup=Setup())
    found = _submitted_again(run, status, sources, set())
    if found is None:
        raise NotCommittedError(f"nothing is known of a run at {run.uri}: no claim, no commit, no task's status")
    return found


def _submitted_again(run: Run | None, status: RunStatus, sources: Sources, known: set[str]) -> RunStatus | None:
    """Return the status under a pipeline run that works on the run and of which object storage knows nothing yet."""
    if sources.active_runs is None:
        return None
    try:
        fresh = next((one for one in sources.active_runs() if str(one.id) not in known), None)
    except RatchetError as error:
        logger.info("Kubeflow was not asked for active runs: %s", error)
        return None
    if fresh is None:
        return None
    found = explained(run, status, {}, str(fresh.id), sources)
    return replace(found, state="starting" if found.state in ("running", "unknown") else found.state)


def _owner(run: Run) -> Ownership | None:
    epoch = run.newest_epoch()
    if epoch == 0:
        return None
    raw = json.loads(run.store.get(layout.owner(epoch)))
    host, pid = str(raw.get("host", "")), int(raw.get("pid", 0))
    return Ownership(epoch=epoch, host=host, pid=pid, is_alive=_lives(pid) if host == socket.gethostname() else None)


def _submissions(run: Run, newest_epoch: int) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return what was submitted, newest first, and epoch -> what is wrong with a damaged one, which is only its epoch.

    A claim whose runner died before it could submit has none.
    """
    damaged: dict[int, str] = {}

    def read(epoch: int) -> dict[str, Any] | None:
        try:
            return run.submission(epoch)
        except NotCommittedError:
            return None
        except DamagedError as error:
            damaged[epoch] = str(error)
            return {"epoch": epoch}

    oldest = max(0, newest_epoch - _MOST_SUBMISSIONS)
    return [one for one in in_parallel(read, range(newest_epoch, oldest, -1)) if one is not None], damaged


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _unclaimed(run: Run, submission_ids: Sequence[str], status: RunStatus) -> TaskStatus | None:
    """Return the preflight of the newest submission that did not claim the run and came after its owner."""
    found = read_preflights(run.store, submission_ids)
    if not found:
        return None
    owner = status.owner
    if owner is None:
        return found[-1]
    own = read_preflights(run.store, [owner.submission_id]) if owner.submission_id else []
    last_commit = status.progress.last_commit if status.progress is not None else None
    since = own[0].started if own else last_commit or 0.0
    return found[-1] if found[-1].started > since else None


def _with_promotion(run: Run, status: RunStatus) -> RunStatus:
    progress = status.progress
    if not status.promotes_as or progress is None or not progress.export:
        return status
    from ratchet.store import champions

    try:
        history = champions.decisions(run.root, status.promotes_as)
    except RatchetError as error:
        return replace(status, notes=(*status.notes, f"the decisions on {status.promotes_as} cannot be read: {error}"))
    mine = champions.decided(history, run.uri, progress.steps, progress.export_digest)
    if mine is None:
        return status
    serving = champions.serving(history)
    decided = Promotion(
        name=status.promotes_as,
        number=mine.number,
        verdict=mine.verdict,
        serves=serving.number if serving is not None else None,
        reasons=mine.reasons,
    )
    return replace(status, promotion=decided)


def _setup(config: Mapping[str, Any]) -> Setup:
    grain = value_at(config, "trainer.grain", "")
    objective = str(value_at(config, "algorithm.objective", "rl"))
    estimator = str(value_at(config, "algorithm.adv_estimator", ""))
    is_offline = objective in OFFLINE
    named = {"rl": estimator, "hybrid": f"{estimator} and sft"}
    return Setup(
        algorithm=named.get(objective, objective),
        model=str(value_at(config, "actor_rollout_ref.model.path", "")),
        grain=grain,
        steps_per_segment=value_at(config, "trainer.steps_per_segment") if grain == "segment" else None,
        prompts=value_at(config, "data.train_batch_size"),
        completions=None if is_offline else value_at(config, "actor_rollout_ref.rollout.n"),
        sampler=str(value_at(config, "actor_rollout_ref.rollout.name", "")),
    )
