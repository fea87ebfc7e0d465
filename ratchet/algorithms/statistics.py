"""Plain statistics of plain numbers."""

import math

_Z95 = 1.959963984540054


def wilson_interval(successes: float, trials: int, *, z: float = _Z95) -> tuple[float, float]:
    """Return the Wilson score interval of a proportion (Wilson 1927), 95% by default; (0, 1) without trials.

    `successes` may be fractional: the sum of per-prompt means, with the prompts as trials.
    """
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
