"""Promotion and rollback: decide in the store, then mirror the decision in MLflow.

Trap: a pod that starts again must give the answer that it gave before, so a policy that was decided on under a name
stays decided, whatever has happened to the name since; only `again` asks anew.
"""

import getpass
import logging
import os
import socket
import time
from collections.abc import Sequence

from ratchet.config import RunConfig
from ratchet.errors import RatchetError
from ratchet.stages.gate import candidate, decide
from ratchet.stages.measurement import newest_config
from ratchet.store import champions, layout
from ratchet.store.champions import Bars, Decision
from ratchet.store.run import Run
from ratchet.tracking.show_champions import decision_line, decision_markdown, decision_numbers

logger = logging.getLogger(__name__)


def promote(
    run: Run,
    config: RunConfig,
    *,
    submission_id: str = "",
    by: str = "",
    again: bool = False,
    baseline: Run | None = None,
) -> Decision | None:
    """Decide whether the run's last policy becomes the champion of `promotion.name`; None where no name is set.

    Returns what was decided before about the same policy, unless `again`, and the champion's own decision where that
    serves this very policy already. NotCommittedError where the policy is not evaluated or not exported. `baseline` is
    as in `ratchet.stages.gate.decide`. ConfigError where there are no data.val_files.
    """
    promotion = config.promotion
    if not promotion.name:
        return None
    name = layout.check_champion_name(promotion.name)
    bars = Bars(
        min_accuracy=promotion.min_accuracy,
        min_improvement=promotion.min_improvement,
        significant=promotion.significant,
    )
    found = candidate(run, config)

    def decision_for(history: Sequence[Decision]) -> Decision:
        champion = champions.serving(history)
        known = None if again else champions.decided(history, found.run.uri, found.step, found.export.digest)
        if known is not None and (known.run_id, known.step) == (found.run.run_id, found.step):
            if known.bars != bars:
                logger.warning(
                    "%s: decision %d on this policy stands, though it was made under other bars; ratchet promote %s "
                    "--again decides anew",
                    name,
                    known.number,
                    run.uri,
                )
            return known
        if champion is not None and champion.export.digest == found.export.digest:
            logger.info("%s: this policy serves already, by decision %d", name, champion.number)
            return champion
        return decide(
            found,
            bars,
            champion,
            number=len(history) + 1,
            name=name,
            submission_id=submission_id,
            by=by or who(),
            time=time.time(),
            baseline=baseline,
        )

    decision = champions.append(run.root, name, decision_for)
    logger.info("%s", sentence(decision))
    mirror(run.root, name, config.trainer.logger)
    return decision


def rollback(
    root: str, name: str, to: int | None = None, *, reason: str = "", submission_id: str = "", by: str = ""
) -> Decision:
    """Make an earlier champion serve again (`ratchet.store.champions.rollback`), and mirror that."""
    decision = champions.rollback(root, name, to, reason=reason, submission_id=submission_id, by=by or who())
    try:
        loggers: Sequence[str] = newest_config(Run(root, decision.run_id)).trainer.logger
    except RatchetError as error:
        # The policy's run need not be readable for its export to serve.
        logger.info("%s: cannot say where run %s was tracked: %s", name, decision.run, error)
        loggers = ()
    mirror(root, name, loggers)
    return decision


def mirror(root: str, name: str, loggers: Sequence[str] = ()) -> bool | None:
    """Bring MLflow up to date if it is in use: named by the run's loggers or MLFLOW_TRACKING_URI. None if it is not."""
    if "mlflow" not in loggers and not os.environ.get("MLFLOW_TRACKING_URI"):
        return None
    from ratchet.tracking.registry import sync

    return sync(root, name)


def sentence(decision: Decision) -> str:
    """Return what was decided and why, in one line."""
    return "; ".join([f"{decision.name} {decision_line(decision)}", *decision.reasons])


def numbers(decision: Decision) -> dict[str, float]:
    """Return the decision's numbers by name."""
    return decision_numbers(decision)


def report(decision: Decision) -> list[str]:
    """Return the decision as lines of Markdown."""
    return decision_markdown(decision)


def who() -> str:
    """Return who decides: this pod, or this user at this machine."""
    pod = os.environ.get("RATCHET_POD_NAME")
    if pod:
        return pod
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user id without an entry in the system's list, as in most pods
        user = f"uid {os.getuid()}"
    return f"{user} at {socket.gethostname()}"
