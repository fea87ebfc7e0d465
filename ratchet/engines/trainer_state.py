"""The trainer's resumable state on disk, as a torch distributed checkpoint.

Trap: a checkpoint is read into the tensors that exist, so that a missing or renamed one is an error and not a fresh
start. Its index is a pickle, which torch would load whatever it names; here it may name nothing but the index's own
types. Files of one number of ranks can be read by another.
"""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ratchet.errors import EngineError

NamedParameters = Sequence[tuple[str, nn.Parameter]]

_INDEX_TYPES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


def save_trainer_state(
    folder: Path, parameters: NamedParameters, optimizer: torch.optim.Optimizer, policy_version: int
) -> None:
    """Write master weights, optimizer state and version to `folder`; all ranks call it together."""
    state = _tensors(parameters, optimizer) | {"policy_version": torch.tensor(policy_version)}
    save(state, storage_writer=_Writer(folder))


def load_trainer_state(folder: Path, parameters: NamedParameters, optimizer: torch.optim.Optimizer) -> int:
    """Read `folder` into the given parameters and optimizer in place, and return the version.

    Raises EngineError where the folder holds no state, one of another model, or an index that is not one.
    """
    index = folder / ".metadata"
    if not index.is_file():
        raise EngineError(f"expected a trainer state in {str(folder)!r}, found none")
    _check_index(index)
    version = torch.tensor(-1)
    state: dict[str, Any] = _tensors(parameters, optimizer) | {"policy_version": version}
    try:
        load(state, storage_reader=FileSystemReader(folder))
    except CheckpointException as error:
        raise EngineError(f"trainer state in {str(folder)!r} does not fit this model: {error}") from error
    return int(version)


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        # torch's own names the folder on this machine and a random id: equal states would have unequal bytes.
        return StorageMeta()


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _INDEX_TYPES:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _check_index(path: Path) -> None:
    try:
        with path.open("rb") as file:
            _IndexUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise EngineError(f"expected the index of a trainer state in {str(path)!r}: {error}") from error


def _tensors(parameters: NamedParameters, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters:
        tensors[f"weights.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors
