"""How the thresholds of rollout correction are written: numbers and bands in text, read and checked without torch.

Trap: a number t means another band in each place: importance weights are truncated at t, modes with k1 keep the ratios
from 1/t to t, the other modes keep what is at most t.
"""

import math
from typing import Literal, cast, get_args

Level = Literal["token", "sequence"]
RejectionMode = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]


def weight_band(threshold: float | str) -> tuple[float | None, float]:
    """Return the lowest (None: weights are truncated) and highest importance weight of a number or "lo_hi".

    Raises ValueError where these are no positive numbers in order.

    Example: weight_band("0.5_5") is (0.5, 5.0), weight_band(2) is (None, 2.0).
    """
    return _parts(threshold, "rollout_is_threshold")


def rejection_bounds(modes: str, thresholds: float | str | None) -> dict[RejectionMode, tuple[float | None, float]]:
    """Return the lowest (None: there is none) and highest measure that each mode keeps; k1's are logs of ratios.

    `modes` and `thresholds` are lists with commas, with a threshold for each mode or one for all; a mode that is
    repeated counts once. Raises ValueError for another mode, thresholds that are missing or too many, and a threshold
    that does not fit its mode.

    Example: rejection_bounds("token_k1,seq_max_k2", "0.5_2,0.3") is {"token_k1": (-0.69, 0.69), "seq_max_k2":
    (None, 0.3)}, rounded.
    """
    names = list(dict.fromkeys(name.strip() for name in modes.split(",") if name.strip()))
    unknown = [name for name in names if name not in get_args(RejectionMode)]
    if unknown or not names:
        raise ValueError(f"expected rollout_rs modes of {', '.join(get_args(RejectionMode))}, got {modes!r}")
    written = [part.strip() for part in str("" if thresholds is None else thresholds).split(",") if part.strip()]
    if len(written) not in (1, len(names)):
        raise ValueError(f"expected one rollout_rs_threshold or {len(names)} for {modes!r}, got {thresholds!r}")
    if len(written) == 1:
        written = written * len(names)
    return {cast(RejectionMode, name): _bounds(name, part) for name, part in zip(names, written, strict=True)}


def _bounds(mode: str, threshold: str) -> tuple[float | None, float]:
    lowest, highest = _parts(threshold, f"the rollout_rs_threshold of {mode}")
    if not mode.endswith("k1"):
        if lowest is not None:
            raise ValueError(f"expected one number as the rollout_rs_threshold of {mode}, got {threshold!r}")
        return None, highest
    if lowest is None:
        lowest = 1.0 / highest
    if lowest > highest:
        raise ValueError(f"expected at least 1 or a band lo_hi as the rollout_rs_threshold of {mode}, got {threshold}")
    return math.log(lowest), math.log(highest)


def _parts(threshold: float | str, what: str) -> tuple[float | None, float]:
    try:
        numbers = [float(part) for part in str(threshold).split("_")]
    except ValueError:
        raise ValueError(f"expected a number or lo_hi as {what}, got {threshold!r}") from None
    if len(numbers) > 2 or not 0.0 < numbers[0] <= numbers[-1] < math.inf:
        raise ValueError(f"expected one positive number, or two in order as lo_hi, as {what}, got {threshold!r}")
    return (numbers[0] if len(numbers) == 2 else None), numbers[-1]
