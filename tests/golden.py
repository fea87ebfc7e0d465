"""Cases computed by another implementation: function, arguments and outputs, in a pair of files.

`RATCHET_GOLDEN=prefix` reads `prefix.json` and `prefix.npz` instead of the shared pair. Trap: test ids are made when
tests are collected, so a missing pair gives one case that skips, and not an error.
"""

import json
import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

_SHARED = Path(__file__).resolve().parents[2] / "shared" / "golden" / "verl_0_9_1"


@dataclass(frozen=True)
class Case:
    """One call of `function` and what it returned."""

    name: str
    function: str
    arguments: dict[str, Any]
    """Tensors and arrays by parameter."""
    options: dict[str, Any]
    outputs: list[Tensor]
    metrics: dict[str, float] = field(default_factory=dict)


def golden_cases(*functions: str) -> list[Any]:
    """Return pytest parameters, one for each case of a function whose name begins with one of `functions`."""
    found = [name for name, case in _index().items() if case["fn"].startswith(functions)]
    if not found:
        return [pytest.param(None, marks=pytest.mark.skip(reason=f"no golden cases of {functions} at {_prefix()}"))]
    return [pytest.param(name, id=name) for name in found]


def golden_case(name: str) -> Case:
    """Return the case of that name with its tensors."""
    case, arrays = _index()[name], _arrays()
    arguments = {key: _value(arrays[place]) for key, place in case["args"].items()}
    outputs = [torch.from_numpy(np.array(arrays[place])) for place in case["out"]]
    return Case(name, case["fn"], arguments, case["kwargs"], outputs, case.get("metrics", {}))


def golden_functions() -> set[str]:
    """Return the name of every function that has a case."""
    return {case["fn"] for case in _index().values()}


def _value(array: Any) -> Any:
    return torch.from_numpy(np.array(array)) if array.dtype.kind in "biuf" else array


def _prefix() -> Path:
    return Path(os.environ.get("RATCHET_GOLDEN") or _SHARED)


@cache
def _index() -> dict[str, Any]:
    path = _prefix().with_name(_prefix().name + ".json")
    if not path.is_file():
        return {}
    cases: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return cases


@cache
def _arrays() -> Any:
    return np.load(_prefix().with_name(_prefix().name + ".npz"), allow_pickle=False)
