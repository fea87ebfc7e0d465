"""Arrays from the host to a device.

Trap: a copy to a GPU from pageable memory waits for all that runs there, and every wait of a training step is time in
which the host queues nothing.
"""

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to `device`; to a GPU by way of pinned memory, without waiting. On the CPU memory is shared."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
