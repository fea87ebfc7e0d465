"""Deleting what attempts left behind that committed nothing, and files that were never finished.

Trap: an attempt that is under way looks like one that died. It may be one of the newest claim, or of an earlier claim
whose last commit was already on its way when it lost the run; only time tells them apart.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ratchet.errors import StoreError
from ratchet.store import layout
from ratchet.store.chain import Chain, Leftover
from ratchet.store.objects import TEMPORARY, ObjectStore, open_store
from ratchet.store.run import Run
from ratchet.store.usage import usage
from ratchet.store.verification import read_chain

NEWEST_CLAIM_SECONDS = 24 * 3600.0
"""How long an attempt of the newest claim must have written nothing to count as dead."""
EARLIER_CLAIM_SECONDS = 3600.0
"""How long one of an earlier claim must have written nothing, and have lost the run: longer than any request takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What may be deleted of a run."""

    due: tuple[Leftover, ...]
    kept: tuple[Leftover, ...]
    """Attempts that may still be under way."""
    sizes: dict[str, int]
    """Kind -> bytes, of everything that the run holds."""


def plan(run: Run, *, older_than: float | None = None, now: float | None = None) -> Plan:
    """Say which leftovers of a run are due; nothing is deleted.

    `older_than` is how many seconds an attempt must have been quiet, in place of the two limits above; `now` is the
    time in Unix seconds.
    """
    return _plan(read_chain(run), older_than, time.time() if now is None else now)


def delete(run: Run, planned: Plan) -> tuple[Leftover, ...]:
    """Delete what was due and still is as it was when it was planned; return it.

    The chain is read again. StoreError for a run with a fault: what a damaged manifest named looks left over, too.
    """
    chain = read_chain(run)
    if chain.faults:
        raise StoreError(
            f"{run.uri} has {len(chain.faults)} faults, so nothing is deleted: {chain.faults[0]}; "
            f"ratchet verify {run.uri} names them all"
        )
    due = {one.folder: (one.objects, one.modified) for one in planned.due}
    found = tuple(one for one in chain.leftovers if due.get(one.folder) == (one.objects, one.modified))
    beside = open_store(run.root or "/")
    with ThreadPoolExecutor(8) as pool:
        for one in found:
            store = beside if one.is_beside_the_run else run.store
            for _ in pool.map(lambda info, store=store: _delete(store, info.key), one.objects):
                pass
    return found


def _delete(store: ObjectStore, key: str) -> None:
    is_unfinished = key.rpartition("/")[2].startswith(TEMPORARY)
    (store.discard if is_unfinished else store.delete)(key)


def _plan(chain: Chain, older_than: float | None, now: float) -> Plan:
    claims = {epoch: info.modified for key, info in chain.objects.items() if (epoch := layout.parse_owner(key))}
    newest = max(claims, default=0)

    def is_due(one: Leftover) -> bool:
        is_newest = one.epoch >= newest
        quiet_since = one.modified if is_newest else max(one.modified, claims[newest])
        limit = NEWEST_CLAIM_SECONDS if is_newest else EARLIER_CLAIM_SECONDS
        return now - quiet_since >= (limit if older_than is None else older_than)

    due = tuple(one for one in chain.leftovers if is_due(one))
    kept = tuple(one for one in chain.leftovers if one not in due)
    return Plan(due=due, kept=kept, sizes=usage(chain))
