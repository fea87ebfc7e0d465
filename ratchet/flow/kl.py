"""KL controllers in a flow: Ratchet's own objects, read for what they begin with and rebuilt from a config."""

from collections.abc import Callable
from typing import Any

from ratchet.errors import ConfigError

_CTRL = "algorithm.kl_ctrl"
COEFFICIENT = f"{_CTRL}.kl_coef"


def controller_keys(controller: Any) -> dict[str, Any]:
    """Return the config keys of a FixedKLController or an AdaptiveKLController."""
    kind = type(controller).__name__
    if kind not in ("FixedKLController", "AdaptiveKLController") or not hasattr(controller, "value"):
        raise ConfigError(f"kl_ctrl is {controller!r}: expected AdaptiveKLController or FixedKLController")
    if kind == "FixedKLController":
        return {f"{_CTRL}.type": "fixed", COEFFICIENT: controller.value}
    if controller.compat != "ratchet":
        raise ConfigError(f"kl_ctrl has compat={controller.compat!r}: say it once for all, as algorithm.compat")
    horizon = controller.horizon
    return {
        f"{_CTRL}.type": "adaptive",
        COEFFICIENT: controller.value,
        f"{_CTRL}.target_kl": controller.target,
        f"{_CTRL}.horizon": int(horizon) if float(horizon).is_integer() else horizon,
    }


def controller_of(value: Callable[[str], Any]) -> Any:
    """Return the controller that a config describes; `value` gives a key's."""
    from ratchet.algorithms.kl_controller import AdaptiveKLController, FixedKLController

    initial = value(COEFFICIENT)
    if value(f"{_CTRL}.type") == "fixed":
        return FixedKLController(initial)
    return AdaptiveKLController(initial, value(f"{_CTRL}.target_kl"), value(f"{_CTRL}.horizon"))


def controller_repr(controller: Any) -> str:
    """Return the call that makes the controller."""
    if type(controller).__name__ == "FixedKLController":
        return f"FixedKLController({controller.value})"
    return (
        f"AdaptiveKLController(init_kl_coef={controller.value}, target={controller.target}, "
        f"horizon={controller.horizon})"
    )
