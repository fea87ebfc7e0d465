"""Plain statistics of plain numbers."""

import math
from collections.abc import Sequence

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


def paired_interval(differences: Sequence[float], *, z: float = _Z95) -> tuple[float, float]:
    """Return the interval of the mean of paired differences in [-1, 1], 95% by default; (-1, 1) without pairs.

    The adjusted Wald interval of Agresti and Min (2005, Statistics in Medicine 24, section 2) for the difference of
    matched proportions: half an observation is added to each of the four outcomes of a pair, that is, half a pair of
    +1, half a pair of -1 and one of 0. So no difference at all is still an interval. Differences of means of several
    samples are taken the same way.
    """
    if not differences:
        return -1.0, 1.0
    number = len(differences) + 2
    mean = math.fsum(differences) / number
    variance = (math.fsum(value * value for value in differences) + 1) / number - mean * mean
    spread = z * math.sqrt(variance / number)
    return max(-1.0, mean - spread), min(1.0, mean + spread)
