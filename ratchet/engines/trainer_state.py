"""The trainer's resumable state on disk, as a torch distributed checkpoint.

Trap: a checkpoint is read into the tensors that exist, so that a missing or renamed one is an error and not a fresh
start. Files of one number of ranks can be read by another.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ratchet.errors import EngineError

NamedParameters = Sequence[tuple[str, nn.Parameter]]


def save_trainer_state(
    folder: Path, parameters: NamedParameters, optimizer: torch.optim.Optimizer, policy_version: int
) -> None:
    """Write master weights, optimizer state and version to `folder`; all ranks call it together."""
    state = _tensors(parameters, optimizer) | {"policy_version": torch.tensor(policy_version)}
    save(state, storage_writer=FileSystemWriter(folder))


def load_trainer_state(folder: Path, parameters: NamedParameters, optimizer: torch.optim.Optimizer) -> int:
    """Read `folder` into the given parameters and optimizer in place, and return the version.

    Raises EngineError where the folder holds no state, or one of another model.
    """
    if not (folder / ".metadata").is_file():
        raise EngineError(f"expected a trainer state in {str(folder)!r}, found none")
    version = torch.tensor(-1)
    state: dict[str, Any] = _tensors(parameters, optimizer) | {"policy_version": version}
    try:
        load(state, storage_reader=FileSystemReader(folder))
    except CheckpointException as error:
        raise EngineError(f"trainer state in {str(folder)!r} does not fit this model: {error}") from error
    return int(version)


def _tensors(parameters: NamedParameters, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters:
        tensors[f"weights.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors
