"""The trainer's resumable state on disk, as a torch distributed checkpoint.

Trap: a checkpoint is read into the tensors that exist, so that a missing or renamed one is an error and not a fresh
start. Its index is a pickle, which torch would load whatever it names; here it may name nothing but the index's own
types. Files of one number of ranks can be read by another.
"""

import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ratchet.errors import EngineError

NamedParameters = Sequence[tuple[str, nn.Parameter]]

_WEIGHTS = "weights."
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
    _check_index(folder)
    version = torch.tensor(-1)
    state: dict[str, Any] = _tensors(parameters, optimizer) | {"policy_version": version}
    try:
        load(state, storage_reader=FileSystemReader(folder))
    except CheckpointException as error:
        raise EngineError(f"trainer state in {str(folder)!r} does not fit this model: {error}") from error
    return int(version)


def load_full_weights(folder: Path) -> dict[str, Tensor]:
    """Return the master weights of a state as full float32 tensors on the CPU, under their Hugging Face names.

    Needs no process group, whatever the number of ranks that wrote the state. Raises EngineError as
    `load_trainer_state` does.
    """
    _check_index(folder)
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if name.startswith(_WEIGHTS) and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        # It says that one process reads alone, which is what was asked for.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return {name.removeprefix(_WEIGHTS): tensor for name, tensor in state.items()}


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


def _check_index(folder: Path) -> None:
    path = folder / ".metadata"
    if not path.is_file():
        raise EngineError(f"expected a trainer state in {str(folder)!r}, found none")
    try:
        with path.open("rb") as file:
            _IndexUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise EngineError(f"expected the index of a trainer state in {str(path)!r}: {error}") from error


def _tensors(parameters: NamedParameters, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters:
        tensors[f"{_WEIGHTS}{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors
