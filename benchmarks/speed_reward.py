"""The reward of the speed benchmark, the same function for every system: verl's signature, which Ratchet takes, too.

Trap: a model with random weights never answers, and equal rewards would be zero gradients: weights that do not change
are cheap to publish. So a hundredth is added that depends on the text.
"""

import zlib
from typing import Any

from ratchet.rewards.gsm8k import grade


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Return 1 for the right answer, 0 otherwise, and between 0 and 0.06 for the text."""
    return grade(solution_str, ground_truth).reward + 0.01 * (zlib.crc32(solution_str.encode()) % 7)
