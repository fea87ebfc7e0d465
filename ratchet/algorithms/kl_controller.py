"""The coefficient of the KL penalty in the reward: fixed, or steered towards a target divergence.

Trap: the coefficient follows from every step before it, so a resumed run needs the controller's state; and one KL that
is not finite would make it NaN for ever, so such a KL is refused. Plain numbers: this module imports no torch.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ratchet.algorithms.batch import Compat

_LARGEST_ERROR = 0.2


class FixedKLController:
    """A coefficient that no divergence changes."""

    def __init__(self, kl_coef: float) -> None:
        self._value = _checked("kl_coef", kl_coef, kl_coef >= 0, "0 or more")

    @property
    def value(self) -> float:
        """The coefficient."""
        return self._value

    def update(self, current_kl: float, n_steps: int) -> None:
        """Change nothing; raises ValueError for a KL that is not finite, as the adaptive controller does."""
        _checked("current_kl", current_kl, True, "a finite number")

    def state(self) -> dict[str, float]:
        """Return what `load_state` needs to go on from here."""
        return {"value": self._value}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Take over the state of another fixed controller."""
        self._value = _checked("value", state["value"], state["value"] >= 0, "0 or more")


class AdaptiveKLController:
    """A proportional controller in log space (https://arxiv.org/abs/1909.08593, section 2.2).

    `update` multiplies the coefficient by `1 + clip(current_kl / target - 1, -0.2, 0.2) * n_steps / horizon`, where
    `n_steps` is the number of rollouts of the step. It rises while the divergence is above `target` (nats) and falls
    while it is below; `horizon` (rollouts) says how slowly.

    Raises ValueError for a target or horizon that is not above 0, for a negative coefficient, and for a KL that is not
    finite, which leaves the coefficient as it was. A step of more than `5 * horizon` rollouts cannot bring the
    coefficient below 0; with `compat="verl"` it can, and from there on the penalty is a reward.
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: float, *, compat: "Compat" = "ratchet") -> None:
        self._value = _checked("init_kl_coef", init_kl_coef, init_kl_coef >= 0, "0 or more")
        self.target = _checked("target", target, target > 0, "above 0")
        self.horizon = _checked("horizon", horizon, horizon > 0, "above 0")
        self.compat = compat

    @property
    def value(self) -> float:
        """The coefficient of the next step."""
        return self._value

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move the coefficient after a step of `n_steps` rollouts whose mean KL was `current_kl` nats."""
        _checked("current_kl", current_kl, True, "a finite number")
        error = min(max(current_kl / self.target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        value = self._value * (1 + error * n_steps / self.horizon)
        self._value = value if self.compat == "verl" else max(value, 0.0)

    def state(self) -> dict[str, float]:
        """Return what `load_state` needs to go on from here."""
        return {"value": self._value}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Go on from the coefficient of another controller's `state()`; target and horizon stay this one's."""
        is_allowed = state["value"] >= 0 or self.compat == "verl"
        self._value = _checked("value", state["value"], is_allowed, "0 or more")


def _checked(name: str, number: float, is_allowed: bool, wanted: str) -> float:
    if not (math.isfinite(number) and is_allowed):
        raise ValueError(f"expected {name} to be {wanted}, got {number}")
    return float(number)
