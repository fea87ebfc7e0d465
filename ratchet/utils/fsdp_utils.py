"""`from ratchet.utils.fsdp_utils import load_fsdp_checkpoint`: full tensors from a sharded checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def load_fsdp_checkpoint(path: str | Path) -> "dict[str, Tensor]":
    """Return the full float32 weights of a trainer state (the folder `trainer_state` of a policy_update), by name."""
    from ratchet.engines.trainer_state import load_full_weights

    return load_full_weights(Path(path))
