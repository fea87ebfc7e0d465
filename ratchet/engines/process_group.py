"""The process group that trainers share: torchrun's where one was launched, else a group of this process alone.

Trap: launchers that set other variables than torchrun's leave every process believing that it is alone, and each would
train on everything without a word; so the world size is asserted, never assumed.
"""

import logging
import os
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from ratchet.engines.model import torch_device
from ratchet.errors import ConfigError

logger = logging.getLogger(__name__)

# How many trainers use the group that `join_group` made; a group made by others is theirs to end.
_owned_uses = 0
_groups_made = 0


def join_group(world_size: int, device: torch.device) -> DeviceMesh:
    """A mesh of all processes, over gloo on CPU and NCCL on GPUs. Each call is paired with one of `leave_group`.

    Raises ConfigError where the number of processes is not `world_size`.
    """
    global _owned_uses
    launched = _launched_world_size()
    if launched != world_size:
        raise ConfigError(
            f"expected a world size of {world_size}, got {launched} (from RANK and WORLD_SIZE as torchrun sets them)"
        )
    if _owned_uses or not distributed.is_initialized():
        if not _owned_uses:
            _init(launched, device)
        _owned_uses += 1
    return init_device_mesh(device.type, (world_size,))


def leave_group() -> None:
    """Give up one use of the group, and end it with the last one if it was made here."""
    global _owned_uses
    if _owned_uses:
        _owned_uses -= 1
        if not _owned_uses:
            distributed.destroy_process_group()


def local_device(name: str) -> torch.device:
    """The device of this process: "auto" is the GPU of torchrun's LOCAL_RANK where there is one, else the CPU."""
    device = torch_device(name)
    if device.type == "cuda":
        index = int(os.environ.get("LOCAL_RANK", 0)) if device.index is None else device.index
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


def _launched_world_size() -> int:
    if distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else 1


def _init(world_size: int, device: torch.device) -> None:
    global _groups_made
    options: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    if world_size == 1 and "RANK" not in os.environ:
        # A store in memory: one process alone needs no port, which could be taken.
        options |= {"store": HashStore(), "rank": 0, "world_size": 1}
    else:
        # The launcher's store outlives a group, and the next one would meet the keys of the last: a prefix for each.
        _groups_made += 1
        store, rank, _ = next(rendezvous("env://"))
        options |= {"store": PrefixStore(f"group/{_groups_made}", store), "rank": rank, "world_size": world_size}
    distributed.init_process_group(**options)
    logger.info("joined a process group of %d over %s", world_size, options["backend"])
