"""Counts the bytes of the tensors that are alive, operation by operation, whether or not they have memory.

Trap: a tensor on torch's device "meta" has a size and no memory, so that a model of any size can be run through in a
second; what a kernel allocates within itself is in nobody's count.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, counts the storages that operations make until they are let go of."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """`known` were there before and are not counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        """Bytes now."""
        self.peak = 0
        """The most at any time."""
        self._storages: dict[int, Any] = {}
        for tensor in known:
            self._note(tensor, counts=False)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf, counts=True)
        return result

    def _note(self, tensor: Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes() if counts else 0

        def gone(_: Any) -> None:
            self._storages.pop(key, None)
            self.live -= size

        self._storages[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each storage once."""
    return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values())
