"""What one process keeps of its run in storage: old versions and states retired after each commit, the budget held.

Trap: inside a segment this is the writer's work, behind everything that was computed before. What it may decide on is
what is committed, and that it learns from the manifests which it is handed. The main thread takes part only while no
writer is at work, but for a glance at the sum (`is_over`).
"""

import logging

from ratchet.config import RunConfig
from ratchet.errors import BudgetError, OwnershipLostError, StoreError, StoreUnavailableError
from ratchet.store import index, retention
from ratchet.store.manifest import Manifest
from ratchet.store.retention import Rules
from ratchet.store.retired import WEIGHTS
from ratchet.store.run import CRITIC_UPDATE, POLICY_UPDATE, Run
from ratchet.store.survey import NAMING, Survey, survey
from ratchet.store.usage import in_words, readable, usage
from ratchet.store.verification import read_chain

logger = logging.getLogger(__name__)

_GIB = 1024**3


def rules_of(config: RunConfig) -> Rules:
    """Return what the config wants kept."""
    trainer = config.trainer
    return Rules(
        versions=trainer.keep_policies,
        save_freq=trainer.save_freq,
        states={POLICY_UPDATE: trainer.max_actor_ckpt_to_keep, CRITIC_UPDATE: trainer.max_critic_ckpt_to_keep},
        test_freq=trainer.test_freq if config.data.val_files else -1,
    )


class Storage:
    """Retention and budget of one run, by one process that may commit to it."""

    def __init__(self, run: Run, config: RunConfig, proven: set[str]) -> None:
        """`proven` are the folders of trainer states that this process has read back whole; more are added."""
        self._run = run
        self._rules = rules_of(config)
        self._limit = config.trainer.storage_budget_gib
        self._proven = proven
        self._found: Survey | None = None
        self._noted: tuple[str, int | None] | None = None

    def committed(self, manifest: Manifest) -> None:
        """Take note of a commit; after one of an update, retire what is due, and index the steps that it completes.

        After an evaluation or an export, too: whoever made the last update may have ended before it was done with this.
        """
        place = manifest.stage, manifest.step
        # Where storage does not answer, the same commit is told of again.
        if self._found is not None and place != self._noted:
            self._found.add(manifest)
        self._noted = place
        if manifest.stage in (*WEIGHTS, *NAMING) and manifest.step:
            self._retire()
        index.committed(self._run, manifest)

    def forget(self) -> None:
        """Look at the run anew when it is next asked for."""
        self._found = None

    def is_over(self) -> bool:
        """Whether more is committed than may be, as far as this process knows without asking."""
        return self._limit is not None and self._found is not None and self._found.bytes > self._limit * _GIB

    def make_room(self) -> None:
        """Before work begins: raise BudgetError where the run holds more than it may, and nothing more can be retired.

        Where no budget is set, storage is not asked.
        """
        if self._limit is None:
            return
        if self._found is None or self.is_over():
            self._look()
        if self.is_over():
            self._retire()
        if self.is_over():
            raise BudgetError(self._over_budget())

    def _look(self) -> Survey:
        self._found = survey(self._run, with_weights=self._rules.versions is not None)
        return self._found

    def _retire(self) -> None:
        """Retire what is due; what cannot be read of an old step ends no run."""
        try:
            found = self._look() if self._found is None else self._found
            retention.retire(self._run, found, self._rules, proven=self._proven)
        except (StoreUnavailableError, OwnershipLostError):
            raise
        except StoreError as error:
            logger.warning("nothing more is retired: %s (`ratchet verify` names what is damaged)", error)

    def _over_budget(self) -> str:
        sizes = usage(read_chain(self._run))
        keep = self._rules.versions
        fewer = "set trainer.keep_policies" if keep is None else f"lower trainer.keep_policies (now {keep})"
        return (
            f"run {self._run.uri} holds {readable(sum(sizes.values()))}, more than the "
            f"{readable((self._limit or 0) * _GIB)} of trainer.storage_budget_gib, and retention lets nothing more go: "
            f"{in_words(sizes)}. No step was begun, and all that is committed stays. Raise trainer.storage_budget_gib, "
            f"or {fewer}, or have `ratchet gc {self._run.uri}` show what dead attempts left; then submit again with "
            "the same run id"
        )
