"""Exchanged layers: where they are exchanged, and that plain formulas in Liger's place change nothing."""

import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ratchet.engines import liger
from ratchet.engines.log_probs import PackedLogProbs
from ratchet.engines.model import load_causal_lm
from ratchet.engines.packed import pack
from ratchet.engines.trainer import TrainerSettings
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")
SETTINGS = TrainerSettings(lr=1e-3, mini_batch_size=1)
CALLS: list[str] = []


def norm(x: Tensor, weight: Tensor, eps: float, offset: float, mode: str, in_place: bool, row_mode: None) -> Tensor:
    CALLS.append("norm")
    assert (mode, offset) in (("llama", 0.0), ("gemma", 1.0))
    # What overwrites its gradient must be the only reader of its output.
    assert not in_place or mode == "llama"
    return functional.rms_norm(x, x.shape[-1:], weight + offset, eps)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    CALLS.append("product")
    return gate * torch.sigmoid(gate) * up


def gelu_product(gate: Tensor, up: Tensor) -> Tensor:
    CALLS.append("product")
    return functional.gelu(gate, approximate="tanh") * up


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    CALLS.append("rope")
    half = cos.shape[-1] // 2
    turn = torch.complex(cos, sin)[:, None, :, :half]

    def turned(heads: Tensor) -> Tensor:
        both = torch.complex(heads[..., :half], heads[..., half:]) * turn
        return torch.cat([both.real, both.imag], -1)

    return turned(query), turned(key)


def operations() -> ModuleType:
    """Plain formulas under the names of Liger's operations."""
    module = ModuleType("operations")
    for name, function in (
        ("LigerRMSNormFunction", norm),
        ("LigerSiLUMulFunction", silu_product),
        ("LigerGELUMulFunction", gelu_product),
        ("LigerRopeFunction", rope),
    ):
        setattr(module, name, type(name, (), {"apply": staticmethod(function)}))
    return module


def log_probs(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = PackedLogProbs(model, temperature=1.0)(pack([[5, 6, 7], [8]], [[30], [40, 41]], None, CPU))[0]
    return found


@pytest.mark.parametrize(
    ("architecture", "norms"),
    [("llama", 5), ("qwen2", 5), ("qwen3", 9), ("mistral", 5), ("gemma", 5), ("gemma2", 9), ("gemma3_text", 13)],
)
def test_the_layers_of_one_model_are_exchanged(
    architecture: str, norms: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liger, "_operations", operations)
    folder = make_tiny_model(tmp_path, architecture=architecture)
    other, model = (load_causal_lm(folder, torch.float32) for _ in range(2))
    liger.use_liger(model)
    CALLS.clear()
    expected = log_probs(other)
    assert not CALLS
    torch.testing.assert_close(log_probs(model), expected, atol=1e-4, rtol=0)
    assert {name: CALLS.count(name) for name in ("norm", "product", "rope")} == {"norm": norms, "product": 2, "rope": 2}


def test_a_model_that_liger_cannot_serve_is_left_alone_and_the_log_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    liger._say.cache_clear()
    caplog.set_level(logging.INFO)
    model = load_causal_lm(make_tiny_model(tmp_path, architecture="phi3"), torch.float32)
    for found, message in ((operations(), "not tried with models of type phi3"), (None, "cannot be imported")):
        monkeypatch.setattr(liger, "_operations", lambda found=found: found)
        for _ in range(2):
            liger.use_liger(model)
        assert caplog.text.count(message) == 1
    assert not any("forward" in vars(module) for module in model.modules())


def test_on_a_cpu_nothing_is_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "_operations", operations)
    model = load_causal_lm(make_tiny_model(tmp_path), torch.float32)
    liger.make_faster(model, SETTINGS, CPU)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_are_compiled_once_for_all_lengths(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    plain, compiled = (load_causal_lm(folder, torch.float32) for _ in range(2))
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    liger.compile_layers(compiled, backend=backend)
    modules = [PackedLogProbs(model, temperature=1.0) for model in (plain, compiled)]
    counts = []
    for rows in (2, 3, 5):
        packed = pack([[5, 6, 7][: 1 + row % 3] for row in range(rows)], [[30] * rows] * rows, None, CPU)
        expected, found = (module(packed).log_probs for module in modules)
        torch.testing.assert_close(found, expected)
        counts.append(len(graphs))
    assert counts[0] > 0
    assert counts == [counts[0]] * 3
