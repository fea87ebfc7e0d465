"""Every error that Ratchet raises on purpose.

    RatchetError
    |- ConfigError (ValueError)          a run configuration that cannot work
    |- DataError (ValueError)            a row, file or column that cannot be used
    |- NumericsError (ArithmeticError)   a non-finite reward, loss, gradient or weight
    |- EngineError (RuntimeError)        a model that cannot be loaded, sampled or trained
    |- ClusterError (RuntimeError)       the cluster's API cannot be used or refuses
    |  `- NotAllowedError                this account may not read that there
    `- StoreError (OSError)              object storage that cannot be read or written
       |- StoreUnavailableError          it may answer when it is asked again
       |- DamagedError                   stored bytes are not those that were committed
       |- NotCommittedError              an artifact that no manifest names yet
       |- RetiredError                   an artifact that retention has deleted on purpose
       |- BudgetError                    the run holds as much as it may
       |- CommitConflictError            a manifest that exists with other content
       `- OwnershipLostError             another runner has claimed the run

Each is also the standard library's type, so that callers who know nothing of Ratchet can catch it.
"""


class RatchetError(Exception):
    """Base of all errors that are raised on purpose."""


class ConfigError(RatchetError, ValueError):
    """A run configuration that cannot work; names the key, what was expected and what came."""


class DataError(RatchetError, ValueError):
    """A row, file or column that cannot be used; names the place."""


class NumericsError(RatchetError, ArithmeticError):
    """A number that is not finite where the run cannot go on without it."""


class EngineError(RatchetError, RuntimeError):
    """A model that cannot be loaded, sampled or trained."""


class ClusterError(RatchetError, RuntimeError):
    """The cluster's API cannot be used or refuses."""


class NotAllowedError(ClusterError):
    """The cluster's API forbids this account a request; the message says which RBAC rule would allow it."""


class StoreError(RatchetError, OSError):
    """Object storage that cannot be read or written."""


class StoreUnavailableError(StoreError):
    """Object storage did not answer, or said that it cannot answer now."""


class DamagedError(StoreError):
    """Stored bytes are not those that were committed."""


class NotCommittedError(StoreError):
    """An artifact was asked for that no manifest names; the fence between stages."""


class RetiredError(StoreError):
    """An artifact was asked for that was deleted on purpose; the message has the record of it."""


class BudgetError(StoreError):
    """The run holds more than trainer.storage_budget_gib; what is committed stays, and the run can go on."""


class CommitConflictError(StoreError):
    """A manifest exists already, with other inputs, configuration or content."""


class OwnershipLostError(StoreError):
    """Another runner has claimed the run; this one must not commit any more."""
