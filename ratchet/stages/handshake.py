"""Whether a sampler really holds, and uses, the weights that it was given.

Trap: an engine that keeps old weights, or cached keys and values of old ones, goes on without an error, and trains on
samples of another policy. Comparing bits finds weights that were not replaced; comparing answers finds the rest.
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ratchet.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from ratchet.engines.sampler import Sampler
    from ratchet.engines.trainer import Trainer

logger = logging.getLogger(__name__)


def check_same_weights(sampler: "Sampler", weights: "Iterable[Tensor]", place: tuple[str, int | None, str]) -> None:
    """Raise EngineError unless the sampler holds the bits of `weights`; one that cannot say is believed."""
    from ratchet.engines.fingerprint import fingerprint

    found = sampler.fingerprint()
    if found is None:
        return
    expected = fingerprint(weights)
    if found != expected:
        stage, step, role = place
        raise EngineError(
            f"the sampler does not hold the {role} that {stage} of step {step} published: "
            f"expected fingerprint {expected:x}, got {found:x}"
        )


def compare_log_probs(
    sampler: "Sampler", trainer: "Trainer", token_ids: list[int], *, limit: float, place: tuple[str, int | None, str]
) -> float:
    """Return the mean difference, in nats, of the log-probs of a prompt's tokens; EngineError above `limit`."""
    found = sampler.prompt_log_probs(token_ids)
    (expected,) = trainer.log_probs([token_ids[:1]], [token_ids[1:]], temperature=1.0)
    drift = sum(abs(one - other) for one, other in zip(found, expected, strict=True)) / max(len(found), 1)
    if not drift <= limit:
        stage, step, role = place
        raise EngineError(
            f"the sampler does not answer as the {role} that {stage} of step {step} published: log-probs of a fixed "
            f"prompt differ by {drift:.4g} nats on average, more than actor_rollout_ref.rollout.max_log_prob_drift "
            f"{limit:g}"
        )
    logger.debug("sampler and trainer differ by %.3g nats on the fixed prompt", drift)
    return drift
