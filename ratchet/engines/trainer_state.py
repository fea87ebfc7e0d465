"""The trainer's resumable state on disk, as a torch distributed checkpoint.

Trap: a checkpoint is read into the tensors that exist, so that a missing or renamed one is an error and not a fresh
start. Its index is a pickle, which torch would load whatever it names; here it may name nothing but the index's own
types. Files of one number of ranks can be read by another; those of adapters are not full weights.
"""

import pickle
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ratchet.errors import EngineError

NamedParameters = Sequence[tuple[str, nn.Parameter]]

_WEIGHTS = "weights."
_ADAPTER = ".lora_A."
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
    state = _state(parameters, optimizer, policy_version)
    if distributed.get_world_size() == 1:
        _write(state, folder)
    else:
        save(state, storage_writer=_Writer(folder), planner=_Planner())


class StagedState:
    """A trainer's state in host memory. The memory is its own until it is dropped, and the next one's after that."""

    def __init__(self, tensors: dict[str, Tensor], copied: torch.cuda.Event | None) -> None:
        """Use `StateStaging.stage`."""
        self._tensors = tensors
        self._copied = copied

    def write(self, folder: Path) -> None:
        """Write what `save_trainer_state` writes, byte for byte: from any thread, while training goes on."""
        if self._copied is not None:
            self._copied.synchronize()
        _write(self._tensors, folder)


class StateStaging:
    """Copies the state of a trainer of one process to host memory, beside what a GPU computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        self._unused: list[dict[str, Tensor]] = []

    def stage(self, parameters: NamedParameters, optimizer: torch.optim.Optimizer, policy_version: int) -> StagedState:
        """Begin the copy, into pinned memory from a GPU; before anything of the state is changed comes `settle`."""
        state = _state(parameters, optimizer, policy_version)
        # To pin memory takes longer than to copy: that of a state that was dropped is taken up again.
        host = self._unused.pop() if self._unused else _host_memory(state, is_pinned=self._stream is not None)
        if self._stream is None:
            _copy(state, host)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                _copy(state, host)
                self._copied = self._stream.record_event()
        staged = StagedState(host, self._copied)
        weakref.finalize(staged, self._unused.append, host)
        return staged

    def settle(self) -> None:
        """Let what the GPU is given next wait for the copy, if one is under way."""
        if self._stream is not None and self._copied is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)
            self._copied = None


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
        for cause, _ in error.failures.values():
            if not isinstance(cause, Exception):
                # torch takes a signal that ends the process for a fault of the files.
                raise cause from None
        raise EngineError(f"trainer state in {str(folder)!r} does not fit this model: {error}") from error
    return int(version)


def load_full_weights(folder: Path) -> dict[str, Tensor]:
    """Return the master weights of a state as full float32 tensors on the CPU, under their Hugging Face names.

    Needs no process group, whatever the number of ranks that wrote the state. Raises EngineError as
    `load_trainer_state` does, and for a state of adapters, which lacks the weights that they are added to.
    """
    _check_index(folder)
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if name.startswith(_WEIGHTS) and isinstance(entry, TensorStorageMetadata)
    }
    if any(_ADAPTER in name for name in state):
        raise EngineError(f"expected full weights in {str(folder)!r}, got adapters: take the published policy instead")
    with warnings.catch_warnings():
        # It says that one process reads alone, which is what was asked for.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return {name.removeprefix(_WEIGHTS): tensor for name, tensor in state.items()}


def _host_memory(state: Mapping[str, Tensor], *, is_pinned: bool) -> dict[str, Tensor]:
    return {name: torch.empty_like(tensor, device="cpu", pin_memory=is_pinned) for name, tensor in state.items()}


def _copy(state: Mapping[str, Tensor], host: Mapping[str, Tensor]) -> None:
    torch._foreach_copy_([host[name] for name in state], list(state.values()), non_blocking=True)


def _write(state: dict[str, Tensor], folder: Path) -> None:
    """Do in one process what torch's `save` does in many.

    Without its collectives, which belong to the main thread; without its warning that there are none, which no other
    thread may silence; and with one object graph, of which the index, a pickle, shows which objects are the same.
    """
    writer, planner = _Writer(folder), _Planner()
    planner.set_up_planner(state, is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, index = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(index, [writer.write_data(plan, planner).value()])


class _Planner(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                # Where a tensor lay when it was written is no part of it.
                item.tensor_data.properties.pin_memory = False
        return plan


class _Writer(FileSystemWriter):
    def __init__(self, folder: Path) -> None:
        # Nothing is copied ahead: torch would write the tensors in another order where there is a GPU, and wait for all
        # that the GPU has been given.
        super().__init__(folder, per_thread_copy_ahead=0)

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


def _state(parameters: NamedParameters, optimizer: torch.optim.Optimizer, policy_version: int) -> dict[str, Tensor]:
    return _tensors(parameters, optimizer) | {"policy_version": torch.tensor(policy_version)}


def _tensors(parameters: NamedParameters, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters:
        tensors[f"{_WEIGHTS}{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors
