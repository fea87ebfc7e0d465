"""A file in memory is safetensors' own, byte for byte."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ratchet.engines.flat_weights import FlatWeights
from ratchet.errors import EngineError

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
    torch.int16,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.uint32,
    torch.float32,
    torch.complex64,
    torch.float64,
    torch.int64,
    torch.uint64,
]


def tensors(shape: tuple[int, ...], *dtypes: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(0, 100, shape, generator=generator)
    return {f"{str(dtype)[6:]}.{len(shape)}": drawn.to(dtype) for dtype in dtypes}


def assert_is_the_file(flat: FlatWeights, weights: dict[str, Tensor], folder: Path) -> None:
    save_file(weights, folder / "theirs.safetensors", metadata={"format": "pt"})
    flat.wait()
    (folder / "ours.safetensors").write_bytes(flat.data)
    theirs = (folder / "theirs.safetensors").read_bytes()
    assert (folder / "ours.safetensors").read_bytes() == theirs
    assert bytes(flat.data) == theirs
    assert hashlib.sha256(flat.data).digest() == hashlib.sha256(theirs).digest()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (7, 0, 2), (2, 3, 5)])
def test_every_dtype_and_shape_has_safetensors_bytes(shape: tuple[int, ...], tmp_path: Path) -> None:
    for dtype in DTYPES:
        weights = tensors(shape, dtype)
        assert_is_the_file(FlatWeights.like(weights), weights, tmp_path)


def test_mixed_dtypes_many_names_and_no_weights_have_safetensors_bytes(tmp_path: Path) -> None:
    mixed = {**tensors((3, 5), *DTYPES), **tensors((7,), *reversed(DTYPES)), **tensors((), *DTYPES)}
    names = [f"model.layers.{number}.weight" for number in range(120)] + [
        'ü "quoted" \\',
        "日本",
        "z",
        "A",
        "a.b",
        "a-b",
    ]
    many = {name: torch.full((number % 4, 3), number).bfloat16() for number, name in enumerate(names)}
    for weights in (mixed, many, {}):
        assert_is_the_file(FlatWeights.like(weights), weights, tmp_path)
    assert load_file(tmp_path / "ours.safetensors") == {}


def test_filling_again_replaces_every_value_and_no_byte_of_the_header(tmp_path: Path) -> None:
    first = tensors((4, 3), torch.float32, torch.bfloat16)
    second = {name: tensor + 1 for name, tensor in reversed(first.items())}
    # Not contiguous in memory, which the file is.
    second["float32.2"] = second["float32.2"].T.contiguous().T
    flat = FlatWeights.like(first)
    data = flat.data
    flat.fill(second)
    assert_is_the_file(flat, {name: tensor.contiguous() for name, tensor in second.items()}, tmp_path)
    assert bytes(data) == bytes(flat.data)
    assert data.readonly


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": torch.zeros(2)}, "expected the 2 weights of the file, got others: \\['b'\\]"),
        ({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}, "'c'"),
        ({"a": torch.zeros(2), "b": torch.zeros(1, 3)}, r"expected torch.float32 \[3\] for 'b', got .* \[1, 3\]"),
        ({"a": torch.zeros(2).half(), "b": torch.zeros(3)}, "for 'a', got torch.float16"),
    ],
)
def test_weights_of_another_layout_are_refused_before_any_is_copied(weights: dict[str, Tensor], message: str) -> None:
    flat = FlatWeights.like({"a": torch.ones(2), "b": torch.ones(3)})
    before = bytes(flat.data)
    with pytest.raises(EngineError, match=message):
        flat.fill(weights)
    assert bytes(flat.data) == before


def test_a_dtype_that_no_file_holds_is_refused() -> None:
    with pytest.raises(EngineError, match=r"got torch.complex128 of 'a'"):
        FlatWeights.like({"a": torch.zeros(2, dtype=torch.complex128)})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_from_a_gpu_are_pinned_and_there_after_the_wait(tmp_path: Path) -> None:
    weights = {name: tensor.cuda() for name, tensor in tensors((257, 31), *DTYPES).items()}
    flat = FlatWeights.like(weights)
    flat.wait()
    assert_is_the_file(flat, {name: tensor.cpu() for name, tensor in weights.items()}, tmp_path)
    later = {name: tensor.flip(0) for name, tensor in weights.items()}
    flat.fill(later)
    assert_is_the_file(flat, {name: tensor.cpu() for name, tensor in later.items()}, tmp_path)
